"""Training recurrent models: golden numbers, every mesh, a full run, FLOPs."""

import json

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxformer import generate, load
from jaxformer.config import MeshConfig, OptimConfig, TrainConfig
from jaxformer.layers import num_params
from jaxformer.models.rnn import rnn
from jaxformer.train.loop import train
from jaxformer.train.metrics import step_flops

CELLS = ["elman", "lstm"]
GOLDEN = {
    "elman": [(5.577304, 0.157930), (5.587503, 0.154718), (5.580204, 0.157025)],
    "lstm": [(5.575615, 0.0852386), (5.576447, 0.0966125), (5.573633, 0.0994757)],
}
LSTM_FIRST = ["lstm", pytest.param("elman", marks=pytest.mark.slow)]
MESHES = [{"data": 8}, {"fsdp": 8, "data": 1}, {"tensor": 8, "data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.fixture
def recurrent_config(make_config):
    def make(cell, dim=16, **fields):
        model = rnn(cell=cell, num_layers=2, embed_dim=16, dim=dim, vocab_size=264, dropout=fields.pop("dropout", 0.0))
        return make_config(model=model, **fields)

    return make


@pytest.mark.parametrize("cell", CELLS)
def test_golden_losses_of_recurrent_models(cell, recurrent_config, run_steps):
    """Update these numbers only when the mathematics of a step changes on purpose, and say so in the commit."""
    _, history = run_steps(recurrent_config(cell), num_steps=3)
    actual = [(h["loss"], h["grad_norm"]) for h in history]
    np.testing.assert_allclose(actual, GOLDEN[cell], rtol=2e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, id="-".join(f"{a}{n}" for a, n in sizes.items()), marks=pytest.mark.slow if i < 3 else ())
        for i, sizes in enumerate(MESHES)
    ],
)
@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_a_recurrent_model_on_eight_devices_equals_one(cell, sizes, recurrent_config, run_steps):
    """With an output projection and with dropout, whose masks must not depend on the mesh."""
    fields = {"dim": 32, "dropout": 0.2, "optim": OptimConfig(learning_rate=1e-2, weight_decay=0.1)}
    _, one = run_steps(recurrent_config(cell, **fields), num_steps=3)
    _, eight = run_steps(recurrent_config(cell, **fields, mesh=MeshConfig(**sizes)), 3, num_devices=8)
    for a, b in zip(one, eight, strict=True):
        for name in ("loss", "grad_norm", "param_norm"):
            # Wider than for a transformer: Adam's first steps amplify the rounding errors of 32 recurrent steps.
            np.testing.assert_allclose(a[name], b[name], rtol=3e-5, err_msg=name)


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_recurrent_gradients_on_eight_devices_equal_one(cell, recurrent_config, run_steps):
    """With plain SGD and a learning rate of 1, the change of the parameters is the gradient."""
    optim = OptimConfig(algorithm={"kind": "sgd"}, learning_rate=1.0, clip_norm=None, schedule={"kind": "constant"})
    one, _ = run_steps(recurrent_config(cell, dim=32, optim=optim), num_steps=1)
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    eight, _ = run_steps(recurrent_config(cell, dim=32, optim=optim, mesh=mesh), num_steps=1, num_devices=8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one.params, eight.params)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_a_full_run_from_data_to_samples(cell, recurrent_config, tmp_path):
    """Training, evaluation and a checkpoint; the loaded checkpoint generates the same text as the trained model."""
    config = recurrent_config(
        cell,
        dim=24,
        workdir=str(tmp_path / cell),
        train=TrainConfig(steps=60, log_every=1),
        optim=OptimConfig(learning_rate=2e-2, schedule={"kind": "constant"}),
    )
    trained = train(config, Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / cell / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(np.log(264), rel=0.1)
    assert lines[-1]["loss"] < 1.5
    assert lines[-1]["heldout_loss"] < 1.5
    again = load(tmp_path / cell)
    text = generate(again, ["doc"], max_new_tokens=12)
    assert text[0].startswith("ument ")
    assert text == generate(trained, ["doc"], max_new_tokens=12)


@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("cell", CELLS)
def test_flops_are_six_per_weight_and_token(cell, dim, recurrent_config):
    """The tied embedding table counts once, for the head: lookups cost no FLOPs."""
    config = recurrent_config(cell, dim)
    num_gates = {"elman": 1, "lstm": 4}[cell]
    biases = 2 * num_gates * dim + config.model.vocab_size
    tokens = config.data.batch_size * config.data.length
    assert step_flops(config) == 6 * (num_params(config.model) - biases) * tokens
