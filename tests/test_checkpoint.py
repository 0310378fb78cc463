"""Checkpoints: which are kept, restoring on another mesh, and the errors of damaged ones."""

import jax
import numpy as np
import pytest

from jaxformer.checkpoint import Checkpoints, abstract_like
from jaxformer.config import (
    ByteTokenizer,
    CheckpointConfig,
    DataConfig,
    MemorySource,
    MeshConfig,
    OptimConfig,
    RunConfig,
)
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.rundir import RunDir
from jaxformer.sharding import make_mesh, param_shardings
from jaxformer.train.program import train_program


def _config(checkpoint: CheckpointConfig | None = None, **optim) -> RunConfig:
    return RunConfig(
        model=gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=264, context_length=32),
        data=DataConfig(train=MemorySource(documents=("x",)), tokenizer=ByteTokenizer(), length=16),
        optim=OptimConfig(**optim),
        checkpoint=checkpoint or CheckpointConfig(),
    )


def _state(config: RunConfig, **mesh):
    program = train_program(config.replace(mesh=MeshConfig(**mesh)), jax.devices())
    return program.init(), program.abstract_state


def _assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_last_and_best_are_kept(tmp_path):
    config = _config(CheckpointConfig(keep_last=2, keep_best=1))
    state, _ = _state(config)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 4.0, 5: None}
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, state, config, {"step": step}, None if loss is None else {"heldout_loss": loss})
        checkpoints.wait()
        assert checkpoints.steps == [2, 4, 5]
        assert checkpoints.latest == 5


def test_another_metric_can_select_the_best(tmp_path):
    """For accuracy, higher is better. A step at which it was not measured is not kept as best."""
    config = _config(CheckpointConfig(keep_last=1, keep_best=1, best="heldout_accuracy"))
    state, _ = _state(config)
    values = {1: {"heldout_accuracy": 0.5, "heldout_loss": 1.0}, 2: {"heldout_accuracy": 0.9, "heldout_loss": 9.0}}
    values |= {3: {"heldout_loss": 0.1}, 4: {"heldout_accuracy": 0.6, "heldout_loss": 0.2}}
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        for step, measured in values.items():
            checkpoints.save(step, state, config, {"step": step}, measured)
        checkpoints.wait()
        assert checkpoints.steps == [2, 4]


def test_state_is_restored_on_another_mesh(tmp_path):
    config = _config(ema_decay=0.9)
    state, _ = _state(config, data=1, fsdp=8)
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        checkpoints.save(7, state, config, {"step": 7})
    _, abstract = _state(config, data=2, fsdp=2, tensor=2)
    with Checkpoints(RunDir(tmp_path)) as checkpoints:
        restored, position = checkpoints.restore(abstract)
    assert position == {"step": 7}
    _assert_equal(restored, state)
    kernel = restored.params["decoder"]["blocks_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding == abstract.params["decoder"]["blocks_0"]["mlp"]["up"]["kernel"].sharding
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


@pytest.mark.parametrize("ema", [None, 0.9])
def test_restoring_only_the_parameters(tmp_path, ema):
    config = _config(ema_decay=ema)
    state, _ = _state(config)
    if ema:
        state.ema["embedding"]["tokens"] += 1.0
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        checkpoints.save(1, state, config, {"step": 1})
    shapes, axes = abstract_params(config.model)
    shardings = param_shardings(axes, shapes, make_mesh(MeshConfig(data=4, fsdp=2), jax.devices()))
    with Checkpoints(RunDir(tmp_path)) as checkpoints:
        params, frozen, step = checkpoints.restore_params(abstract_like(shapes, shardings))
    assert (frozen, step) == (None, 1)
    _assert_equal(params, state.params if ema is None else state.ema)


def test_errors_of_missing_and_unknown_steps(tmp_path):
    config = _config()
    state, abstract = _state(config)
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        with pytest.raises(UserError, match="no complete checkpoint"):
            checkpoints.restore(abstract)
        checkpoints.save(1, state, config, {"step": 1})
        checkpoints.wait()
        with pytest.raises(UserError, match=r"no checkpoint of step 9; there are: \[1\]"):
            checkpoints.restore(abstract, step=9)


@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    config = _config()
    state, abstract = _state(config)
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, config, {"step": step})
    for file in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
        if file.is_file() and file.stat().st_size > 0 and "commit" not in file.name:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if damage == "truncate" else file.unlink()
    with Checkpoints(RunDir(tmp_path)) as checkpoints:
        with pytest.raises(UserError, match=r"checkpoints/2' cannot be read.*go back to step 1"):
            checkpoints.restore(abstract)
        with pytest.raises(UserError, match=r"checkpoints/2' cannot be read.*go back to step 1"):
            checkpoints.restore_params(abstract.params)
        assert checkpoints.restore(abstract, step=1)[1] == {"step": 1}


def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    config = _config()
    state, _ = _state(config)
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        checkpoints.save(1, state, config, {"step": 1})
    wider = config.model_copy(update={"model": gpt2(num_layers=2, embed_dim=32, num_heads=2, vocab_size=264)})
    _, abstract = _state(wider)
    with Checkpoints(RunDir(tmp_path)) as checkpoints, pytest.raises(UserError, match="cannot be read"):
        checkpoints.restore(abstract)
