"""Optimizers and learning rate schedules built from their configs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.config import OptimConfig
from jaxformer.layers import abstract_params, init_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.train.optim import decay_mask, make_optimizer, make_schedule

MODEL = gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=32, context_length=16)


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_every_algorithm_minimises_a_quadratic(kind):
    """A few steps reduce the squared distance to other parameters."""
    config = OptimConfig(algorithm={"kind": kind}, learning_rate=1e-2, schedule={"kind": "constant"})
    optimizer = make_optimizer(config, 100, abstract_params(MODEL)[1])
    params, goal = init_params(MODEL, jax.random.key(0)), init_params(MODEL, jax.random.key(1))

    def distance(params):
        return sum(jnp.square(a - b).sum() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True))

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(distance)(params), state, params)
        return optax.apply_updates(params, updates), state

    state, before = optimizer.init(params), distance(params)
    for _ in range(5):
        params, state = step(params, state)
    assert distance(params) < before


def test_norms_and_biases_do_not_decay():
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(abstract_params(MODEL)[0]))
    decayed = {jax.tree_util.keystr(path[-1:], simple=True) for path, flag in mask if flag}
    not_decayed = {jax.tree_util.keystr(path[-1:], simple=True) for path, flag in mask if not flag}
    assert decayed == {"kernel", "tokens", "positions"}
    assert not_decayed == {"scale", "bias"}


def test_decay_is_decoupled_from_the_gradient():
    config = OptimConfig(learning_rate=0.1, weight_decay=0.5, schedule={"kind": "constant"})
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    optimizer = make_optimizer(config, 10, {"kernel": ("embed", "mlp"), "bias": ("mlp",)})
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.05 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_allclose(updates["bias"], 0.0)


def test_muon_orthogonalises_matrices_of_blocks_only():
    model = gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=32, context_length=16)
    config = OptimConfig(algorithm={"kind": "muon"}, learning_rate=1.0, schedule={"kind": "constant"}, clip_norm=None)
    optimizer = make_optimizer(config, 10, abstract_params(model)[1])
    params = init_params(model, jax.random.key(0))
    grads = jax.tree.map(lambda a: jax.random.normal(jax.random.key(a.size), a.shape), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    up = updates["decoder"]["blocks_0"]["mlp"]["up"]["kernel"][0]
    singular = jnp.linalg.svd(up, compute_uv=False)
    assert singular.max() / singular.min() < 2.0  # five Newton-Schulz steps only make them similar
    assert jnp.linalg.cond(grads["decoder"]["blocks_0"]["mlp"]["up"]["kernel"][0]) > 2.0
    # All entries of the first update of Nesterov Adam have the same magnitude: 1 + b1 (1 - b1) / (1 - b1^2).
    np.testing.assert_allclose(jnp.abs(updates["embedding"]["tokens"]), 1 + 0.09 / 0.19, rtol=1e-3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "constant", "warmup_steps": 2}, {0: 0.0, 1: 0.5, 2: 1.0, 9: 1.0}),
        ({"kind": "linear", "warmup_steps": 2}, {0: 0.0, 2: 1.0, 6: 0.5, 10: 0.0}),
        ({"kind": "cosine", "warmup_steps": 2, "final": 0.1}, {2: 1.0, 6: 0.55, 10: 0.1, 12: 0.1}),
        ({"kind": "inverse_sqrt", "warmup_steps": 4}, {0: 0.0, 2: 0.5, 4: 1.0, 16: 0.5, 64: 0.25}),
        ({"kind": "wsd", "warmup_steps": 2, "decay_steps": 4}, {2: 1.0, 6: 1.0, 8: 0.5, 10: 0.0}),
    ],
)
def test_schedules_have_the_expected_values(schedule, expected):
    config = OptimConfig(schedule=schedule)
    function = make_schedule(config.schedule, 1.0, steps=10)
    for step, value in expected.items():
        assert float(function(step)) == pytest.approx(value, abs=1e-6), step


def test_inverse_sqrt_schedule_matches_the_paper():
    """arXiv:1706.03762, equation 3, with the peak learning rate that follows from its d_model and warm-up."""
    peak = 512**-0.5 * 4000**-0.5
    config = OptimConfig(schedule={"kind": "inverse_sqrt", "warmup_steps": 4000})
    function = make_schedule(config.schedule, peak, steps=100_000)
    for step in (1, 100, 4000, 4001, 50_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert float(function(step)) == pytest.approx(paper, rel=1e-5)


def test_muon_treats_every_expert_as_a_separate_matrix():
    from jaxformer.train.optim import _matrix_dims

    up, down = _matrix_dims(("layers", "expert", "embed", "mlp")), _matrix_dims(("layers", "expert", "mlp", "embed"))
    assert (up.reduction_axis, up.output_axis) == ((2,), (3,))
    assert (down.reduction_axis, down.output_axis) == ((2,), (3,))
    attention = _matrix_dims(("layers", "heads", "head_dim", "embed"))
    assert (attention.reduction_axis, attention.output_axis) == ((1, 2), (3,))


def test_relative_biases_do_not_decay():
    mask = decay_mask({"encoder": {"relative_bias": 0, "blocks_0": {"mlp": {"up": {"kernel": 0, "bias": 0}}}}})
    assert mask == {"encoder": {"relative_bias": False, "blocks_0": {"mlp": {"up": {"kernel": True, "bias": False}}}}}
