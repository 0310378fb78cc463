"""`top_k` against `jax.lax.top_k`, including ties."""

import jax
import numpy as np
import pytest

from jaxformer.ops.reductions import BLOCK, SHORT_ROW, top_k


@pytest.mark.parametrize("width", [5, SHORT_ROW - 1, SHORT_ROW, SHORT_ROW + 1, 40 * BLOCK, 40 * BLOCK + 77])
@pytest.mark.parametrize("k", [1, 5, 31])
def test_values_and_indices_match_jax(width, k):
    rng = np.random.default_rng(0)
    k = min(k, width)
    rows = rng.normal(size=(3, width)).astype(np.float32)
    ties = rng.integers(0, 4, size=(3, width)).astype(np.float32)
    removed = np.where(rng.random((3, width)) < 0.999, -np.inf, rows).astype(np.float32)
    for values in (rows, ties, removed, np.full_like(rows, -np.inf), np.zeros_like(rows)):
        for ours, theirs in zip(jax.jit(top_k, static_argnums=1)(values, k), jax.lax.top_k(values, k), strict=True):
            np.testing.assert_array_equal(ours, theirs)
