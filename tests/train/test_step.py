"""One train step: golden numbers, and equal results for different ways of computing it."""

import jax
import numpy as np
import optax
import pytest
import torch

from jaxformer.config import MeshConfig, OptimConfig, TrainConfig
from jaxformer.layers import Transformer, init_params
from jaxformer.objectives.base import token_loss
from jaxformer.ops.losses import LossOptions
from jaxformer.train.optim import make_optimizer
from jaxformer.train.program import train_program
from jaxformer.train.step import gradient_sums

GOLDEN = {
    "decoder-only": [(5.570169, 0.517516), (5.571358, 0.591325), (5.574955, 0.588611)],
    "encoder-decoder": [(6.106138, 0.897188), (6.097562, 0.847827), (6.057584, 1.149862)],
}


@pytest.mark.parametrize("shape", GOLDEN)
def test_golden_losses(shape, make_config, run_steps):
    """Update these numbers only when the mathematics of a step changes on purpose, and say so in the commit."""
    _, history = run_steps(make_config(shape), num_steps=3)
    actual = [(h["loss"], h["grad_norm"]) for h in history]
    np.testing.assert_allclose(actual, GOLDEN[shape], rtol=2e-5)


def gradients(config, params, batch, key):
    parts = train_program(config, jax.devices()[:1]).parts
    return jax.jit(lambda params: gradient_sums(params, None, batch, key, parts))(params)


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulation_equals_the_whole_batch(parts, make_config, make_batch):
    """Rows hold different numbers of real tokens, so an average of micro-batch means would differ."""
    whole, split = make_config(), make_config(train=TrainConfig(accumulate=parts))
    batch, key = make_batch(whole), jax.random.key(0)
    params = init_params(whole.model, key)
    expected, sums = gradients(whole, params, batch, key)
    actual, split_sums = gradients(split, params, batch, key)
    np.testing.assert_allclose(split_sums, sums, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


MESHES = [{"data": 8}, {"fsdp": 8, "data": 1}, {"tensor": 2, "data": 4}, {"fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("decoder-only", MESHES[1]), ("encoder-decoder", MESHES[-1])]
    + [pytest.param("decoder-only", sizes, marks=pytest.mark.slow) for sizes in (MESHES[0], *MESHES[2:])]
    + [pytest.param("encoder-decoder", sizes, marks=pytest.mark.slow) for sizes in MESHES[:-1]],
)
def test_eight_devices_equal_one(shape, sizes, make_config, run_steps):
    optim = OptimConfig(learning_rate=1e-2, weight_decay=0.1)
    _, one = run_steps(make_config(shape, optim=optim), num_steps=3)
    _, eight = run_steps(make_config(shape, optim=optim, mesh=MeshConfig(**sizes)), 3, num_devices=8)
    for a, b in zip(one, eight, strict=True):
        for name in ("loss", "grad_norm", "param_norm"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)


def test_gradients_on_eight_devices_equal_one(make_config, run_steps):
    """With plain SGD and a learning rate of 1, the change of the parameters is the gradient."""
    optim = OptimConfig(algorithm={"kind": "sgd"}, learning_rate=1.0, clip_norm=None, schedule={"kind": "constant"})
    one, _ = run_steps(make_config(optim=optim), num_steps=1)
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    eight, _ = run_steps(make_config(optim=optim, mesh=mesh), num_steps=1, num_devices=8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one.params, eight.params)


@pytest.mark.parametrize(
    "sizes", [pytest.param({"data": 8}, marks=pytest.mark.slow), {"data": 2, "fsdp": 2, "tensor": 2}]
)
def test_experts_and_a_shared_bias_on_eight_devices_equal_one(sizes, experts, make_config, run_steps):
    """Loss and gradients, including those of the router and of the bias."""
    optim = OptimConfig(algorithm={"kind": "sgd"}, learning_rate=1.0, clip_norm=None, schedule={"kind": "constant"})
    config = make_config(model=experts, optim=optim)
    before = jax.device_get(train_program(config, jax.devices()[:1]).init().params["decoder"])
    one, [expected] = run_steps(config, num_steps=1)
    eight, [actual] = run_steps(config.model_copy(update={"mesh": MeshConfig(**sizes)}), num_steps=1, num_devices=8)
    for name in ("loss", "perplexity", "grad_norm"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one.params, eight.params)
    after = one.params["decoder"]
    assert np.abs(after["relative_bias"] - before["relative_bias"]).max() > 1e-5
    router = [tree["blocks_0"]["mlp"]["router"]["kernel"] for tree in (before, after)]
    assert np.abs(router[1] - router[0]).max() > 1e-5


def test_the_router_loss_is_added_once_per_token(experts, make_config, make_batch):
    config = make_config(model=experts)
    batch, params = make_batch(config), jax.jit(init_params, static_argnums=0)(config.model, jax.random.key(0))
    model = Transformer(config.model)

    @jax.jit
    def run(params):
        sums, _ = token_loss(model, params, batch, LossOptions())
        return sums, model.apply({"params": params}, batch.tokens, method="hidden_and_router_loss")[1]

    sums, router = run(params)
    assert float((sums.loss - sums.nll) / sums.weight) == pytest.approx(float(router), rel=1e-3)
    assert float(router) > 0.3


def test_ema_follows_the_parameters(make_config, run_steps):
    config = make_config(optim=OptimConfig(ema_decay=0.75))
    before = jax.device_get(train_program(config, jax.devices()[:1]).init().params)
    state, _ = run_steps(config, num_steps=1)
    expected = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, before, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.ema, expected)
    assert train_program(config, jax.devices()[:1]).inference_params(state) is state.ema


def test_z_loss_and_label_smoothing_change_the_loss_only(make_config, run_steps):
    plain = run_steps(make_config(), 1)[1][0]
    regular = run_steps(make_config(train=TrainConfig(z_loss=0.1, label_smoothing=0.1)), 1)[1][0]
    assert regular["loss"] > plain["loss"]
    assert regular["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-5)


def test_dropout_depends_only_on_step_and_seed(make_config, run_steps):
    first = run_steps(make_config(dropout=0.2), 2)[1]
    again = run_steps(make_config(dropout=0.2), 2, again=True)[1]
    other = run_steps(make_config(dropout=0.2, seed=1), 2)[1]
    assert first == again
    assert first[0]["loss"] != other[0]["loss"]


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_the_loss_sums_over_real_tokens(num_chunks, make_config, make_batch):
    config = make_config()
    batch, params = make_batch(config), init_params(config.model, jax.random.key(0))
    model, options = Transformer(config.model), LossOptions(num_chunks=num_chunks)
    loss = jax.jit(lambda batch: token_loss(model, params, batch, options))
    whole, tokens = loss(batch)
    parts = [loss(jax.tree.map(lambda a: a[i::2], batch))[0] for i in range(2)]  # noqa: B023
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-5)
    assert float(whole.weight) == batch.weights.sum()
    assert float(whole.nll) == pytest.approx(float((tokens.nll_BT * batch.weights).sum()), rel=1e-5)


def test_adamw_equals_torch(make_config, run_steps):
    """Three updates of one matrix with clipping, weight decay and a constant learning rate."""
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1, schedule={"kind": "constant"}, clip_norm=1.0)
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(3, 4, 3)).astype(np.float32)
    params, optimizer = {"kernel": start}, make_optimizer(config, 10, {"kernel": ("embed", "mlp")})
    state = optimizer.init(params)
    theirs = torch.nn.Parameter(torch.tensor(start))
    peer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for grad in grads:
        updates, state = optimizer.update({"kernel": grad}, state, params)
        params = optax.apply_updates(params, updates)
        theirs.grad = torch.tensor(grad)
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        peer.step()
    np.testing.assert_allclose(params["kernel"], theirs.detach().numpy(), atol=1e-6)
