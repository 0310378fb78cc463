"""Isolation, checked by gradients: an output depends on exactly the inputs that the masks of all layers allow."""

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
# The packed case covers a single document too, so the latter runs only with the slow tests.
DOCUMENTS = [
    pytest.param(np.ones_like(SEGMENTS), id="one document", marks=pytest.mark.slow),
    pytest.param(SEGMENTS, id="packed"),
]


@pytest.mark.parametrize("segments", DOCUMENTS)
def test_a_decoder_depends_on_exactly_the_visible_tokens(mixed, params_of, segments):
    """Three of five layers have a window of three; tokens further back have an influence through the other two."""
    actual = _influence(mixed, params_of(mixed), "decoder", segments)
    np.testing.assert_array_equal(actual, _reach(mixed.decoder, segments[0]))
    assert not actual[np.triu_indices(T, 1)].any(), "no influence of the future"


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_reach_of_a_window_grows_with_the_number_of_layers(mixed, params_of, num_layers):
    stack = mixed.decoder.model_copy(update={"pattern": mixed.decoder.pattern[:1], "num_layers": num_layers})
    config = mixed.model_copy(update={"decoder": stack})
    actual = _influence(config, params_of(config), "decoder", np.ones_like(SEGMENTS))
    back = np.arange(T)[:, None] - np.arange(T)
    np.testing.assert_array_equal(actual, (back >= 0) & (back <= 2 * num_layers))


def test_an_encoder_depends_on_exactly_its_document(reader, params_of):
    actual = _influence(reader, params_of(reader), "encoder", SEGMENTS)
    np.testing.assert_array_equal(actual, SEGMENTS[0][:, None] == SEGMENTS[0])


def test_a_target_depends_on_exactly_its_source(pair, params_of):
    params, x, source = params_of(pair), _normal((1, T, 16)), _normal((1, S, 16))

    def decoded(source):
        def run(module, x, source):
            segments = jnp.array(SOURCE_SEGMENTS)
            encoded, _ = module.encoder(source, Context(jnp.zeros_like(segments), segments))
            return module.decoder(x, Context(jnp.zeros((1, T), int), jnp.array(SEGMENTS), encoded, segments))[0]

        return Transformer(pair).apply({"params": params}, x, source, method=run)

    actual = _nonzero_gradients(decoded, source)
    np.testing.assert_array_equal(actual, SEGMENTS[0][:, None] == SOURCE_SEGMENTS[0])


@pytest.mark.parametrize("segments", DOCUMENTS)
def test_experts_and_biases_do_not_extend_the_reach(sparse, params_of, segments):
    """A first layer without a window, then layers with experts and windows, with a bias shared by all layers."""
    actual = _influence(sparse, params_of(sparse), "decoder", segments)
    np.testing.assert_array_equal(actual, _reach(sparse.decoder, segments[0]))
    assert not actual[np.triu_indices(T, 1)].any(), "no influence of the future"


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_reach_of_a_bidirectional_window_grows_with_the_number_of_layers(reader, params_of, num_layers):
    block = reader.encoder.pattern[0]
    near = block.model_copy(update={"attention": block.attention.model_copy(update={"window": 3})})
    bias = BucketBias(num_buckets=8, max_distance=6)
    stack = StackConfig(num_layers=num_layers, pattern=(near,), relative_bias=bias)
    config = reader.model_copy(update={"encoder": stack})
    actual = _influence(config, params_of(config), "encoder", SEGMENTS)
    np.testing.assert_array_equal(actual, _reach(stack, SEGMENTS[0]))
    away = np.abs(np.arange(T)[:, None] - np.arange(T))
    np.testing.assert_array_equal(actual, (away <= 2 * num_layers) & (SEGMENTS[0][:, None] == SEGMENTS[0]))


@pytest.mark.slow
def test_rows_that_share_experts_do_not_mix(sparse, params_of):
    """Tokens of all rows are sorted together, and every output must return to its row."""
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

    actual = np.asarray(jnp.abs(gradients(x)).sum(axis=(2, 3)) > 0)
    np.testing.assert_array_equal(actual, np.eye(3, dtype=bool))


# ---------------------------------------------------------------- values
def test_other_documents_and_padding_do_not_affect_a_document(mixed, forward):
    ids, other = _ids(T, 0), _ids(T, 1)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    before = forward(mixed, Tokens(ids, positions, SEGMENTS))
    for segment in (1, 2):
        inside = SEGMENTS[0] == segment
        after = forward(mixed, Tokens(np.where(inside, ids, other), positions, SEGMENTS))
        np.testing.assert_array_equal(np.asarray(before)[0, inside], np.asarray(after)[0, inside])


@pytest.mark.parametrize("shape", ["mixed", "sparse", "reader"])
def test_packed_documents_equal_separate_documents(request, forward, shape):
    config = request.getfixturevalue(shape)
    ids = _ids(T, 0)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    packed = forward(config, Tokens(ids, positions, SEGMENTS))
    alone = [forward(config, tokens_from_ids(jnp.array(ids[:, part]))) for part in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(packed[:, :8], jnp.concatenate(alone, axis=1), atol=1e-5)


def test_packed_pairs_equal_separate_pairs(pair, forward):
    ids, source = _ids(T, 0), _ids(S, 1)
    positions, source_positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]]), np.array([[0, 1, 2, 0, 1, 0, 0]])
    packed = forward(pair, Tokens(ids, positions, SEGMENTS), Tokens(source, source_positions, SOURCE_SEGMENTS))
    parts = ((slice(0, 4), slice(0, 3)), (slice(4, 8), slice(3, 5)))
    alone = [
        forward(pair, tokens_from_ids(jnp.array(ids[:, target])), tokens_from_ids(jnp.array(source[:, inputs])))
        for target, inputs in parts
    ]
    np.testing.assert_allclose(packed[:, :8], jnp.concatenate(alone, axis=1), atol=1e-5)


@pytest.mark.parametrize("shape", ["mixed", "sparse", "reader"])
def test_padding_on_either_side_does_not_affect_tokens(request, forward, shape):
    config = request.getfixturevalue(shape)
    ids = _ids(6, 0)
    alone = forward(config, tokens_from_ids(jnp.array(ids)))
    for before, after in ((0, 4), (4, 0), (1, 3)):
        width = ((0, 0), (before, after))
        padded = tokens_from_ids(jnp.pad(jnp.array(ids), width), jnp.pad(jnp.ones((1, 6), int), width))
        result = forward(config, padded)
        np.testing.assert_allclose(result[:, before : before + 6], alone, atol=1e-5)


def test_batched_rows_that_share_experts_equal_separate_rows(sparse, forward):
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
    """[T, T] booleans: whether the gradient of output t with respect to input s is nonzero."""
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
        weights = jnp.array(_normal(out.shape))  # not ones: the outputs of a norm sum to a constant
        return jax.lax.map(lambda t: pullback(weights * jax.nn.one_hot(t, T)[None, :, None])[0], jnp.arange(T))

    return np.asarray(jnp.abs(gradients(x)[:, 0]).sum(-1) > 0)


def _reach(stack, segments):
    """Inputs that an output may depend on: the boolean matrix product of the masks of all layers."""
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
