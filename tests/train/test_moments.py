"""Optimizer moments in bfloat16: their dtype, size and rounding, resuming, and the loss compared with float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import MeshConfig, OptimConfig
from jaxformer.layers import abstract_params, init_params, num_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.rundir import RunDir
from jaxformer.sharding import global_batch, path_name
from jaxformer.train.moments import store_in_bfloat16
from jaxformer.train.optim import make_optimizer
from jaxformer.train.program import train_program

MODEL = gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=32, context_length=16)
NUM_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}


def optimizer_of(kind: str, dtype: str) -> optax.GradientTransformation:
    momentum = {"momentum": 0.9} if kind == "sgd" else {}
    config = OptimConfig(algorithm={"kind": kind} | momentum, moment_dtype=dtype, schedule={"kind": "constant"})
    return make_optimizer(config, 100, abstract_params(MODEL)[1])


@pytest.mark.parametrize("kind", [*NUM_MOMENTS, "muon"])
def test_every_moment_is_stored_in_the_dtype(kind):
    params = init_params(MODEL, jax.random.key(0))
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = optimizer_of(kind, dtype)
        state = optimizer.init(params)
        after = jax.eval_shape(lambda p, s, o=optimizer: o.update(p, s, p)[1], params, state)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
        leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        moments = [leaf for path, leaf in leaves.items() if path.split("/")[-1] not in ("count", "ns_coeffs")]
        assert {leaf.dtype for leaf in moments} == {jnp.dtype(dtype)}
        sizes[dtype] = sum(leaf.nbytes for leaf in moments)
    assert sizes["float32"] == 2 * sizes["bfloat16"] > 0
    if kind in NUM_MOMENTS:
        assert sizes["bfloat16"] == 2 * NUM_MOMENTS[kind] * num_params(MODEL)


def test_moments_in_float32_have_the_state_of_optax():
    """Checkpoints of versions without the option have this tree."""
    params = init_params(MODEL, jax.random.key(0))
    adam = optax.scale_by_adam().init(params)
    assert jax.tree.structure(optimizer_of("adamw", "float32").init(params)[1]) == jax.tree.structure(adam)


def test_the_second_moment_decays_at_rates_near_one():
    """With rounding to nearest, 0.999 of a bfloat16 number is the same number."""
    b2, steps = 0.999, 700
    optimizer = store_in_bfloat16(optax.scale_by_adam(b2=b2))
    params = {"kernel": jnp.zeros(4096)}
    state = optimizer.init(params)
    state = state._replace(inner=state.inner._replace(nu={"kernel": jnp.ones(4096, jnp.bfloat16)}))
    assert jnp.bfloat16(b2 * state.inner.nu["kernel"][0]) == 1.0

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(0, steps, lambda _, state: optimizer.update(params, state)[1], state)

    nu = run(state).inner.nu["kernel"].astype(jnp.float32)
    assert float(nu.mean()) == pytest.approx(b2**steps, rel=0.01)


@pytest.fixture(scope="module")
def half() -> OptimConfig:
    return OptimConfig(moment_dtype="bfloat16", learning_rate=1e-2, schedule={"kind": "constant"})


def test_training_resumes_bit_identically(half, make_config, make_batch, tmp_path):
    config = make_config(optim=half, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    program = train_program(config, jax.devices())

    def advance(state, steps):
        with jax.set_mesh(program.mesh):
            for i in steps:
                state, _ = program.step(state, global_batch(make_batch(config, seed=i), program.mesh))
        return state

    state = advance(program.init(), range(2))
    with Checkpoints(RunDir(tmp_path), config) as checkpoints:
        checkpoints.save(2, state, config, {"step": 2})
    expected = jax.device_get(advance(state, range(2, 4)))
    with Checkpoints(RunDir(tmp_path)) as checkpoints:
        restored, _ = checkpoints.restore(program.abstract_state)
    moment = restored.opt_state[1].inner.nu["decoder"]["blocks_0"]["mlp"]["up"]["kernel"]
    assert moment.dtype == jnp.bfloat16
    assert moment.addressable_shards[0].data.size * 4 == moment.size, "sharded like the parameter"
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(advance(restored, range(2, 4))), expected)


def test_the_loss_stays_close_to_that_of_float32_moments(half, make_config, run_steps):
    losses = []
    for dtype in ("float32", "bfloat16"):
        _, history = run_steps(make_config(optim=half.replace(moment_dtype=dtype)), num_steps=30)
        losses.append(np.array([metrics["loss"] for metrics in history]))
    exact, rounded = losses
    np.testing.assert_allclose(rounded, exact, rtol=0.003)
    assert not np.array_equal(rounded, exact)
    assert np.ptp(exact) > 0.02
