"""Early stopping on any metric, also across an interruption."""

import json

import pytest
from rich.console import Console

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    ByteTokenizer,
    CheckpointConfig,
    Classification,
    Classify,
    DataConfig,
    EvaluateConfig,
    MemorySource,
    OptimConfig,
    PoolerConfig,
    RunConfig,
    TrainConfig,
)
from jaxformer.models.bert import bert
from jaxformer.rundir import RunDir
from jaxformer.train.early_stopping import EarlyStopping
from jaxformer.train.loop import train

EXAMPLES = tuple({"text": f"{word} {i}", "label": word} for i in range(8) for word in ("good", "bad"))


def make_config(workdir, best: str = "heldout_loss", steps: int = 40, learning_rate: float = 0.0, patience: int = 2):
    model = bert(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, vocab_size=300, dropout=0.0)
    return RunConfig(
        workdir=str(workdir),
        model=model.replace(head=None, pooler=PoolerConfig(num_classes=2)),
        data=DataConfig(
            train=MemorySource(examples=EXAMPLES),
            heldout=MemorySource(examples=EXAMPLES),
            tokenizer=ByteTokenizer(),
            objective=Classify(),
            length=16,
            batch_size=8,
        ),
        optim=OptimConfig(learning_rate=learning_rate or 1e-12, schedule={"kind": "constant"}),
        train=TrainConfig(steps=steps, log_every=1, early_stopping={"patience": patience, "min_delta": 1e-4}),
        checkpoint=CheckpointConfig(every=2, best=best),
        evaluate=EvaluateConfig(every=2, metrics=(Classification(),)),
    )


def last_step(workdir) -> int:
    return json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])["step"]


@pytest.mark.parametrize("best", ["heldout_loss", "matthews", "class_accuracy"])
def test_a_run_that_does_not_learn_stops(tmp_path, best):
    run = train(make_config(tmp_path, best), Console(quiet=True))
    assert run.step == last_step(tmp_path) == 6, "the first evaluation is the best, two more are not better"


def test_a_run_that_learns_does_not_stop(tmp_path):
    run = train(make_config(tmp_path, steps=12, learning_rate=1e-3), Console(quiet=True))
    assert run.step == 12


def test_the_best_state_is_saved_between_checkpoints(tmp_path):
    config = make_config(tmp_path)
    train(config.replace(checkpoint=config.checkpoint.replace(every=1000)), Console(quiet=True))
    with Checkpoints(RunDir(tmp_path)) as checkpoints:
        assert checkpoints.steps == [2, 6], "the best step and the last one"


def test_an_interrupted_run_stops_at_the_same_step_and_stays_complete(tmp_path, capsys):
    train(make_config(tmp_path, steps=4), Console(quiet=True))
    assert last_step(tmp_path) == 4
    assert train(make_config(tmp_path), Console(quiet=True)).step == 6
    assert train(make_config(tmp_path), Console()).step == 6
    assert "stopped early at step 6: heldout_loss has not improved since step 2" in " ".join(
        capsys.readouterr().out.split()
    )
    assert train(make_config(tmp_path, patience=3), Console(quiet=True)).step == 8


def test_nan_is_never_an_improvement(tmp_path):
    stopping = EarlyStopping(make_config(tmp_path, "matthews"), None)
    for step, value in ((1, float("nan")), (2, 0.1), (3, float("nan")), (4, 0.05)):
        stopping.add(step, {"matthews": value})
        assert stopping.stops == (step == 4)


def test_a_value_that_no_metric_reports_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.best='bleu' is not a value of evaluate\.metrics"):
        make_config(tmp_path, "bleu")
