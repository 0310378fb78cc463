"""Averages of checkpoints as new runs."""

import json

import jax
import numpy as np
import pytest
from rich.console import Console

import jaxformer as jf
from jaxformer.average import average_run
from jaxformer.cli import main
from jaxformer.config import (
    ByteTokenizer,
    CheckpointConfig,
    DataConfig,
    MemorySource,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from jaxformer.errors import UserError
from jaxformer.models.gpt2 import gpt2
from jaxformer.train.loop import train

STEPS = (2, 4, 6, 8)


def make_config(workdir, **train_options) -> RunConfig:
    source = MemorySource(documents=("one text", "another text", "a third text") * 8)
    return RunConfig(
        workdir=str(workdir),
        model=gpt2(num_layers=1, embed_dim=16, num_heads=2, vocab_size=260, context_length=16),
        data=DataConfig(train=source, heldout=source, tokenizer=ByteTokenizer(), length=16, batch_size=8),
        optim=OptimConfig(learning_rate=1e-2, schedule={"kind": "constant"}),
        train=TrainConfig(steps=8, **train_options),
        checkpoint=CheckpointConfig(every=2, keep_last=4, keep_best=0),
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("average") / "run"
    train(make_config(path), Console(quiet=True))
    return path


@pytest.mark.parametrize(
    ("options", "steps"), [({"last": 3}, (4, 6, 8)), ({"steps": [8, 2]}, (2, 8)), ({"last": 1}, (8,))]
)
def test_an_average_is_the_mean_of_the_parameters(workdir, tmp_path, options, steps):
    average_run(workdir, tmp_path / "mean", **options)
    runs = [jf.load(workdir, step=step) for step in steps]
    expected = jax.tree.map(
        lambda *leaves: np.mean(np.stack(leaves).astype(np.float64), axis=0), *(r.params for r in runs)
    )
    averaged = jf.load(tmp_path / "mean")
    assert averaged.step == max(steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), averaged.params, expected)
    assert json.loads((tmp_path / "mean" / "average.json").read_text()) == {"run": str(workdir), "steps": list(steps)}


def test_an_average_is_a_run(workdir, tmp_path, capsys):
    assert main(["average", str(workdir), str(tmp_path / "mean"), "--last", "2"]) == 0
    assert "average of steps 6, 8" in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", str(tmp_path / "mean")]) == 0
    assert main(["generate", str(tmp_path / "mean"), "--prompt", "one", "--max-new-tokens", "2"]) == 0
    start = make_config(tmp_path / "next", start=str(tmp_path / "mean"))
    assert train(start.replace(train=start.train.replace(steps=1)), Console(quiet=True)).step == 1


def test_an_average_is_not_trained_in_place(workdir, tmp_path):
    average_run(workdir, tmp_path / "mean", last=2)
    with pytest.raises(UserError, match=r"is an average of checkpoints.*set train\.start="):
        train(make_config(tmp_path / "mean"), Console(quiet=True))


def test_frozen_parameters_are_kept(tmp_path):
    config = make_config(tmp_path / "run", freeze=("embedding/*",))
    train(config, Console(quiet=True))
    average_run(tmp_path / "run", tmp_path / "mean", last=4)
    ours, theirs = (jf.load(tmp_path / name).params["embedding"]["tokens"] for name in ("mean", "run"))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"last": 5}, "5"), ({"last": 0}, "0"), ({"steps": [3]}, "3"), ({}, "last"), ({"last": 1, "steps": [2]}, "last")],
)
def test_bad_selections_are_errors_and_write_nothing(workdir, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        average_run(workdir, tmp_path / "mean", **options)
    assert not list(tmp_path.iterdir())


def test_existing_targets_are_kept(workdir, tmp_path):
    (tmp_path / "mean").mkdir()
    (tmp_path / "mean" / "file").write_text("mine")
    with pytest.raises(UserError, match="mean"):
        average_run(workdir, tmp_path / "mean", last=2)
    assert [file.name for file in (tmp_path / "mean").iterdir()] == ["file"]
