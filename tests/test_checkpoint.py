"""Checkpoints: what is kept, where it can be restored, and what a damaged one says."""

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
from jaxformer.sharding import make_mesh, param_shardings
from jaxformer.train.optim import make_optimizer
from jaxformer.train.state import init_state, state_shardings


def _config(**optim) -> RunConfig:
    return RunConfig(
        model=gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=264, max_length=32),
        data=DataConfig(train=MemorySource(documents=("x",)), tokenizer=ByteTokenizer(), length=16),
        optim=OptimConfig(**optim),
    )


def _state(config: RunConfig, **mesh):
    optimizer = make_optimizer(config.optim, 10, abstract_params(config.model)[1])
    abstract = jax.eval_shape(lambda: init_state(config, optimizer))
    shardings = state_shardings(config, abstract, make_mesh(MeshConfig(**mesh)))
    return jax.jit(lambda: init_state(config, optimizer), out_shardings=shardings)(), abstract_like(abstract, shardings)


def _assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_last_and_best_are_kept(tmp_path):
    config = _config()
    state, _ = _state(config)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 4.0, 5: None}
    with Checkpoints(tmp_path, CheckpointConfig(keep_last=2, keep_best=1)) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, state, config, {"step": step}, loss)
        checkpoints.wait()
        assert checkpoints.steps == [2, 4, 5]
        assert checkpoints.latest == 5


def test_state_returns_on_another_mesh(tmp_path):
    config = _config(ema_decay=0.9)
    state, _ = _state(config, data=1, fsdp=8)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(7, state, config, {"step": 7}, None)
    _, abstract = _state(config, data=2, fsdp=2, tensor=2)
    with Checkpoints(tmp_path) as checkpoints:
        restored, position = checkpoints.restore(abstract)
    assert position == {"step": 7}
    _assert_equal(restored, state)
    kernel = restored.params["decoder"]["blocks_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding == abstract.params["decoder"]["blocks_0"]["mlp"]["up"]["kernel"].sharding
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


@pytest.mark.parametrize("ema", [None, 0.9])
def test_parameters_alone(tmp_path, ema):
    config = _config(ema_decay=ema)
    state, _ = _state(config)
    if ema:
        state.ema["embedding"]["tokens"] += 1.0
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, config, {"step": 1}, None)
    shapes, axes = abstract_params(config.model)
    shardings = param_shardings(axes, shapes, make_mesh(MeshConfig(data=4, fsdp=2)))
    with Checkpoints(tmp_path) as checkpoints:
        params, step = checkpoints.restore_params(abstract_like(shapes, shardings))
    assert step == 1
    _assert_equal(params, state.best_params)


def test_missing_and_unknown_steps_are_named(tmp_path):
    config = _config()
    state, abstract = _state(config)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        with pytest.raises(UserError, match="no complete checkpoint"):
            checkpoints.restore(abstract)
        checkpoints.save(1, state, config, {"step": 1}, None)
        checkpoints.wait()
        with pytest.raises(UserError, match=r"no checkpoint of step 9; there are: \[1\]"):
            checkpoints.restore(abstract, step=9)


@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    config = _config()
    state, abstract = _state(config)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, config, {"step": step}, None)
    for file in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
        if file.is_file() and file.stat().st_size > 0 and "commit" not in file.name:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if damage == "truncate" else file.unlink()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"checkpoints/2' cannot be read.*go back to step 1"):
            checkpoints.restore(abstract)
        with pytest.raises(UserError, match=r"checkpoints/2' cannot be read.*go back to step 1"):
            checkpoints.restore_params(abstract.params)
        assert checkpoints.restore(abstract, step=1)[1] == {"step": 1}


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = _config()
    state, _ = _state(config)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, config, {"step": 1}, None)
    wider = config.model_copy(update={"model": gpt2(num_layers=2, embed_dim=32, num_heads=2, vocab_size=264)})
    _, abstract = _state(wider)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match="cannot be read"):
        checkpoints.restore(abstract)
