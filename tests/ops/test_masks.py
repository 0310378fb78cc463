"""Masks against their definition, evaluated for one query and one key at a time."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.ops.masks import Mask, dense_mask

B, T, S = 2, 4, 7


def rows(length: int, top: int) -> st.SearchStrategy:
    return st.none() | st.lists(st.integers(0, top), min_size=length, max_size=length).map(np.array)


def matrices(length: int) -> st.SearchStrategy:
    return st.lists(rows(length, 2).filter(lambda r: r is not None), min_size=B, max_size=B).map(np.array)


@st.composite
def masks(draw) -> Mask:
    segments = draw(st.booleans())
    return Mask(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, S + 1)),
        q_segments=draw(matrices(T)) if segments else None,
        kv_segments=draw(matrices(S)) if segments else None,
        q_offset=draw(rows(B, S)),
        prefix=draw(st.none() | matrices(S).map(lambda flags: flags > 0)),
        kv_lengths=draw(rows(B, S)),
    )


@given(masks())
def test_dense_masks_match_the_definition(visible, mask):
    np.testing.assert_array_equal(_dense(mask, (0, T), (0, S)), visible(mask, B, T, S))


@given(masks(), st.integers(0, T - 2), st.integers(0, S - 3))
def test_a_block_is_a_slice_of_the_full_mask(mask, t, s):
    whole = _dense(mask, (0, T), (0, S))
    np.testing.assert_array_equal(_dense(mask, (t, t + 2), (s, s + 3)), whole[:, t : t + 2, s : s + 3])


def test_a_mask_without_conditions_is_none():
    """So that kernels can skip masking."""
    assert dense_mask(Mask(), (0, T), (0, S)) is None
    assert dense_mask(Mask(prefix=np.ones((2, S), bool)), (0, T), (0, S)) is None, (
        "a prefix has no effect without `causal`"
    )


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, window=2)])
def test_a_mask_without_arrays_has_batch_size_one(mask):
    assert dense_mask(mask, (0, T), (0, S)).shape == (1, T, S)


def test_flags_are_static_and_arrays_are_leaves():
    """Kernels read `causal` and `window` at trace time."""
    mask = Mask(causal=True, window=3, q_offset=np.array([1, 2]))
    assert len(jax.tree.leaves(mask)) == 1

    @jax.jit
    def dense(mask):
        assert mask.causal is True
        assert mask.window == 3
        return dense_mask(mask, (0, T), (0, S))

    np.testing.assert_array_equal(dense(mask), dense_mask(mask, (0, T), (0, S)))


def _dense(mask: Mask, queries: tuple[int, int], keys: tuple[int, int]) -> np.ndarray:
    shape = (B, queries[1] - queries[0], keys[1] - keys[0])
    result = dense_mask(mask, queries, keys)
    return np.broadcast_to(True if result is None else np.asarray(result), shape)
