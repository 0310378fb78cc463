"""Who can influence whom, by gradients: exactly those the masks allow, through all layers, and nobody else."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import BucketBias, StackConfig
from jaxformer.layers import Transformer
from jaxformer.layers.block import Context
from jaxformer.typing import Tokens, tokens_from_ids

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
SOURCE_SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0]])
T, S = 10, 7


# ---------------------------------------------------------------- gradients
# A packed row has its documents one after another, so that one document is a part of the packed case.
DOCUMENTS = [
    pytest.param(np.ones_like(SEGMENTS), id="one document", marks=pytest.mark.slow),
    pytest.param(SEGMENTS, id="packed"),
]


@pytest.mark.parametrize("segments", DOCUMENTS)
def test_a_decoder_is_influenced_by_what_it_may_see(mixed, params_of, segments):
    """Windows of three in three of five layers: what lies further back arrives through the other two."""
    found = _influence(mixed, params_of(mixed), "decoder", segments)
    np.testing.assert_array_equal(found, _reach(mixed.decoder, segments[0]))
    assert not found[np.triu_indices(T, 1)].any(), "the future"


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_window_reaches_as_far_as_its_layers(mixed, params_of, num_layers):
    stack = mixed.decoder.model_copy(update={"pattern": mixed.decoder.pattern[:1], "num_layers": num_layers})
    config = mixed.model_copy(update={"decoder": stack})
    found = _influence(config, params_of(config), "decoder", np.ones_like(SEGMENTS))
    back = np.arange(T)[:, None] - np.arange(T)
    np.testing.assert_array_equal(found, (back >= 0) & (back <= 2 * num_layers))


def test_an_encoder_is_influenced_by_its_own_document(reader, params_of):
    found = _influence(reader, params_of(reader), "encoder", SEGMENTS)
    np.testing.assert_array_equal(found, SEGMENTS[0][:, None] == SEGMENTS[0])


def test_a_target_is_influenced_by_its_own_source(pair, params_of):
    params, x, source = params_of(pair), _normal((1, T, 16)), _normal((1, S, 16))

    def decoded(source):
        def run(module, x, source):
            segments = jnp.array(SOURCE_SEGMENTS)
            encoded, _ = module.encoder(source, Context(jnp.zeros_like(segments), segments))
            return module.decoder(x, Context(jnp.zeros((1, T), int), jnp.array(SEGMENTS), encoded, segments))[0]

        return Transformer(pair).apply({"params": params}, x, source, method=run)

    found = _nonzero_gradients(decoded, source)
    np.testing.assert_array_equal(found, SEGMENTS[0][:, None] == SOURCE_SEGMENTS[0])


@pytest.mark.parametrize("segments", DOCUMENTS)
def test_experts_and_biases_open_no_other_way(sparse, params_of, segments):
    """A shared bias, experts and windows behind a first layer that sees everything before it."""
    found = _influence(sparse, params_of(sparse), "decoder", segments)
    np.testing.assert_array_equal(found, _reach(sparse.decoder, segments[0]))
    assert not found[np.triu_indices(T, 1)].any(), "the future"


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_window_both_ways_reaches_as_far_as_its_layers(reader, params_of, num_layers):
    block = reader.encoder.pattern[0]
    near = block.model_copy(update={"attention": block.attention.model_copy(update={"window": 3})})
    bias = BucketBias(num_buckets=8, max_distance=6)
    stack = StackConfig(num_layers=num_layers, pattern=(near,), relative_bias=bias)
    config = reader.model_copy(update={"encoder": stack})
    found = _influence(config, params_of(config), "encoder", SEGMENTS)
    np.testing.assert_array_equal(found, _reach(stack, SEGMENTS[0]))
    away = np.abs(np.arange(T)[:, None] - np.arange(T))
    np.testing.assert_array_equal(found, (away <= 2 * num_layers) & (SEGMENTS[0][:, None] == SEGMENTS[0]))


@pytest.mark.slow
def test_rows_that_share_experts_do_not_mix(sparse, params_of):
    """Tokens of all rows are sorted together: what comes back to a row must be its own."""
    x = _normal((3, T, 16))
    context = Context(jnp.broadcast_to(jnp.arange(T), (3, T)), jnp.ones((3, T), int))

    def run(x):
        return Transformer(sparse).apply(
            {"params": params_of(sparse)}, x, method=lambda module, x: module.decoder(x, context)[0]
        )

    @jax.jit
    def gradients(x):
        out, pullback = jax.vjp(run, x)
        weights = jnp.array(_normal(out.shape))
        return jax.lax.map(lambda b: pullback(weights * jax.nn.one_hot(b, 3)[:, None, None])[0], jnp.arange(3))

    found = np.asarray(jnp.abs(gradients(x)).sum(axis=(2, 3)) > 0)
    np.testing.assert_array_equal(found, np.eye(3, dtype=bool))


# ---------------------------------------------------------------- values
def test_other_documents_and_padding_change_nothing(mixed, forward):
    ids, other = _ids(T, 0), _ids(T, 1)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    before = forward(mixed, Tokens(ids, positions, SEGMENTS))
    for segment in (1, 2):
        mine = SEGMENTS[0] == segment
        after = forward(mixed, Tokens(np.where(mine, ids, other), positions, SEGMENTS))
        np.testing.assert_array_equal(np.asarray(before)[0, mine], np.asarray(after)[0, mine])


@pytest.mark.parametrize("shape", ["mixed", "sparse", "reader"])
def test_a_packed_row_is_its_documents_alone(request, forward, shape):
    config = request.getfixturevalue(shape)
    ids = _ids(T, 0)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    packed = forward(config, Tokens(ids, positions, SEGMENTS))
    alone = [forward(config, tokens_from_ids(jnp.array(ids[:, part]))) for part in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(packed[:, :8], jnp.concatenate(alone, axis=1), atol=1e-5)


def test_packed_pairs_are_the_pairs_alone(pair, forward):
    ids, source = _ids(T, 0), _ids(S, 1)
    positions, source_positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]]), np.array([[0, 1, 2, 0, 1, 0, 0]])
    packed = forward(pair, Tokens(ids, positions, SEGMENTS), Tokens(source, source_positions, SOURCE_SEGMENTS))
    parts = ((slice(0, 4), slice(0, 3)), (slice(4, 8), slice(3, 5)))
    alone = [
        forward(pair, tokens_from_ids(jnp.array(ids[:, target])), tokens_from_ids(jnp.array(source[:, own])))
        for target, own in parts
    ]
    np.testing.assert_allclose(packed[:, :8], jnp.concatenate(alone, axis=1), atol=1e-5)


@pytest.mark.parametrize("shape", ["mixed", "sparse", "reader"])
def test_padding_on_either_side_changes_nothing(request, forward, shape):
    config = request.getfixturevalue(shape)
    ids = _ids(6, 0)
    alone = forward(config, tokens_from_ids(jnp.array(ids)))
    for before, after in ((0, 4), (4, 0), (1, 3)):
        width = ((0, 0), (before, after))
        padded = tokens_from_ids(jnp.pad(jnp.array(ids), width), jnp.pad(jnp.ones((1, 6), int), width))
        result = forward(config, padded)
        np.testing.assert_allclose(result[:, before : before + 6], alone, atol=1e-5)


def test_rows_that_share_experts_are_the_rows_alone(sparse, forward):
    ids = np.concatenate([_ids(T, seed) for seed in range(3)])
    together = forward(sparse, tokens_from_ids(jnp.array(ids)))
    for row in range(3):
        one = slice(row, row + 1)
        np.testing.assert_allclose(together[one], forward(sparse, tokens_from_ids(jnp.array(ids[one]))), atol=2e-5)


def test_rows_of_a_batch_do_not_mix(pair, forward):
    ids, source = np.concatenate([_ids(T, 0), _ids(T, 1)]), np.concatenate([_ids(S, 2), _ids(S, 3)])
    both = forward(pair, tokens_from_ids(jnp.array(ids)), tokens_from_ids(jnp.array(source)))
    for row in range(2):
        one = slice(row, row + 1)
        alone = forward(pair, tokens_from_ids(jnp.array(ids[one])), tokens_from_ids(jnp.array(source[one])))
        np.testing.assert_allclose(both[one], alone, atol=1e-5)


# ---------------------------------------------------------------- influence
def _influence(config, params, stack, segments):
    """[T, T]: does the gradient of output t with respect to input s differ from zero?"""
    positions = jnp.broadcast_to(jnp.arange(T), (1, T))

    def run(module, x):
        return getattr(module, stack)(x, Context(positions, jnp.array(segments)))[0]

    return _nonzero_gradients(
        lambda x: Transformer(config).apply({"params": params}, x, method=run), _normal((1, T, 16))
    )


def _nonzero_gradients(function, x):
    @jax.jit
    def gradients(x):
        out, pullback = jax.vjp(function, x)
        weights = jnp.array(_normal(out.shape))  # not ones: a norm's outputs sum to a constant
        return jax.lax.map(lambda t: pullback(weights * jax.nn.one_hot(t, T)[None, :, None])[0], jnp.arange(T))

    return np.asarray(jnp.abs(gradients(x)[:, 0]).sum(-1) > 0)


def _reach(stack, segments):
    """Boolean product of what each layer lets through, a residual connection included."""
    back = np.arange(T)[:, None] - np.arange(T)

    def one_layer(layer):
        attention = stack.block(layer).attention
        seen = (np.abs(back) < (attention.window or T)) & (segments[:, None] == segments)
        return seen & (back >= 0) if attention.causal else seen

    return reduce(lambda a, b: (a.astype(int) @ b.astype(int)) > 0, map(one_layer, range(stack.num_layers)))


def _ids(length, seed):
    return np.random.default_rng(seed).integers(0, 31, size=(1, length))


def _normal(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)
