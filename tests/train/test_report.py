"""What training prints: compilation, every evaluation, the loss curve, the time of each phase, what to try next."""

import io
import itertools
import time

import pytest
from rich.console import Console

from jaxformer.config import CheckpointConfig, EvaluateConfig, OptimConfig, TrainConfig
from jaxformer.train.loop import train
from jaxformer.train.progress import PhaseTimer
from jaxformer.train.report import plot_losses


def test_the_output_of_a_run(make_config, tmp_path):
    config = make_config(
        workdir=str(tmp_path / "run"),
        optim=OptimConfig(schedule={"kind": "constant"}),
        train=TrainConfig(steps=4, log_every=1),
        evaluate=EvaluateConfig(every=2, batches=1),
        checkpoint=CheckpointConfig(every=10),
    )
    console = Console(file=io.StringIO(), width=100)
    train(config, console)
    output = console.file.getvalue()
    assert output.index("compiling the train step...") < output.index("step 1/4")
    evaluations = [line for line in output.splitlines() if "held-out perplexity" in line]
    assert [line.split()[1] for line in evaluations] == ["2/4", "4/4"]
    assert "training loss" in output
    phases = next(line for line in output.splitlines() if line.startswith("time: "))
    for phase in ("data", "compilation", "training", "evaluation", "checkpoints"):
        assert f"{phase} " in phases
    assert f"jaxformer evaluate {tmp_path / 'run'}" in output


def test_phases_add_up():
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("training"):
            time.sleep(0.01)
    with pytest.raises(ValueError, match="inside"), timer.phase("evaluation"):
        raise ValueError("inside")
    assert list(timer.seconds) == ["training", "evaluation"]
    assert timer.seconds["training"] >= 0.02


@pytest.mark.parametrize("losses", [[4.0, 3.0, 2.5], [1.0, 9.0, 1.0], [3.0, 3.0, 3.0]])
def test_a_loss_curve_is_one_connected_line(losses):
    """Every column has a dot, and neighbouring columns touch."""
    width, height = 20, 4
    title, *rows, axis = plot_losses([10, 20, 30], losses, width, height)
    assert title == "training loss"
    assert axis.split() == ["step", "10", "step", "30"]
    assert rows[0].split()[0] == f"{max(losses):.2f}"
    assert rows[-1].split()[0] == f"{min(losses):.2f}"
    columns = [_dots([row[9:] for row in rows], column) for column in range(2 * width)]
    assert all(columns)
    for before, after in itertools.pairwise(columns):
        assert min(after) <= max(before) + 1
        assert min(before) <= max(after) + 1


def _dots(rows: list[str], column: int) -> set[int]:
    """The vertical positions of the dots in one column of a braille plot."""
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))[column % 2]
    cells = [ord(row[column // 2]) - 0x2800 for row in rows]
    return {4 * i + j for i, cell in enumerate(cells) for j, bit in enumerate(bits) if cell & bit}
