"""Runs the experiments of `configs/`, and writes their results, figures and the tables in `configs/RESULTS.md`.

    JAXFORMER_DATA=DIR python configs/results/run.py multi30k_ende   # train, evaluate, write results/ and RESULTS.md
    python configs/results/run.py --table                            # only write RESULTS.md again

An experiment is a config file with a function `experiment(train)`. It trains its runs one after another with
`train(config)`, which skips complete runs and resumes interrupted ones, so an interrupted experiment continues if it is
started again. It returns a `Result`.
"""

import argparse
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.config import RunConfig

RESULTS = Path(__file__).resolve().parent
CONFIGS, TABLE = RESULTS.parent, RESULTS.parent / "RESULTS.md"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


@dataclass(frozen=True)
class Result:
    """What an experiment found."""

    title: str
    claim: str
    """What the experiment shows, in one or two sentences with the measured numbers."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """The table: one row per run or setting."""
    curves: Mapping[str, Sequence[tuple[float, float]]]
    """The lines of the figure: points (x, y) by name."""
    axes: tuple[str, str]
    """Labels of the axes of the figure."""


def run_experiment(name: str) -> None:
    """Run one experiment and write its files."""
    from jaxformer.startup import prepare_jax

    prepare_jax()
    from jaxformer.train.loop import train

    sys.path.insert(0, str(CONFIGS))
    experiment: Callable[..., Result] = importlib.import_module(name).experiment
    state = Path("runs") / f"{name}.seconds"
    before = float(state.read_text()) if state.exists() else 0.0
    started = time.perf_counter()

    def timed_train(config):
        """Train, and note the wall time so far, so that the time of an interrupted experiment is not lost."""
        run = train(config)
        state.parent.mkdir(exist_ok=True)
        state.write_text(str(before + time.perf_counter() - started))
        if not _is_complete(config, run.step):
            sys.exit(f"{config.workdir} stopped at step {run.step}; the same command continues from there")
        return run

    result = experiment(timed_train)
    seconds = before + time.perf_counter() - started
    record = {"name": name, "hardware": _hardware(), "wall_seconds": round(seconds)} | asdict(result)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.svg").write_text(figure(record), encoding="utf-8")
    TABLE.write_text(table(), encoding="utf-8")


def _is_complete(config: "RunConfig", step: int) -> bool:
    """Whether a run has reached its last step or was stopped early, rather than stopped by a signal."""
    from jaxformer.checkpoint import Checkpoints
    from jaxformer.rundir import RunDir
    from jaxformer.train.early_stopping import EarlyStopping

    if step >= config.train.steps:
        return True
    with Checkpoints(RunDir(config.workdir), config) as checkpoints:
        return EarlyStopping(config, checkpoints.position).stops


def table() -> str:
    """The content of RESULTS.md, from the files in results/."""
    lines = [
        "# Results",
        "",
        "Written by `python configs/results/run.py` from the files in `results/`; every number is from a run.",
    ]
    for file in sorted(RESULTS.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        minutes = record["wall_seconds"] / 60
        lines += ["", f"## {record['title']}", "", record["claim"], ""]
        lines += ["| " + " | ".join(record["columns"]) + " |", "|" + "---|" * len(record["columns"])]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in record["rows"]]
        lines += ["", f"![{record['title']}](results/{file.stem}.svg)", ""]
        lines += [
            f"`JAXFORMER_DATA=DIR python configs/results/run.py {file.stem}`, {minutes:.0f} minutes on "
            f"{record['hardware']}"
        ]
    return "\n".join(lines) + "\n"


def _hardware() -> str:
    import os

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores of an {model}"


# ---------------------------------------------------------------- figures
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 360, 64, 48


def figure(record: Mapping[str, Any]) -> str:
    """A line chart as SVG."""
    points = [point for curve in record["curves"].values() for point in curve]
    (x_low, x_high), (y_low, y_high) = ((min(v), max(v)) for v in zip(*points, strict=True))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x_low) / ((x_high - x_low) or 1), (y - y_low) / ((y_high - y_low) or 1)
        return LEFT + across * (WIDTH - LEFT - 16), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - 24)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(5):
        x, y = x_low + tick / 4 * (x_high - x_low), y_low + tick / 4 * (y_high - y_low)
        left, top = place(x, y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{top:.1f}" y2="{top:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{y:.4g}</text>')
        parts.append(f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.4g}</text>')
    for i, (name, curve) in enumerate(record["curves"].items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 24}" y="{20 + 16 * i}" text-anchor="end" fill="{colour}">{name}</text>')
    x_label, y_label = record["axes"]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_label}</text>')
    middle = HEIGHT / 2
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{y_label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def curve(workdir: str, value: str) -> list[tuple[float, float]]:
    """The values of a metric over the steps of a run, from its metrics.jsonl."""
    lines = (Path(workdir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record[value]) for record in records if record.get(value) is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="the experiment to run: the name of a config file")
    parser.add_argument("--table", action="store_true", help="only write RESULTS.md from the files in results/")
    args = parser.parse_args()
    if args.table == (args.name is not None):
        parser.error("give either the name of an experiment or --table")
    if args.table:
        TABLE.write_text(table(), encoding="utf-8")
    else:
        run_experiment(args.name)
