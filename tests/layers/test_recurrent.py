"""Recurrent stacks: against PyTorch, isolation of packed documents, and states that continue a row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import InitConfig, NormalInit, RecurrentConfig
from jaxformer.layers import Runtime, abstract_params, init_params
from jaxformer.layers.block import Context
from jaxformer.layers.recurrent import Recurrent
from jaxformer.models.rnn import rnn
from jaxformer.ops import recurrence
from jaxformer.ops.recurrence import NUM_GATES, empty_state, recur
from jaxformer.sharding import path_name
from jaxformer.typing import tokens_from_ids

D, L, B, T = 12, 2, 3, 9
CELLS = ["elman", "lstm"]
LSTM_FIRST = ["lstm", pytest.param("elman", marks=pytest.mark.slow)]
# A state as wide as the embeddings, and one that needs an output projection.
DIMS = [D, 8]
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2, 3, 3]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 0, 1, 2, 0, 1]])
PACKED = Context(jnp.array(POSITIONS), jnp.array(SEGMENTS))


def stack(cell: str, dim: int = D, dropout: float = 0.0, **runtime) -> Recurrent:
    config = RecurrentConfig(cell=cell, num_layers=L, dim=dim, dropout=dropout)
    return Recurrent(config, D, InitConfig(kernel=NormalInit(stddev=0.3)), Runtime(**runtime))


def rows(length: int = T, batch: int = B) -> Context:
    tokens = tokens_from_ids(jnp.zeros((batch, length), int))
    return Context(tokens.positions, tokens.segments)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params_of(module: Recurrent):
    """Random values for all parameters: biases of zero would hide mistakes."""
    boxed = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1, D)), rows(1, 1)))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: 0.4 * rng.normal(size=leaf.shape).astype(np.float32), nn.meta.unbox(boxed)["params"]
    )


def outputs(module: Recurrent, params, x_BTD, context: Context, key=None) -> jax.Array:
    return jax.jit(module.apply)({"params": params}, x_BTD, context, key)[0]


# ---------------------------------------------------------------- PyTorch
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_match_torch(cell, dim):
    import torch

    module, params, theirs, out = _pair(cell, dim)
    x = normal(B, T, D)
    with torch.no_grad():
        expected = (theirs(torch.tensor(x))[0] @ out).numpy()
    actual = outputs(module, params, x, rows())
    assert np.abs(expected).max() > 0.3, "outputs near zero would agree too easily"
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_match_torch(cell, dim):
    """For every parameter and the input; each of torch's two biases has the gradient of our single bias."""
    import torch

    module, params, theirs, out = _pair(cell, dim)
    x, weights = normal(B, T, D), normal(B, T, D, seed=2)
    x_theirs = torch.tensor(x, requires_grad=True)
    (torch.sin(theirs(x_theirs)[0] @ out) * torch.tensor(weights)).sum().backward()

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def gradient(params, x):
        return (jnp.sin(module.apply({"params": params}, x, rows())[0]) * weights).sum()

    actual, actual_x = gradient(params, x)
    expected = _converted(cell, dim, {name: p.grad.numpy() for name, p in theirs.named_parameters()}, one_bias=True)
    if dim != D:
        expected["out"] = {"kernel": out.grad.numpy()}
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    np.testing.assert_allclose(actual_x, x_theirs.grad, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def _pair(cell: str, dim: int):
    """Our stack, its parameters, torch's stack with the same weights, and the output matrix."""
    import torch

    torch.manual_seed(0)
    theirs = {"elman": torch.nn.RNN, "lstm": torch.nn.LSTM}[cell](D, dim, L, batch_first=True)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    params = _converted(cell, dim, {name: p.detach().numpy() for name, p in theirs.named_parameters()})
    out = torch.eye(D)
    if dim != D:
        out = torch.tensor(normal(dim, D, seed=3), requires_grad=True)
        params["out"] = {"kernel": out.detach().numpy()}
    return stack(cell, dim), params, theirs, out


def _converted(cell: str, dim: int, weights: dict[str, np.ndarray], one_bias: bool = False):
    """Our parameters from torch's, whose kernels have shape [gates * out, in]."""

    def layer(i: int):
        inputs, recurrent = weights[f"weight_ih_l{i}"], weights[f"weight_hh_l{i}"]
        bias = weights[f"bias_ih_l{i}"] + (0 if one_bias else weights[f"bias_hh_l{i}"])
        return {
            "input": {"kernel": inputs.T.reshape(-1, NUM_GATES[cell], dim)},
            "recurrent_kernel": recurrent.T.reshape(dim, NUM_GATES[cell], dim),
            "bias": bias.reshape(NUM_GATES[cell], dim),
        }

    return {f"layers_{i}": layer(i) for i in range(L)}


# ---------------------------------------------------------------- documents and padding
@pytest.mark.parametrize("cell", CELLS)
def test_packed_documents_equal_separate_documents(cell):
    module = stack(cell)
    params, x = params_of(module), normal(B, T, D)
    packed = np.asarray(outputs(module, params, x, PACKED))
    for row in range(B):
        for segment in range(1, SEGMENTS[row].max() + 1):
            inside = SEGMENTS[row] == segment
            alone = outputs(module, params, x[row : row + 1, inside], rows(int(inside.sum()), 1))
            np.testing.assert_allclose(packed[row, inside], alone[0], atol=1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_a_token_depends_on_exactly_the_preceding_tokens_of_its_document(cell):
    module = stack(cell)
    params = params_of(module)

    @jax.jit
    def gradients(x_BTD):
        out, pullback = jax.vjp(lambda x: module.apply({"params": params}, x, PACKED)[0], x_BTD)
        return jax.vmap(lambda t: pullback(out * jax.nn.one_hot(t, T)[None, :, None])[0])(jnp.arange(T))

    actual = np.abs(gradients(normal(B, T, D))).sum(-1) > 0  # [T, B, T]
    for row, segments in enumerate(SEGMENTS):
        allowed = np.tril(segments[:, None] == segments)
        real = segments > 0
        np.testing.assert_array_equal(actual[real, row], allowed[real])
        assert not actual[:, row][:, ~real].any(), "padding must not affect any output"


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_padding_does_not_change_the_state(cell):
    module = stack(cell)
    params, x = params_of(module), normal(1, 5, D)
    states = [empty_state(cell, 1, D)] * L
    _, expected = module.apply({"params": params}, x, rows(5, 1), states, method="extend")
    for before, after in ((0, 4), (3, 0), (2, 2)):
        width = ((0, 0), (before, after))
        tokens = tokens_from_ids(jnp.zeros((1, 5 + before + after), int), jnp.pad(jnp.ones((1, 5), int), width))
        padded = np.pad(x, (*width, (0, 0)), constant_values=7.0)
        context = Context(tokens.positions, tokens.segments)
        _, actual = module.apply({"params": params}, padded, context, states, method="extend")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), actual, expected)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_in_packed_rows_match_the_differentiated_scan(cell):
    """`recur` computes the gradient of the kernel outside the scan."""
    kernel, x = 0.4 * normal(D, NUM_GATES[cell], D), normal(T, B, NUM_GATES[cell], D, seed=1)
    real = jnp.array(SEGMENTS.T > 0)
    starts = real & jnp.array(POSITIONS.T == 0)
    # All rows continue from a nonzero state, and one of them starts with padding.
    starts, state = starts.at[0].set(False), jax.tree.map(lambda a: a + 0.5, empty_state(cell, B, D))

    def total(function, kernel, x, state):
        h, last = function(kernel, x, state)
        return jnp.sum(jnp.sin(3 * h)) + sum(jnp.sum(jnp.cos(a)) for a in jax.tree.leaves(last))

    plain = lambda kernel, x, state: recurrence._scan(cell, kernel, starts, real, x, state)  # noqa: E731
    ours = lambda kernel, x, state: recur(cell, kernel, x, state, starts, real)  # noqa: E731
    actual, expected = (jax.grad(partial(total, f), argnums=(0, 1, 2))(kernel, x, state) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


# ---------------------------------------------------------------- continuing a row
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("cell", CELLS)
def test_extending_in_pieces_equals_the_full_forward_pass(cell, dim):
    """A batch of prompts with different lengths, then one token at a time."""
    module = stack(cell, dim)
    params, x, lengths = params_of(module), normal(B, T, D), np.array([5, 2, 4])
    whole = np.asarray(outputs(module, params, x, rows()))
    extend = jax.jit(partial(module.apply, method="extend"))
    tokens = tokens_from_ids(jnp.zeros((B, 5), int), jnp.arange(5) < lengths[:, None])
    context = Context(tokens.positions, tokens.segments, start_B=jnp.zeros(B, int))
    states = tuple(empty_state(cell, B, dim) for _ in range(L))
    actual, states = extend({"params": params}, x[:, :5], context, states)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(actual[row, :length], whole[row, :length], atol=1e-5)
    for _ in range(4):
        context = Context(jnp.array(lengths)[:, None], jnp.ones((B, 1), int), start_B=jnp.array(lengths))
        actual, states = extend({"params": params}, x[np.arange(B), lengths][:, None], context, states)
        np.testing.assert_allclose(actual[:, 0], whole[np.arange(B), lengths], atol=1e-5)
        lengths = lengths + 1


# ---------------------------------------------------------------- dropout
@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_dropout_depends_on_the_key(cell):
    module, without = stack(cell, dropout=0.5), stack(cell)
    params, x = params_of(module), normal(B, T, D)
    plain = outputs(without, params, x, rows())
    np.testing.assert_array_equal(outputs(module, params, x, rows()), plain)
    np.testing.assert_array_equal(outputs(without, params, x, rows(), jax.random.key(0)), plain)
    first, again, other = (outputs(module, params, x, rows(), jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert jnp.abs(first - other).max() > 1e-2


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_no_dropout_between_tokens(cell):
    """The output of the layer is dropped or doubled, while its state is not."""
    config = RecurrentConfig(cell=cell, num_layers=1, dim=D, dropout=0.5)
    module = Recurrent(config, D, InitConfig(), Runtime())
    params, x = params_of(module), normal(B, T, D)
    plain, dropped = (np.asarray(outputs(module, params, x, rows(), key)) for key in (None, jax.random.key(0)))
    kept = dropped != 0
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_allclose(dropped[kept], 2 * plain[kept], atol=1e-6)


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_dropout_between_layers(cell):
    """Outputs that the last layer keeps would be doubled exactly, if the first layer had no dropout."""
    module = stack(cell, dropout=0.5)
    params, x = params_of(module), normal(B, T, D)
    plain, dropped = (np.asarray(outputs(module, params, x, rows(), key)) for key in (None, jax.random.key(0)))
    kept = dropped != 0
    assert np.abs(dropped[kept] - 2 * plain[kept]).max() > 1e-2


# ---------------------------------------------------------------- remat, dtypes, parameters
@pytest.mark.parametrize("remat", ["full", "offload"])
@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_remat_does_not_change_gradients(cell, remat):
    params, x = params_of(stack(cell)), normal(B, T, D)

    def gradient(remat):
        module = stack(cell, remat=remat)
        return jax.jit(jax.grad(lambda p: jnp.sin(module.apply({"params": p}, x, PACKED)[0]).sum()))

    none, full = gradient("none"), gradient(remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), full(params), none(params))
    scans = {f: str(jax.make_jaxpr(f)(params)).count("scan[") for f in (none, full)}
    assert scans[full] == scans[none] + L, "each layer runs again in the backward pass"


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_the_state_of_a_bfloat16_stack_is_float32(cell):
    module = stack(cell, dtype=jnp.bfloat16)
    params, x = params_of(module), normal(B, T, D)
    states = [empty_state(cell, B, D)] * L
    actual, states = module.apply({"params": params}, x, rows(), states, method="extend")
    assert actual.dtype == jnp.bfloat16
    for state in jax.tree.leaves(states):
        assert state.dtype == jnp.float32
        assert (state != state.astype(jnp.bfloat16)).any(), "the state must not be rounded to bfloat16"
    np.testing.assert_allclose(actual.astype(jnp.float32), outputs(stack(cell), params, x, rows()), atol=0.05)


PARAMETERS = {
    "decoder/layers_0/bias": ((4, 8), (None, "mlp")),
    "decoder/layers_0/input/kernel": ((12, 4, 8), ("embed", None, "mlp")),
    "decoder/layers_0/recurrent_kernel": ((8, 4, 8), ("state", None, "mlp")),
    "decoder/layers_1/bias": ((4, 8), (None, "mlp")),
    "decoder/layers_1/input/kernel": ((8, 4, 8), ("embed", None, "mlp")),
    "decoder/layers_1/recurrent_kernel": ((8, 4, 8), ("state", None, "mlp")),
    "decoder/out/kernel": ((8, 12), ("mlp", "embed")),
    "embedding/tokens": ((31, 12), ("vocab", "embed")),
    "head/bias": ((31,), ("vocab",)),
}


def test_golden_parameters():
    """Parameter paths are API, because checkpoints contain them."""
    shapes, axes = abstract_params(rnn(cell="lstm", num_layers=2, embed_dim=12, dim=8, vocab_size=31))
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    actual = {path_name(path): (leaf.shape, name) for (path, leaf), name in zip(leaves, names, strict=True)}
    assert actual == PARAMETERS


def test_forget_gate_biases_are_initialised_to_one():
    params = init_params(rnn(cell="lstm", num_layers=2, embed_dim=8, dim=8, vocab_size=31), jax.random.key(0))
    for i in range(2):
        expected = np.zeros((4, 8)) + np.array([0, 1, 0, 0])[:, None]
        np.testing.assert_array_equal(params["decoder"][f"layers_{i}"]["bias"], expected)
    plain = init_params(rnn(cell="elman", num_layers=1, embed_dim=8, dim=8, vocab_size=31), jax.random.key(0))
    assert not plain["decoder"]["layers_0"]["bias"].any()
