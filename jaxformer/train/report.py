"""What training prints besides its progress: the data, the model, and a summary at the end."""

import json
import shlex
from collections.abc import Sequence

import jax
import numpy as np
from rich.console import Console

from jaxformer.checkpoint import Checkpoints
from jaxformer.data import Sets
from jaxformer.evaluate.report import generate_samples
from jaxformer.ops.attention import Choices
from jaxformer.run import Run
from jaxformer.rundir import RunDir
from jaxformer.train.program import TrainProgram
from jaxformer.train.progress import DivergedError, PhaseTimer
from jaxformer.train.state import TrainState


def describe_data(sets: Sets) -> str:
    heldout = "" if sets.heldout is None else f", {sets.heldout.num_tokens:,} held out"
    num_tokens, length = sets.train.num_tokens, sets.train.layout.capacities[0]
    return f"data: {num_tokens:,} training tokens in {len(sets.train):,} rows of {length}{heldout}"


def describe_model(program: TrainProgram, state: TrainState, start: int) -> str:
    trained, fixed = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.params, state.frozen))
    frozen = f", {fixed:,} of them frozen" if fixed else ""
    start_from = program.config.train.start
    begins = "starting" if start_from is None else f"starting from {start_from.path}"
    devices = program.mesh.devices
    return (
        f"model: {program.config.model.shape}, {trained + fixed:,} parameters{frozen} on {devices.size} "
        f"{devices.flat[0].device_kind} device{'s' * (devices.size > 1)}; "
        + (f"continuing from step {start}" if start else begins)
    )


def describe_kernels(choices: Choices) -> list[str]:
    """One line for each kind of attention of a program: its kernel, and why preferred ones were skipped."""
    lines = []
    for inputs, choice in choices.items():
        reasons = "".join(f"; not {name}: {reason}" for name, reason in choice.skipped.items())
        lines.append(f"attention: {choice.kernel} for {inputs}{reasons}")
    return lines


def describe_early_stop(step: int, reason: str) -> str:
    return f"stopped early at step {step}: {reason}"


def describe_complete_run(run_dir: RunDir, step: int, steps: int, reason: str | None = None) -> str:
    """`reason` says why the run stopped early; None if it did not."""
    if reason is not None:
        remedy = "raise train.early_stopping.patience or set train.early_stopping=none to continue it"
        return f"the run in {run_dir} is complete, it {describe_early_stop(step, reason)}; {remedy}"
    reached = f"complete at step {step}" if step == steps else f"at step {step}, beyond train.steps={steps}"
    return f"the run in {run_dir} is {reached}; raise train.steps to continue it"


def explain_divergence(error: DivergedError, checkpoints: Checkpoints) -> str:
    checkpoints.wait()
    last = checkpoints.latest
    kept = "there is no checkpoint yet" if last is None else f"the last good checkpoint is step {last}"
    return (
        f"{error}: training stopped, {kept} in '{checkpoints.directory}'. "
        "Lower optim.learning_rate, increase optim.schedule.warmup_steps or set optim.clip_norm"
    )


# ---------------------------------------------------------------- the summary of a complete run
def print_report(console: Console, run: Run, run_dir: RunDir, timer: PhaseTimer) -> None:
    """Print samples, the loss curve, the time of each phase, the files and the commands to try next."""
    with timer.phase("samples"):
        samples = generate_samples(run)
    for prompt, output in samples:
        console.rule(style="dim")
        joined = f"{prompt}{output}" if run.config.model.shape == "decoder-only" else f"{prompt} -> {output}"
        console.print(joined, markup=False, highlight=False)
    console.rule(style="dim")
    steps, losses = _read_losses(run_dir)
    if len(losses) > 1 and console.encoding.startswith("utf"):
        console.print("\n".join(plot_losses(steps, losses)), markup=False, highlight=False)
    seconds = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in timer.seconds.items())
    console.print(f"time: {seconds}", soft_wrap=True)
    path = shlex.quote(str(run_dir))
    lines = [
        f"files: {run_dir} (config.json, metrics.jsonl, checkpoints, tensorboard)",
        f"next: {_next_use(run, path)}",
    ]
    if run.config.data.heldout is not None:
        lines.append(f"      jaxformer evaluate {path}")
    for line in lines:
        # Without wrapping, so that the commands can be copied.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _next_use(run: Run, path: str) -> str:
    """A command or a Python expression that uses the trained model."""
    model, prompts = run.config.model, run.config.evaluate.prompts
    head = run.config.data.objective.head
    if model.shape == "embedding-only":
        return f"jaxformer export {path} vectors.txt"
    if head == "vocabulary" and model.decoder is not None:
        return f"jaxformer generate {path} --prompt {shlex.quote(prompts[0] if prompts else '...')}"
    calls = {"classes": "classify(run, ['...'])", "tags": "tag(run, ['...'])"}
    call = calls.get(head, "fill_mask(run, '... <mask> ...')")
    return f"in Python: import jaxformer as jf; run = jf.load({path!r}); jf.{call}"


def _read_losses(run_dir: RunDir) -> tuple[list[int], list[float]]:
    """The logged training losses, also those of earlier starts of the same run."""
    records = [json.loads(line) for line in run_dir.metrics.read_text(encoding="utf-8").splitlines()]
    points = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    return [step for step, _ in points], [loss for _, loss in points]


# The dots of a braille character, by row and column; the Unicode code point is 0x2800 plus their sum.
BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def plot_losses(steps: Sequence[int], losses: Sequence[float], width: int = 60, height: int = 6) -> list[str]:
    """Draw a loss curve with braille characters, which have 2 x 4 dots each; returns the lines of text."""
    columns, rows = 2 * width, 4 * height
    curve = np.interp(np.linspace(steps[0], steps[-1], columns), steps, losses)
    low, high = min(losses), max(losses)
    scale = (rows - 1) / (high - low) if high > low else 0.0
    cells = np.zeros((height, width), int)
    dots = np.rint((high - curve) * scale).astype(int)
    # A steep curve skips rows between two columns; filling them keeps the line connected.
    for column, (dot, previous) in enumerate(zip(dots, [dots[0], *dots], strict=False)):
        for row in range(min(dot, previous), max(dot, previous) + 1):
            cells[row // 4, column // 2] |= BRAILLE_DOTS[row % 4][column % 2]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(i, ''):>8} " + "".join(chr(0x2800 + cell) for cell in row) for i, row in enumerate(cells)]
    first, last = f"step {steps[0]}", f"step {steps[-1]}"
    return ["training loss", *lines, " " * 9 + first + last.rjust(width - len(first))]
