"""Mixture of experts against a loop over tokens and against transformers: outputs, gradients, router losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import MoeConfig, NormalInit
from jaxformer.layers import Runtime
from jaxformer.layers.moe import Moe
from jaxformer.ops.experts import Routes, apply_experts, route_tokens, router_losses

B, T, D, F, E = 2, 5, 8, 6, 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
COTANGENT = RNG.normal(size=X.shape).astype(np.float32)
LOGITS = RNG.normal(size=(B * T, E)).astype(np.float32)
REAL = np.array([1, 1, 1, 0, 0, 0, 1, 1, 1, 1], np.float32)
PARAMS = {
    "router": {"kernel": RNG.normal(size=(D, E)).astype(np.float32)},
    "gate": RNG.normal(size=(E, D, F)).astype(np.float32),
    "up": RNG.normal(size=(E, D, F)).astype(np.float32),
    "down": RNG.normal(size=(E, F, D)).astype(np.float32),
}


# ---------------------------------------------------------------- outputs
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, E])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_outputs_match_a_loop_over_tokens(gated, top_k, renormalize):
    ours = _moe(top_k, renormalize, gated)(_params(gated), X)
    expected = np.zeros_like(X)
    for b, t in np.ndindex(B, T):
        logits = X[b, t] @ PARAMS["router"]["kernel"]
        p = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-p)[:top_k]
        for e in best:
            up = X[b, t] @ PARAMS["up"][e]
            hidden = _silu(X[b, t] @ PARAMS["gate"][e]) * up if gated else _silu(up)
            expected[b, t] += p[e] / (p[best].sum() if renormalize else 1.0) * (hidden @ PARAMS["down"][e])
    np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_experts_without_tokens_have_no_effect():
    """Three of five experts get no tokens; the rows of the others must not shift into their groups."""
    params = _params() | {"router": {"kernel": np.zeros((D, E), np.float32)}}
    params["router"]["kernel"][0] = [-50.0, 9.0, -50.0, 3.0, -50.0]
    x = np.concatenate([np.ones_like(X[..., :1]), X[..., 1:]], axis=-1)
    run = _moe(top_k=2, renormalize=True)
    idle = [0, 2, 4]
    changed = params | {name: params[name].copy() for name in ("gate", "up", "down")}
    for name in ("gate", "up", "down"):
        changed[name][idle] += 3.0
    np.testing.assert_array_equal(run(params, x), run(changed, x))
    gradients = jax.grad(lambda p: (run(p, x) * COTANGENT).sum())(params)
    for name in ("gate", "up", "down"):
        assert (gradients[name][np.array(idle)] == 0).all(), name
        assert (np.abs(gradients[name][np.array([1, 3])]).max(axis=(1, 2)) > 1e-3).all(), name
    assert (
        np.asarray(route_tokens(jnp.array(x.reshape(-1, D) @ params["router"]["kernel"]), 2, True).experts_MJ) == [1, 3]
    ).all()


def test_rows_are_grouped_by_expert():
    """`apply_experts` passes rows sorted by expert and the group sizes, and restores the order of the outputs."""
    chosen = Routes(np.array([[2, 0], [2, 1], [0, 2], [2, 0]]), np.full((4, 2), 0.5, np.float32))
    x_MD, seen = np.arange(4, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32), {}

    def experts(x_RD, sizes_E):
        seen.update(rows=np.asarray(x_RD[:, 0]), sizes=np.asarray(sizes_E))
        return x_RD + np.repeat([10.0, 20.0, 30.0, 40.0], np.asarray(sizes_E))[:, None]

    out = apply_experts(jnp.array(x_MD), chosen, 4, experts)
    np.testing.assert_array_equal(seen["sizes"], [3, 1, 4, 0])
    np.testing.assert_array_equal(seen["rows"], [0, 2, 3, 1, 0, 1, 2, 3])
    np.testing.assert_allclose(out[:, 0], [0 + 20, 1 + 25, 2 + 20, 3 + 20])


def test_weights_are_softmax_probabilities():
    every = route_tokens(LOGITS, E, renormalize=False)
    np.testing.assert_allclose(every.weights_MJ.sum(-1), 1.0, rtol=1e-6)
    two, plain = route_tokens(LOGITS, 2, renormalize=True), route_tokens(LOGITS, 2, renormalize=False)
    np.testing.assert_array_equal(two.experts_MJ, np.argsort(-LOGITS, axis=-1)[:, :2])
    np.testing.assert_array_equal(two.experts_MJ, plain.experts_MJ)
    np.testing.assert_allclose(two.weights_MJ.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(plain.weights_MJ, every.weights_MJ[:, :2], rtol=1e-6)


# ---------------------------------------------------------------- transformers
def _mixtral(top_k):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    return MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=top_k)
    )


def _qwen(renormalize):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    return lambda top_k: Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=top_k, norm_topk_prob=renormalize
        )
    )


PEERS = {"mixtral": (_mixtral, True), "qwen": (_qwen(True), True), "qwen, all experts": (_qwen(False), False)}


@pytest.mark.parametrize("top_k", [1, 2, E])
@pytest.mark.parametrize("peer", PEERS)
def test_outputs_and_gradients_match_transformers(peer, top_k):
    import torch

    build, renormalize = PEERS[peer]
    theirs = build(top_k)
    with torch.no_grad():
        theirs.gate.weight.copy_(torch.tensor(PARAMS["router"]["kernel"].T))
        both = np.concatenate([PARAMS["gate"], PARAMS["up"]], axis=2)
        theirs.experts.gate_up_proj.copy_(torch.tensor(both.swapaxes(1, 2)))
        theirs.experts.down_proj.copy_(torch.tensor(PARAMS["down"].swapaxes(1, 2)))
    x = torch.tensor(X, requires_grad=True)
    expected = theirs(x)
    expected.backward(torch.tensor(COTANGENT))
    run = _moe(top_k, renormalize)
    ours, pullback = jax.vjp(run, _params(), X)
    np.testing.assert_allclose(ours, expected.detach().numpy(), atol=1e-5, rtol=1e-5)
    gradients, x_gradient = pullback(COTANGENT)
    gate, up = np.split(theirs.experts.gate_up_proj.grad.numpy().swapaxes(1, 2), 2, axis=2)
    pairs = {
        "x": (x_gradient, x.grad.numpy()),
        "router": (gradients["router"]["kernel"], theirs.gate.weight.grad.numpy().T),
        "gate": (gradients["gate"], gate),
        "up": (gradients["up"], up),
        "down": (gradients["down"], theirs.experts.down_proj.grad.numpy().swapaxes(1, 2)),
    }
    for name, (actual, expected) in pairs.items():
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=1e-5, err_msg=name)


# ---------------------------------------------------------------- router losses
@pytest.mark.parametrize("top_k", [1, 2, E])
@pytest.mark.parametrize("real", [np.ones_like(REAL), REAL], ids=["whole", "padded"])
def test_load_balance_matches_transformers(top_k, real):
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    def ours(logits):
        return router_losses(logits, route_tokens(logits, top_k, True), real).load_balance

    logits = torch.tensor(LOGITS, requires_grad=True)
    expected = load_balancing_loss_func((logits,), E, top_k, torch.tensor(real.reshape(B, T)))
    expected.backward()
    value, gradient = jax.value_and_grad(jax.jit(ours))(jnp.array(LOGITS))
    assert float(value) == pytest.approx(expected.item(), abs=1e-5)
    np.testing.assert_allclose(gradient, logits.grad.numpy(), atol=1e-6)


def test_load_balance_is_top_k_if_balanced():
    """All probabilities are equal, and every expert is chosen equally often."""
    chosen = Routes(np.array([[0, 1], [2, 3], [1, 2], [3, 0]]), np.full((4, 2), 0.5))
    losses = router_losses(jnp.zeros((4, 4)), chosen, jnp.ones(4))
    assert float(losses.load_balance) == pytest.approx(2.0)


def test_router_z_is_the_mean_squared_log_sum_exp():
    losses = router_losses(LOGITS, route_tokens(LOGITS, 2, True), REAL)
    each = np.log(np.exp(LOGITS.astype(np.float64)).sum(-1)) ** 2
    assert float(losses.router_z) == pytest.approx((each * REAL).sum() / REAL.sum(), rel=1e-5)


def test_router_losses_ignore_padding():
    other = np.where(REAL[:, None] > 0, LOGITS, 7 * LOGITS[::-1] + 3)
    assert (other != LOGITS).any()
    first, second = (router_losses(logits, route_tokens(logits, 2, True), REAL) for logits in (LOGITS, other))
    np.testing.assert_array_equal(first, second)
    nothing = router_losses(LOGITS, route_tokens(LOGITS, 2, True), jnp.zeros(B * T))
    np.testing.assert_array_equal(nothing, [0.0, 0.0])


def test_the_layer_weighs_both_losses_and_ignores_padding():
    segments = REAL.reshape(B, T).astype(int)
    logits = X.reshape(-1, D) @ PARAMS["router"]["kernel"]
    losses = router_losses(logits, route_tokens(logits, 2, True), REAL)
    _, actual = _layer(2, True, load_balance=0.3, router_z=0.07).apply({"params": _params()}, X, segments)
    assert float(actual) == pytest.approx(0.3 * float(losses.load_balance) + 0.07 * float(losses.router_z), rel=1e-5)


def test_the_router_computes_in_float32():
    """Rounded logits would send tokens to other experts."""
    layer = _layer(2, True, dtype=jnp.bfloat16)
    router, half = PARAMS["router"]["kernel"], jnp.array(X, jnp.bfloat16)
    out, _ = layer.apply({"params": _params()}, half, jnp.ones((B, T), int))
    assert out.dtype == jnp.bfloat16
    full, _ = _layer(2, True).apply({"params": _params()}, half.astype(jnp.float32), jnp.ones((B, T), int))
    np.testing.assert_allclose(out.astype(np.float32), full, atol=0.05 * float(jnp.abs(full).max()))
    traced = str(jax.make_jaxpr(lambda x: layer.apply({"params": _params()}, x, jnp.ones((B, T), int))[1])(half))
    assert f"f32[{B * T},{router.shape[1]}] = dot_general" in traced


def _silu(x):
    return x / (1 + np.exp(-x))


def _params(gated=True):
    return {name: leaf for name, leaf in PARAMS.items() if gated or name != "gate"}


def _layer(top_k, renormalize, gated=True, dtype=jnp.float32, **weights):
    config = MoeConfig(num_experts=E, top_k=top_k, dim=F, gated=gated, renormalize=renormalize, **weights)
    return Moe(config, D, NormalInit(), 1.0, Runtime(dtype=dtype))


def _moe(top_k, renormalize, gated=True):
    """The layer's output as a function of parameters and input."""
    layer = _layer(top_k, renormalize, gated)
    return jax.jit(lambda params, x: layer.apply({"params": params}, x, jnp.ones((B, T), int))[0])
