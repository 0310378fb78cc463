"""Recurrent stacks: PyTorch's own layers as reference, documents kept apart, states that continue a row."""

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
# A state as wide as the embeddings, and one that an output projection maps back to them.
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
    """All of them random: zero biases would hide mistakes."""
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
def test_outputs_are_those_of_torch(cell, dim):
    import torch

    module, params, theirs, out = _pair(cell, dim)
    x = normal(B, T, D)
    with torch.no_grad():
        wanted = (theirs(torch.tensor(x))[0] @ out).numpy()
    found = outputs(module, params, x, rows())
    assert np.abs(wanted).max() > 0.3, "outputs near zero would agree too easily"
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_are_those_of_torch(cell, dim):
    """Of every parameter and of the input; the two biases of theirs have the gradient of our one."""
    import torch

    module, params, theirs, out = _pair(cell, dim)
    x, weights = normal(B, T, D), normal(B, T, D, seed=2)
    x_theirs = torch.tensor(x, requires_grad=True)
    (torch.sin(theirs(x_theirs)[0] @ out) * torch.tensor(weights)).sum().backward()

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def gradient(params, x):
        return (jnp.sin(module.apply({"params": params}, x, rows())[0]) * weights).sum()

    found, found_x = gradient(params, x)
    wanted = _converted(cell, dim, {name: p.grad.numpy() for name, p in theirs.named_parameters()}, one_bias=True)
    if dim != D:
        wanted["out"] = {"kernel": out.grad.numpy()}
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    np.testing.assert_allclose(found_x, x_theirs.grad, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


def _pair(cell: str, dim: int):
    """Our stack, its parameters, and their stack with the same weights and an output matrix."""
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
    """Their kernels keep [gates x out, in]."""

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
def test_a_packed_row_is_its_documents_alone(cell):
    module = stack(cell)
    params, x = params_of(module), normal(B, T, D)
    packed = np.asarray(outputs(module, params, x, PACKED))
    for row in range(B):
        for segment in range(1, SEGMENTS[row].max() + 1):
            mine = SEGMENTS[row] == segment
            alone = outputs(module, params, x[row : row + 1, mine], rows(int(mine.sum()), 1))
            np.testing.assert_allclose(packed[row, mine], alone[0], atol=1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_a_token_is_influenced_by_its_document_so_far(cell):
    module = stack(cell)
    params = params_of(module)

    @jax.jit
    def gradients(x_BTD):
        out, pullback = jax.vjp(lambda x: module.apply({"params": params}, x, PACKED)[0], x_BTD)
        return jax.vmap(lambda t: pullback(out * jax.nn.one_hot(t, T)[None, :, None])[0])(jnp.arange(T))

    found = np.abs(gradients(normal(B, T, D))).sum(-1) > 0  # [T, B, T]
    for row, segments in enumerate(SEGMENTS):
        allowed = np.tril(segments[:, None] == segments)
        real = segments > 0
        np.testing.assert_array_equal(found[real, row], allowed[real])
        assert not found[:, row][:, ~real].any(), "padding reached something"


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_padding_leaves_the_state_as_it_is(cell):
    module = stack(cell)
    params, x = params_of(module), normal(1, 5, D)
    states = [empty_state(cell, 1, D)] * L
    _, wanted = module.apply({"params": params}, x, rows(5, 1), states, method="extend")
    for before, after in ((0, 4), (3, 0), (2, 2)):
        width = ((0, 0), (before, after))
        tokens = tokens_from_ids(jnp.zeros((1, 5 + before + after), int), jnp.pad(jnp.ones((1, 5), int), width))
        padded = np.pad(x, (*width, (0, 0)), constant_values=7.0)
        context = Context(tokens.positions, tokens.segments)
        _, found = module.apply({"params": params}, padded, context, states, method="extend")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_in_packed_rows_are_those_of_the_plain_scan(cell):
    """The kernel's gradient is computed apart from the scan's."""
    kernel, x = 0.4 * normal(D, NUM_GATES[cell], D), normal(T, B, NUM_GATES[cell], D, seed=1)
    real = jnp.array(SEGMENTS.T > 0)
    starts = real & jnp.array(POSITIONS.T == 0)
    # Rows that go on with a state from before, one of them padded at first.
    starts, state = starts.at[0].set(False), jax.tree.map(lambda a: a + 0.5, empty_state(cell, B, D))

    def total(function, kernel, x, state):
        h, last = function(kernel, x, state)
        return jnp.sum(jnp.sin(3 * h)) + sum(jnp.sum(jnp.cos(a)) for a in jax.tree.leaves(last))

    plain = lambda kernel, x, state: recurrence._scan(cell, kernel, starts, real, x, state)  # noqa: E731
    ours = lambda kernel, x, state: recur(cell, kernel, x, state, starts, real)  # noqa: E731
    found, wanted = (jax.grad(partial(total, f), argnums=(0, 1, 2))(kernel, x, state) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


# ---------------------------------------------------------------- continuing a row
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("cell", CELLS)
def test_extending_equals_the_whole_row(cell, dim):
    """Prompts of different lengths at once, then one token at a time."""
    module = stack(cell, dim)
    params, x, lengths = params_of(module), normal(B, T, D), np.array([5, 2, 4])
    whole = np.asarray(outputs(module, params, x, rows()))
    extend = jax.jit(partial(module.apply, method="extend"))
    tokens = tokens_from_ids(jnp.zeros((B, 5), int), jnp.arange(5) < lengths[:, None])
    context = Context(tokens.positions, tokens.segments, start_B=jnp.zeros(B, int))
    states = tuple(empty_state(cell, B, dim) for _ in range(L))
    found, states = extend({"params": params}, x[:, :5], context, states)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row, :length], whole[row, :length], atol=1e-5)
    for _ in range(4):
        context = Context(jnp.array(lengths)[:, None], jnp.ones((B, 1), int), start_B=jnp.array(lengths))
        found, states = extend({"params": params}, x[np.arange(B), lengths][:, None], context, states)
        np.testing.assert_allclose(found[:, 0], whole[np.arange(B), lengths], atol=1e-5)
        lengths = lengths + 1


# ---------------------------------------------------------------- dropout
@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_the_key_decides_what_is_dropped(cell):
    module, without = stack(cell, dropout=0.5), stack(cell)
    params, x = params_of(module), normal(B, T, D)
    plain = outputs(without, params, x, rows())
    np.testing.assert_array_equal(outputs(module, params, x, rows()), plain)
    np.testing.assert_array_equal(outputs(without, params, x, rows(), jax.random.key(0)), plain)
    first, again, other = (outputs(module, params, x, rows(), jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert jnp.abs(first - other).max() > 1e-2


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_no_dropout_from_token_to_token(cell):
    """What the last of the layers gives is dropped or doubled; what it remembers is neither."""
    config = RecurrentConfig(cell=cell, num_layers=1, dim=D, dropout=0.5)
    module = Recurrent(config, D, InitConfig(), Runtime())
    params, x = params_of(module), normal(B, T, D)
    plain, dropped = (np.asarray(outputs(module, params, x, rows(), key)) for key in (None, jax.random.key(0)))
    kept = dropped != 0
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_allclose(dropped[kept], 2 * plain[kept], atol=1e-6)


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_layers_drop_between_them(cell):
    """With the last layer's own dropout undone by its values, those of the first still differ."""
    module = stack(cell, dropout=0.5)
    params, x = params_of(module), normal(B, T, D)
    plain, dropped = (np.asarray(outputs(module, params, x, rows(), key)) for key in (None, jax.random.key(0)))
    kept = dropped != 0
    assert np.abs(dropped[kept] - 2 * plain[kept]).max() > 1e-2


# ---------------------------------------------------------------- how it runs, what it owns
@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_remat_changes_nothing(cell):
    params, x = params_of(stack(cell)), normal(B, T, D)

    def gradient(remat):
        module = stack(cell, remat=remat)
        return jax.jit(jax.grad(lambda p: jnp.sin(module.apply({"params": p}, x, PACKED)[0]).sum()))

    none, full = gradient("none"), gradient("full")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), full(params), none(params))
    scans = {f: str(jax.make_jaxpr(f)(params)).count("scan[") for f in (none, full)}
    assert scans[full] == scans[none] + L, "each layer runs again"


@pytest.mark.parametrize("cell", LSTM_FIRST)
def test_the_state_is_float32_whatever_the_products_are(cell):
    module = stack(cell, dtype=jnp.bfloat16)
    params, x = params_of(module), normal(B, T, D)
    states = [empty_state(cell, B, D)] * L
    found, states = module.apply({"params": params}, x, rows(), states, method="extend")
    assert found.dtype == jnp.bfloat16
    for state in jax.tree.leaves(states):
        assert state.dtype == jnp.float32
        assert (state != state.astype(jnp.bfloat16)).any(), "float32 in name only"
    np.testing.assert_allclose(found.astype(jnp.float32), outputs(stack(cell), params, x, rows()), atol=0.05)


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
    """Paths are API: checkpoints know them."""
    shapes, axes = abstract_params(rnn(cell="lstm", num_layers=2, embed_dim=12, dim=8, vocab_size=31))
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    found = {path_name(path): (leaf.shape, name) for (path, leaf), name in zip(leaves, names, strict=True)}
    assert found == PARAMETERS


def test_forget_gates_start_open():
    params = init_params(rnn(cell="lstm", num_layers=2, embed_dim=8, dim=8, vocab_size=31), jax.random.key(0))
    for i in range(2):
        wanted = np.zeros((4, 8)) + np.array([0, 1, 0, 0])[:, None]
        np.testing.assert_array_equal(params["decoder"][f"layers_{i}"]["bias"], wanted)
    plain = init_params(rnn(cell="elman", num_layers=1, embed_dim=8, dim=8, vocab_size=31), jax.random.key(0))
    assert not plain["decoder"]["layers_0"]["bias"].any()
