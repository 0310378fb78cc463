"""int8 weights in every family: outputs stay close to those of float32 weights, and parameters take less memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.convert import SAMPLES
from jaxformer.convert.sample import VOCAB
from jaxformer.layers import Transformer, abstract_params, init_params
from jaxformer.models.rnn import rnn
from jaxformer.models.vaswani import vaswani
from jaxformer.ops.weights import Int8Matrix, is_quantized, quantize_params
from jaxformer.sharding import path_name
from jaxformer.typing import Params, Tokens, tokens_from_ids

OWN = {
    "vaswani": lambda: vaswani(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=VOCAB),
    "lstm": lambda: rnn(cell="lstm", num_layers=2, embed_dim=24, dim=32, vocab_size=VOCAB),
}
KEPT = ("relative_bias", "router", "positions", "types", "recurrent_kernel", "scale", "bias")
"""Parameters that are not quantized, because they are small or because outputs are sensitive to them."""


@partial(jax.jit, static_argnames="model")
def _outputs(model: Transformer, params: Params, tokens: Tokens, source: Tokens | None) -> tuple[jax.Array, ...]:
    """Logits or hidden states, and the output of a pooler."""
    outputs = (model.apply({"params": params}, tokens, source),)
    if model.config.pooler is not None:
        outputs += (model.apply({"params": params}, tokens, source, method="pool"),)
    return outputs


# The other samples differ from these only in the head or in sizes.
DISTINCT = [name for name in SAMPLES if name not in ("mt5", "minilm") and not name.endswith((" classes", " tags"))]
HEADS = ("bert classes", "llama tags", "bart classes")


# Grouped-query attention, experts, and an encoder-decoder with a relative bias; the others are slow tests.
QUICK = {"llama", "mixtral", "t5"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*DISTINCT, *HEADS, *OWN)],
)
def test_int8_outputs_are_close_in_every_family(name, pair_of):
    if name in SAMPLES:
        run = pair_of(name).run
        model, params = run.model, run.params
    else:
        model = Transformer(OWN[name]())
        params = init_params(model.config, jax.random.key(7))
    quantized = quantize_params(params, abstract_params(model.config)[1])
    assert is_quantized(quantized)
    _check_memory(params, quantized)
    ids = jnp.asarray(np.random.default_rng(0).integers(3, VOCAB - 1, (4, 24)), jnp.int32)
    mask = jnp.arange(24) < jnp.array([24, 9, 17, 3])[:, None]
    source = tokens_from_ids(ids[:, ::-1], mask) if model.config.shape == "encoder-decoder" else None
    tokens = tokens_from_ids(ids, mask)
    plain, rounded = (_outputs(model, each, tokens, source) for each in (params, quantized))
    real_BT = np.asarray(mask)
    for a, b in zip(plain[1:], rounded[1:], strict=True):
        _check_near(a, b)
    if model.config.head is None:
        _check_near(plain[0][real_BT], rounded[0][real_BT])
    else:
        assert 0.0 < _mean_kl(plain[0][real_BT], rounded[0][real_BT]) < 2e-3


def _mean_kl(plain_NV: jax.Array, rounded_NV: jax.Array) -> float:
    """Mean KL divergence of the next-token distributions, in nats."""
    logp_NV, logq_NV = jax.nn.log_softmax(plain_NV), jax.nn.log_softmax(rounded_NV)
    return float((jnp.exp(logp_NV) * (logp_NV - logq_NV)).sum(axis=-1).mean())


def _check_near(plain: jax.Array, rounded: jax.Array) -> None:
    """Assert a mean difference below 2% of the standard deviation, but not zero."""
    assert 0.0 < float(jnp.abs(rounded - plain).mean() / plain.std()) < 0.02


def _check_memory(params: Params, quantized: Params) -> None:
    """Assert that every matrix takes little more than a quarter of its memory, and nothing else is changed."""
    leaves = jax.tree_util.tree_leaves_with_path(quantized, is_leaf=lambda leaf: isinstance(leaf, Int8Matrix))
    for (path, before), (_, after) in zip(jax.tree_util.tree_leaves_with_path(params), leaves, strict=True):
        name = path_name(path)
        if isinstance(after, Int8Matrix):
            assert after.values.nbytes + after.scales.nbytes < 0.35 * before.nbytes, name
            assert after.values.size == before.size, name
        else:
            assert after is before, name
            assert any(part in name for part in KEPT), name


def test_a_hugging_face_directory_loads_with_int8_weights(pair_of):
    pair = pair_of("qwen3-moe")
    run = jf.load(pair.directory, weights="int8", cache="int8")
    assert is_quantized(run.params)
    assert run.model.runtime.cache == "int8"
    outputs = jf.generate(run, [[5, 9, 20], [7]], 4)
    assert all(0 <= token < VOCAB for row in outputs for token in row)
    quantized, plain = (np.concatenate(jf.score(each, [[8, 30, 41], [9]])) for each in (run, pair.run))
    np.testing.assert_allclose(quantized, plain, atol=0.05)
