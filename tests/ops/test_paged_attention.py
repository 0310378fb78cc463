"""Paged attention over a contiguous cache, in Pallas' interpreter, against the reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxformer.config import MeshConfig
from jaxformer.ops.attention import (
    AttentionInputs,
    AttentionParams,
    CachedKeysValues,
    attend,
    choose_kernel,
    paged,
    reference,
)
from jaxformer.ops.biases import SlopeBias
from jaxformer.ops.masks import Mask
from jaxformer.sharding import make_mesh

B, H, L = 3, 128, 2
LENGTHS = np.array([1, 48, 17], np.int32)


def make_inputs(N: int, K: int, S: int, layer: int | None = None, softcap: float | None = None) -> AttentionInputs:
    rng = np.random.default_rng(0)
    lead = () if layer is None else (L,)
    q = rng.normal(size=(B, 1, N, H)).astype(np.float32)
    k, v = (jnp.asarray(rng.normal(size=(*lead, B, K, S, H)), jnp.bfloat16) for _ in range(2))
    mask = Mask(causal=True, q_offset=jnp.asarray(LENGTHS - 1))
    cache = CachedKeysValues(k, v, None if layer is None else jnp.int32(layer), jnp.asarray(LENGTHS))
    params = AttentionParams(0.11, softcap)
    # The reference computes with the same numbers in float32.
    keys_values = (a.astype(jnp.float32) if layer is None else a[layer].astype(jnp.float32) for a in (k, v))
    return AttentionInputs(q, *keys_values, mask, params, cache=cache)


@pytest.mark.parametrize(
    ("N", "K", "S", "layer", "softcap"),
    [(4, 2, 48, None, None), (4, 2, 48, 1, 0.7), (2, 2, 64, 0, None), (8, 1, 48, 1, None)],
    ids=["grouped queries", "stacked, soft cap", "one query per head", "multi-query"],
)
def test_paged_attention_matches_the_reference(N, K, S, layer, softcap):
    inputs = make_inputs(N, K, S, layer, softcap)
    with pltpu.force_tpu_interpret_mode():
        actual = jax.jit(paged.attend)(inputs)
    np.testing.assert_allclose(actual, reference.attend(inputs), atol=1e-5)


def test_paged_attention_runs_on_the_shards_of_a_mesh():
    """Two devices for two KV heads, each of which reads its own pages."""
    inputs = make_inputs(4, 2, 48, layer=1)
    mesh = make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[:2])
    with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode():
        actual = jax.jit(paged.attend)(inputs)
    np.testing.assert_allclose(actual, reference.attend(inputs), atol=1e-5)


def test_reasons_against_paged_attention():
    inputs = make_inputs(4, 2, 48)
    assert choose_kernel(inputs, "tpu").kernel == "paged"
    assert "paged" not in choose_kernel(inputs, "gpu").skipped
    wide = replace(inputs.cache, k=inputs.k_BKSH)
    for change, reason in (
        ({"cache": wide}, "rounds keys and values to bfloat16, and the cache is float32"),
        ({"cache": None}, "one query per row"),
        ({"bias": SlopeBias(4)}, "adds no bias such as SlopeBias"),
        ({"q_BTNH": inputs.q_BTNH[..., :64]}, "multiple of 128, and it is 64"),
        ({"k_BKSH": inputs.k_BKSH[:, :, :40]}, "multiple of 16, and it is 40"),
    ):
        assert reason in paged.unsupported(replace(inputs, **change), "tpu")
    with pytest.raises(ValueError, match="it is a kernel for tpu"):
        attend(inputs, impl="paged", platform="cpu")
