"""Embeddings, output heads and poolers, against transformers and against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    EmbeddingConfig,
    HeadConfig,
    Learned,
    NormalInit,
    NormConfig,
    PoolerConfig,
    Sinusoidal,
    TransformConfig,
)
from jaxformer.layers import Runtime, Transformer
from jaxformer.layers.embed import Embedding, Head, Pooler
from jaxformer.ops.positions import sinusoidal
from jaxformer.ops.weights import DenseTable
from jaxformer.typing import Tokens, tokens_from_ids

V, D = 31, 16
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, V, size=(2, 6))
X = RNG.normal(size=(2, 6, D)).astype(np.float32)
TRANSFORM = TransformConfig(activation="gelu", norm=NormConfig(eps=1e-3))


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# ---------------------------------------------------------------- embedding
def test_types_positions_and_norm_match_bert():
    import torch
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEmbeddings

    theirs = BertEmbeddings(
        BertConfig(vocab_size=V, hidden_size=D, max_position_embeddings=8, type_vocab_size=3, layer_norm_eps=1e-3)
    ).eval()
    weights = _randomised(theirs)
    config = EmbeddingConfig(position=Learned(max_length=8), num_types=3, norm=NormConfig(eps=1e-3))
    params = {
        "tokens": weights["word_embeddings.weight"],
        "positions": weights["position_embeddings.weight"],
        "types": weights["token_type_embeddings.weight"],
        "norm": {"scale": weights["LayerNorm.weight"], "bias": weights["LayerNorm.bias"]},
    }
    positions, random_types = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 7]]), RNG.integers(0, 3, size=IDS.shape)
    ones = np.ones_like(IDS)
    for types in (random_types, None):
        expected = theirs(
            torch.tensor(IDS), None if types is None else torch.tensor(types), torch.tensor(positions)
        ).detach()
        ours = _embedded(config, params, Tokens(IDS, positions, ones, types))
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-5)


def test_learned_positions_with_an_offset_match_bart():
    import torch
    from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding

    theirs = BartLearnedPositionalEmbedding(8, D)  # two extra rows before position 0
    table, tokens = theirs.weight.detach().numpy(), normal(V, D)
    config = EmbeddingConfig(position=Learned(max_length=8, offset=2), scale=True)
    ours = _embedded(config, {"tokens": tokens, "positions": table}, tokens_from_ids(jnp.array(IDS)))
    expected = 4.0 * tokens[IDS] + theirs(torch.tensor(IDS)).detach().numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    shapes = jax.eval_shape(lambda: _embedding(config).init(jax.random.key(0), tokens_from_ids(jnp.array(IDS))))
    assert shapes["params"]["positions"].value.shape == (10, D)


def test_sinusoids_are_added_in_their_layout():
    table, tokens = normal(V, D), tokens_from_ids(jnp.array(IDS))
    for spec in (Sinusoidal(layout="halves", endpoint=True, offset=2), Sinusoidal()):
        ours = _embedded(EmbeddingConfig(position=spec), {"tokens": table}, tokens)
        np.testing.assert_allclose(ours, table[IDS] + sinusoidal(tokens.positions, D, spec), atol=1e-5)


def test_encoder_and_decoder_have_separate_positions_and_norms_and_share_the_rest(pair, params_of):
    position = Learned(max_length=16, offset=1)
    config = pair.model_copy(update={"embedding": EmbeddingConfig(position=position, norm=NormConfig(), num_types=2)})
    params, tokens = params_of(config)["embedding"], tokens_from_ids(jnp.array(IDS))
    assert set(params) == {"tokens", "types", "positions", "norm", "source_positions", "source_norm"}
    assert params["positions"].shape == params["source_positions"].shape == (17, D)

    def run(module, source):
        return module.embedding(tokens, source=source)

    for source, side in ((False, ""), (True, "source_")):
        x = np.asarray(params["tokens"][IDS] + params["types"][0] + params[f"{side}positions"][np.arange(1, 7)])
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        expected = x * params[f"{side}norm"]["scale"] + params[f"{side}norm"]["bias"]
        ours = Transformer(config).apply({"params": params_of(config)}, source, method=run)
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_the_encoder_uses_the_source_positions(pair, params_of):
    """Its hidden states depend on `source_positions` and not on `positions`."""
    params, model = params_of(pair), Transformer(pair)
    encode = jax.jit(lambda p: model.apply({"params": p}, tokens_from_ids(jnp.array(IDS)), method="encode"))
    before = encode(params)
    for name, has_effect in (("positions", False), ("source_positions", True)):
        changed = {**params, "embedding": {**params["embedding"], name: params["embedding"][name] + normal(16, D)}}
        assert (jnp.abs(encode(changed) - before).max() > 1e-3) == has_effect, name


@pytest.mark.parametrize("tied", [True, False])
def test_a_source_vocabulary_has_its_own_table(pair, params_of, tied):
    """The encoder reads only `source_tokens`; the decoder and a tied head read only `tokens`."""
    config = pair.replace(source_vocab_size=V + 9, head=HeadConfig(tied=tied))
    params, model = params_of(config), Transformer(config)
    assert params["embedding"]["source_tokens"].shape == (V + 9, D)
    source, target = tokens_from_ids(jnp.array(IDS + 9)), tokens_from_ids(jnp.array(IDS))

    def embed(module, tokens, source):
        return module.embedding(tokens, source=source)

    plain = Transformer(config.replace(embedding=EmbeddingConfig()))
    for tokens, is_source, name in ((source, True, "source_tokens"), (target, False, "tokens")):
        ours = plain.apply({"params": params}, tokens, is_source, method=embed)
        np.testing.assert_array_equal(ours, params["embedding"][name][tokens.ids])

    def loss(params):
        return jnp.square(model.apply({"params": params}, target, source)).sum()

    gradient = jax.jit(jax.grad(loss))(params)["embedding"]
    used = np.abs(gradient["source_tokens"]).max(axis=1) > 0
    np.testing.assert_array_equal(used, np.isin(np.arange(V + 9), IDS + 9))
    used = np.abs(gradient["tokens"]).max(axis=1) > 0
    np.testing.assert_array_equal(used, tied | np.isin(np.arange(V), IDS))


# ---------------------------------------------------------------- head
def test_a_tied_head_with_transform_and_bias_matches_bert():
    import torch
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLMPredictionHead

    theirs = BertLMPredictionHead(
        BertConfig(vocab_size=V, hidden_size=D, hidden_act="gelu", layer_norm_eps=1e-3)
    ).eval()
    weights = _randomised(theirs)
    params = {
        "bias": weights["decoder.bias"],
        "transform": {
            "dense": {"kernel": weights["transform.dense.weight"].T, "bias": weights["transform.dense.bias"]},
            "norm": {"scale": weights["transform.LayerNorm.weight"], "bias": weights["transform.LayerNorm.bias"]},
        },
    }
    with torch.no_grad():
        expected = theirs(torch.tensor(X)).numpy()
    ours = _logits(HeadConfig(transform=TRANSFORM, bias=True), params, theirs.decoder.weight.detach().numpy())
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_head_scale_bias_and_softcap(tied):
    table, kernel, bias = normal(V, D), normal(D, V), normal(V)
    config = HeadConfig(tied=tied, scale=True, bias=True, softcap=1.5)
    params = {"bias": bias} | ({} if tied else {"output": {"kernel": kernel}})
    expected = 1.5 * np.tanh(((X * D**-0.5) @ (table.T if tied else kernel) + bias) / 1.5)
    np.testing.assert_allclose(_logits(config, params, table), expected, atol=1e-5)
    assert np.abs(expected).max() > 1.2, "the soft cap must have an effect"


def test_logits_of_a_bfloat16_model_are_float32():
    config = HeadConfig(transform=TRANSFORM, bias=True, scale=True, softcap=30.0)
    head = Head(config, V, D, NormalInit(), Runtime(dtype=jnp.bfloat16))
    shape = jax.eval_shape(
        lambda: head.init_with_output(jax.random.key(0), jnp.array(X, jnp.bfloat16), DenseTable(normal(V, D)))[0]
    )
    assert shape.dtype == jnp.float32


# ---------------------------------------------------------------- pooler
# Four real tokens per row: one row is padded on the right, the other on the left.
SEGMENTS = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
REAL = [slice(0, 4), slice(2, 6)]


def test_the_pooler_matches_bert():
    import torch
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertPooler

    theirs = BertPooler(BertConfig(hidden_size=D)).eval()
    weights = _randomised(theirs)
    params = {"transform": {"dense": {"kernel": weights["dense.weight"].T, "bias": weights["dense.bias"]}}}
    config = PoolerConfig(transform=TransformConfig(activation="tanh"))
    with torch.no_grad():
        expected = theirs(torch.tensor(X)).numpy()
    np.testing.assert_allclose(_pooled(config, params, np.ones_like(IDS)), expected, atol=1e-5)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_pooling_ignores_padding_on_either_side(pooling):
    config = PoolerConfig(pooling=pooling, transform=TransformConfig(activation="tanh"), num_classes=3)
    kernel, classes, bias = normal(D, D), normal(D, 3), normal(3)
    params = {
        "transform": {"dense": {"kernel": kernel, "bias": np.zeros(D, np.float32)}},
        "classes": {"kernel": classes, "bias": bias},
    }
    rows = [X[b, real] for b, real in enumerate(REAL)]
    vectors = np.stack([row[0] if pooling == "first" else row.mean(axis=0) for row in rows])
    expected = np.tanh(vectors @ kernel) @ classes + bias
    np.testing.assert_allclose(_pooled(config, params, SEGMENTS), expected, atol=1e-5)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_model_pools_independently_of_padding(reader, params_of, pooling):
    pooler = PoolerConfig(pooling=pooling, transform=TransformConfig(activation="tanh"), num_classes=3)
    config = reader.model_copy(update={"pooler": pooler})
    params, ids = params_of(config), jnp.array(IDS)
    run = jax.jit(lambda tokens: Transformer(config).apply({"params": params}, tokens, method="pool"))
    alone = run(tokens_from_ids(ids))
    assert alone.shape == (2, 3)
    for width in (((0, 0), (0, 3)), ((0, 0), (3, 0))):
        padded = tokens_from_ids(jnp.pad(ids, width), jnp.pad(jnp.ones_like(ids), width))
        np.testing.assert_allclose(run(padded), alone, atol=1e-5)


def test_a_row_of_only_padding_gives_finite_gradients():
    config = PoolerConfig(pooling="mean", transform=TransformConfig(activation="tanh"))
    params = {"transform": {"dense": {"kernel": normal(D, D), "bias": normal(D)}}}
    gradient = jax.grad(lambda p: _pooled(config, p, np.zeros_like(IDS)).sum())(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_dropout_applies_before_the_class_projection():
    config = PoolerConfig(transform=TransformConfig(activation="tanh"), num_classes=3, dropout=0.5)
    pooler = Pooler(config, D, NormalInit(stddev=0.5))
    params = pooler.init(jax.random.key(0), X, SEGMENTS)
    without, dropped = (pooler.apply(params, X, SEGMENTS, key) for key in (None, jax.random.key(1)))
    assert jnp.abs(without - dropped).max() > 1e-3


def _randomised(module):
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.tensor(normal(*parameter.shape)))
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def _embedding(config):
    return Embedding(config, V, D, NormalInit())


def _embedded(config, params, tokens):
    return _embedding(config).apply({"params": params}, tokens)


def _logits(config, params, table):
    return Head(config, V, D, NormalInit()).apply({"params": params}, X, DenseTable(jnp.asarray(table)))


def _pooled(config, params, segments):
    return Pooler(config, D, NormalInit()).apply({"params": params}, X, segments)
