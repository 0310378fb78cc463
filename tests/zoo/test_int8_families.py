"""Every family with matrices of whole numbers: it runs, its answers stay close, its parameters shrink."""

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
"""What stays as it is: small, or rounded at a cost to the answers."""


@partial(jax.jit, static_argnames="model")
def _outputs(model: Transformer, params: Params, tokens: Tokens, source: Tokens | None) -> tuple[jax.Array, ...]:
    """Logits or hidden states, and what a pooler gives."""
    outputs = (model.apply({"params": params}, tokens, source),)
    if model.config.pooler is not None:
        outputs += (model.apply({"params": params}, tokens, method="pool"),)
    return outputs


# Others are one of these with another head, or other sizes.
DISTINCT = [name for name in SAMPLES if name not in ("mt5", "minilm") and not name.endswith(" classes")]


# One of each structure: grouped queries, experts, windows with soft-caps, a relative bias, an encoder, a recurrence.
QUICK = {"llama", "mixtral", "t5"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*DISTINCT, "bert classes", *OWN)],
)
def test_every_family_runs_and_stays_close(name, pair_of):
    if name in SAMPLES:
        run = pair_of(name).run
        model, params = run.model, run.params
    else:
        model = Transformer(OWN[name]())
        params = init_params(model.config, jax.random.key(7))
    whole = quantize_params(params, abstract_params(model.config)[1])
    assert is_quantized(whole)
    _check_shrunk(params, whole)
    ids = jnp.asarray(np.random.default_rng(0).integers(3, VOCAB - 1, (4, 24)), jnp.int32)
    mask = jnp.arange(24) < jnp.array([24, 9, 17, 3])[:, None]
    source = tokens_from_ids(ids[:, ::-1], mask) if model.config.shape == "encoder-decoder" else None
    tokens = tokens_from_ids(ids, mask)
    plain, rounded = (_outputs(model, each, tokens, source) for each in (params, whole))
    real_BT = np.asarray(mask)
    for a, b in zip(plain[1:], rounded[1:], strict=True):
        _check_near(a, b)
    if model.config.head is None:
        _check_near(plain[0][real_BT], rounded[0][real_BT])
    else:
        assert 0.0 < _mean_kl(plain[0][real_BT], rounded[0][real_BT]) < 2e-3


def _mean_kl(plain_NV: jax.Array, rounded_NV: jax.Array) -> float:
    """How much the likelihoods of the next token change, in nats."""
    logp_NV, logq_NV = jax.nn.log_softmax(plain_NV), jax.nn.log_softmax(rounded_NV)
    return float((jnp.exp(logp_NV) * (logp_NV - logq_NV)).sum(axis=-1).mean())


def _check_near(plain: jax.Array, rounded: jax.Array) -> None:
    """To 2% of their spread in the mean, yet not the same."""
    assert 0.0 < float(jnp.abs(rounded - plain).mean() / plain.std()) < 0.02


def _check_shrunk(params: Params, whole: Params) -> None:
    """Every matrix to little more than a quarter, nothing else touched."""
    found = jax.tree_util.tree_leaves_with_path(whole, is_leaf=lambda leaf: isinstance(leaf, Int8Matrix))
    for (path, before), (_, after) in zip(jax.tree_util.tree_leaves_with_path(params), found, strict=True):
        name = path_name(path)
        if isinstance(after, Int8Matrix):
            assert after.values.nbytes + after.scales.nbytes < 0.35 * before.nbytes, name
            assert after.values.size == before.size, name
        else:
            assert after is before, name
            assert any(part in name for part in KEPT), name


def test_a_hugging_face_directory_loads_as_whole_numbers(pair_of):
    pair = pair_of("qwen3-moe")
    run = jf.load(pair.directory, weights="int8", cache="int8")
    assert is_quantized(run.params)
    assert run.model.runtime.cache == "int8"
    outputs = jf.generate(run, [[5, 9, 20], [7]], 4)
    assert all(0 <= token < VOCAB for row in outputs for token in row)
    found, plain = (np.concatenate(jf.score(each, [[8, 30, 41], [9]])) for each in (run, pair.run))
    np.testing.assert_allclose(found, plain, atol=0.05)
