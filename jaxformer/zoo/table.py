"""The zoo table. Parity is recorded by `jaxformer zoo --measure`, so that printing the table does not need torch."""

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxformer.config import OBJECTIVE_CONFIGS, HeadConfig, ModelConfig, ObjectiveConfig, PoolerConfig
from jaxformer.convert import SAMPLES
from jaxformer.errors import UserError
from jaxformer.models import FAMILIES
from jaxformer.models.presets import Preset, ZooRow

RECORD = Path(__file__).parent / "record.json"
HEADINGS = (
    "Family",
    "Shape",
    "Presets",
    "Parameters",
    "max abs delta logit",
    "KL, nats",
    "Import / export",
    "Objectives",
)


class Row(NamedTuple):
    """One row of the table: the presets of one architecture, and the sample models that its parity is measured on."""

    title: str
    presets: Mapping[str, Preset]
    samples: tuple[str, ...]
    """Names of the sample models; empty if transformers does not have the architecture."""


def rows() -> list[Row]:
    """All rows, derived from the registries of families and of sample models."""
    return [Row(row.title, row.presets, _sample_names(row)) for family in FAMILIES.values() for row in family.ZOO_ROWS]


def _sample_names(row: ZooRow) -> tuple[str, ...]:
    return tuple(name for name, sample in SAMPLES.items() if sample.preset in row.presets)


def show(console: Console) -> None:
    """Print the table to a terminal."""
    table = Table(title="model zoo", caption=_caption(), box=SIMPLE_HEAD, padding=0, pad_edge=False)
    # Widths of the longest words, so that a terminal of 80 columns breaks none.
    widths = {"family": 15, "presets": None, "max\ndelta": 5, "KL": 5, "Hugging\nFace": 11, "objectives": 10}
    for heading, width in widths.items():
        table.add_column(heading, overflow="fold", no_wrap=heading == "presets", min_width=width)
    for title, shape, presets, parameters, *rest in _cells():
        pairs = zip(presets.split(", "), parameters.split(", "), strict=True)
        table.add_row(f"{title}\n{shape}", "\n".join(f"{name} {count}" for name, count in pairs), *rest)
    console.print(table)


def markdown() -> str:
    """The table as Markdown, for the README."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells) + " |" for cells in _cells()]
    return "\n".join([*lines, "", _caption()])


def measure(console: Console) -> None:
    """Measure the parity of every sample and record it; needs torch and transformers."""
    try:
        versions = {name: metadata.version(name) for name in ("transformers", "torch", "jax")}
    except metadata.PackageNotFoundError as error:
        raise UserError(f"zoo --measure: {error.name} is not installed: pip install 'jaxformer[test]'") from None
    from jaxformer.zoo.parity import measure

    parity = {}
    for name in track(SAMPLES, "comparing with transformers", console=console):
        parity[name] = measure(SAMPLES[name])._asdict()
    record = {"versions": versions, "parity": parity}
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _cells() -> list[tuple[str, ...]]:
    parity = read_record()["parity"]
    return [_row_cells(row, parity) for row in rows()]


def objectives(row: Row) -> list[str]:
    """Names of the objectives that can train a model of this row, with the head that each of them needs."""
    model = next(iter(row.presets.values())).build()
    models = [model, model.replace(head=HeadConfig())]
    models += [model.replace(pooler=PoolerConfig(pooling=pooling, num_classes=2)) for pooling in ("last", "none")]
    if model.shape == "decoder-only" and model.decoder.kind == "transformer":
        models.append(model.replace(prefix=True))
    return [
        config.model_fields["kind"].default
        for config in OBJECTIVE_CONFIGS
        if any(_can_train(config, each) for each in models)
    ]


def _can_train(config: type[ObjectiveConfig], model: ModelConfig) -> bool:
    try:
        config.model_construct().check_model(model)  # lengths, which some objectives require, do not matter here
    except ValueError:
        return False
    return True


def _row_cells(row: Row, parity: dict[str, Any]) -> tuple[str, ...]:
    shape = next(iter(row.presets.values())).build().shape
    measured = [parity[name] for name in row.samples if name in parity]
    divergences = [result["kl"] for result in measured if result["kl"] is not None]
    return (
        row.title,
        shape,
        ", ".join(row.presets),
        ", ".join(_format_count(preset.num_params) for preset in row.presets.values()),
        f"{max(result['max_delta'] for result in measured):.0e}" if measured else "-",
        f"{max(divergences):.0e}" if divergences else "-",
        ", ".join(dict.fromkeys(SAMPLES[name].model_type for name in row.samples)) or "-",
        ", ".join(objectives(row)) or "-",
    )


def _format_count(parameters: int) -> str:
    unit, name = (1e9, "B") if parameters >= 0.9995e9 else (1e6, "M")  # 999.9M would round to 1e+03M
    return f"{parameters / unit:.3g}{name}"


def _caption() -> str:
    versions = read_record()["versions"]
    return (
        "Largest absolute difference of logits (hidden states for encoders without a head) and mean KL divergence of "
        f"the next-token distributions between jaxformer and transformers {versions['transformers']} "
        f"(torch {versions['torch']}), for tiny models with the same random weights in float32. Word vectors "
        "(models.word2vec) have no row: the objective word2vec trains them."
    )
