"""Dropout: disabled without a key, determined by the key, and applied wherever the config sets a rate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import apply_overrides
from jaxformer.ops.elementwise import dropout, split_key
from jaxformer.typing import tokens_from_ids

TOKENS = tokens_from_ids(jnp.array(np.random.default_rng(0).integers(0, 31, size=(2, 6))))
FIELDS = [
    "embedding.dropout",
    "decoder.pattern.0.dropout",
    "decoder.pattern.0.attention.dropout",
    "decoder.pattern.0.cross_attention.dropout",
    "encoder.pattern.0.dropout",
    "encoder.pattern.0.attention.dropout",
]


def test_no_key_no_dropout(mixed, forward):
    without = apply_overrides(
        mixed,
        [
            "embedding.dropout=0",
            *(f"decoder.pattern.{i}.{field}=0" for i in range(2) for field in ("dropout", "attention.dropout")),
        ],
    )
    np.testing.assert_array_equal(forward(mixed, TOKENS), forward(without, TOKENS))
    np.testing.assert_array_equal(forward(without, TOKENS, key=jax.random.key(0)), forward(without, TOKENS))


def test_dropout_depends_on_the_key(mixed, forward):
    first, again, other = (forward(mixed, TOKENS, key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert jnp.abs(first - other).max() > 1e-3
    assert jnp.abs(first - forward(mixed, TOKENS)).max() > 1e-3


@pytest.mark.parametrize("field", FIELDS)
def test_every_dropout_field_has_an_effect(pair, forward, field):
    config = apply_overrides(pair, [f"{field}=0.5"])
    dropped = forward(config, TOKENS, TOKENS, jax.random.key(0))
    assert jnp.abs(dropped - forward(config, TOKENS, TOKENS)).max() > 1e-3


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_zeros_at_its_rate_and_scales_the_rest(rate):
    x = np.random.default_rng(0).normal(size=(100, 1000)).astype(np.float32)
    dropped = np.asarray(dropout(x, rate, jax.random.key(0)))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], x[kept] / (1 - rate), rtol=1e-6)
    assert abs(1 - kept.mean() - rate) < 5 * (rate * (1 - rate) / x.size) ** 0.5


def test_split_key_gives_distinct_keys_or_none():
    assert split_key(None, 3) == [None, None, None]
    keys = split_key(jax.random.key(0), 3)
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 3


def test_rows_have_different_dropout_masks(mixed, forward):
    """With equal tokens in all rows, outputs can only differ by their dropout masks."""
    same = tokens_from_ids(jnp.zeros((2, 6), int))
    dropped = forward(mixed, same, key=jax.random.key(0))
    assert jnp.abs(dropped[0] - dropped[1]).max() > 1e-3
