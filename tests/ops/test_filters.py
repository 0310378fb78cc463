"""Choosing tokens: filters against transformers' warpers, draws by their statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.ops.sampling import sample, top_k_filter, top_p_filter

LOGITS = (3 * np.random.default_rng(0).normal(size=(64, 50))).astype(np.float32)


@pytest.mark.parametrize("k", [1, 2, 7, 49, 50, 80])
def test_top_k_is_that_of_transformers(k):
    import torch
    from transformers import TopKLogitsWarper

    wanted = TopKLogitsWarper(k)(None, torch.tensor(LOGITS)).numpy()
    np.testing.assert_array_equal(top_k_filter(LOGITS, k), wanted)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.97])
def test_top_p_is_that_of_transformers(p):
    import torch
    from transformers import TopPLogitsWarper

    wanted = TopPLogitsWarper(p)(None, torch.tensor(LOGITS)).numpy()
    np.testing.assert_array_equal(top_p_filter(LOGITS, p), wanted)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=6, max_size=6).map(lambda row: np.array([row], np.float32)),
    st.floats(0.01, 0.99),
)
def test_top_p_keeps_the_likeliest_until_p_is_reached(logits, p):
    kept = np.isfinite(np.asarray(top_p_filter(logits, p)))[0]
    exact = np.exp(logits[0].astype(np.float64) - logits.max())
    exact /= exact.sum()
    assert kept.any()
    assert exact[kept].sum() >= p - 1e-5
    assert exact[kept].min() >= exact[~kept].max(initial=0.0)
    likelier = exact[exact > exact[kept].min()]  # without the least likely of the kept, p is not reached
    assert likelier.sum() < p + 1e-5


def test_filters_keep_the_values_of_what_they_keep():
    for filtered in (top_k_filter(LOGITS, 5), top_p_filter(LOGITS, 0.8)):
        kept = np.isfinite(np.asarray(filtered))
        np.testing.assert_array_equal(np.asarray(filtered)[kept], LOGITS[kept])


def test_temperature_zero_is_argmax_whatever_the_keys_and_filters():
    keys = jax.random.split(jax.random.key(0), 64)
    for options in ({}, {"top_k": 3}, {"top_p": 0.5}):
        drawn = sample(LOGITS, keys, temperature=0.0, **options)
        np.testing.assert_array_equal(drawn, LOGITS.argmax(-1))
        assert drawn.dtype == jnp.int32
    np.testing.assert_array_equal(sample(LOGITS, keys[::-1], temperature=0.0), LOGITS.argmax(-1))


def test_a_row_does_not_depend_on_its_neighbours():
    keys = jax.random.split(jax.random.key(1), 64)
    options = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
    together = np.asarray(sample(LOGITS, keys, **options))
    for rows in (slice(0, 1), slice(10, 13), slice(63, None, -1)):
        np.testing.assert_array_equal(sample(LOGITS[rows], keys[rows], **options), together[rows])


def test_one_candidate_left_is_always_drawn():
    keys = jax.random.split(jax.random.key(2), 64)
    np.testing.assert_array_equal(sample(LOGITS, keys, temperature=5.0, top_k=1), LOGITS.argmax(-1))
    np.testing.assert_array_equal(sample(LOGITS, keys, temperature=5.0, top_p=1e-6), LOGITS.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature):
    draws = 20_000
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    keys = jax.random.split(jax.random.key(3), draws)
    drawn = np.asarray(sample(np.broadcast_to(logits, (draws, 4)), keys, temperature=temperature))
    wanted = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    found = np.bincount(drawn, minlength=4) / draws
    assert (np.abs(found - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / draws)).all()


def test_temperature_comes_before_top_p():
    """As in transformers: a low temperature leaves fewer tokens to reach p."""
    logits = np.broadcast_to(np.array([2.0, 1.0, 0.0, -1.0], np.float32), (2000, 4))
    keys = jax.random.split(jax.random.key(4), 2000)
    assert set(np.unique(sample(logits, keys, temperature=1.0, top_p=0.9))) == {0, 1, 2}
    assert set(np.unique(sample(logits, keys, temperature=0.5, top_p=0.9))) == {0, 1}
