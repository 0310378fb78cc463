"""Attention biases against transformers: relative position buckets, ALiBi slopes, and blocks of both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.biases import BucketedBias, SlopeBias, bias_block, distance_buckets, head_slopes
from jaxformer.ops.masks import Mask

DISTANCES = np.arange(-300, 301)
SIZES = [(32, 128), (32, 64), (16, 128), (8, 20), (6, 50), (64, 256), (4, 3), (20, 1000)]
TABLE = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SIZES)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "op by op"])
def test_buckets_match_t5(num_buckets, max_distance, causal, compiled):
    """Also under jit, where different rounding would move distances on the edge of a bucket."""
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    def ours(distance):
        return distance_buckets(distance, num_buckets, max_distance, causal)

    actual = (jax.jit(ours) if compiled else ours)(jnp.array(DISTANCES))
    expected = T5Attention._relative_position_bucket(
        torch.tensor(DISTANCES), not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    np.testing.assert_array_equal(actual, expected.numpy())


def test_large_distances_share_the_last_bucket():
    far = jnp.array([-(10**6), -1000, 1000, 10**6])
    np.testing.assert_array_equal(distance_buckets(far, 32, 128, causal=True), [31, 31, 0, 0])
    np.testing.assert_array_equal(distance_buckets(far, 32, 128, causal=False), [15, 15, 31, 31])


@pytest.mark.parametrize("num_heads", range(1, 21))
def test_slopes_match_bloom(num_heads):
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]  # slope times key index
    np.testing.assert_allclose(head_slopes(num_heads), theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize("offset", [None, np.array([4, 0])], ids=["no offset", "offset"])
def test_slope_bias_block_matches_a_loop_over_pairs(offset):
    actual = bias_block(SlopeBias(3), Mask(q_offset=offset), (1, 4), (2, 7))
    for b, n, t, s in np.ndindex(*actual.shape):
        distance = (2 + s) - (1 + t + (0 if offset is None else offset[b]))
        assert float(actual[b, n, t, s]) == pytest.approx(-head_slopes(3)[n] * abs(distance)), (b, n, t, s)
    assert actual.shape == (1 if offset is None else 2, 3, 3, 5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("offset", [None, np.array([4, 0, 19])], ids=["no offset", "offset"])
def test_bucketed_bias_block_matches_a_loop_over_pairs(causal, offset):
    bias = BucketedBias(TABLE, max_distance=12, causal=causal)
    actual = bias_block(bias, Mask(q_offset=offset), (1, 4), (2, 23))
    assert actual.shape == (1 if offset is None else 3, 3, 3, 21)
    for b, t, s in np.ndindex(actual.shape[0], 3, 21):
        distance = (2 + s) - (1 + t + (0 if offset is None else offset[b]))
        expected = TABLE[int(distance_buckets(jnp.array(distance), 8, 12, causal))]
        np.testing.assert_array_equal(actual[b, :, t, s], expected)


def test_bias_block_with_a_cache_matches_t5():
    import torch
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=6, d_kv=2, num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=12,
        is_decoder=True,
    )  # fmt: skip
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    theirs.relative_attention_bias.weight.data = torch.tensor(TABLE)
    expected = theirs.compute_bias(4, 23, past_seen_tokens=7).detach().numpy()
    mask = Mask(causal=True, q_offset=np.array([7]))
    np.testing.assert_array_equal(bias_block(BucketedBias(TABLE, 12, causal=True), mask, (0, 4), (0, 23)), expected)


@pytest.mark.parametrize("bias", [SlopeBias(3), BucketedBias(TABLE, 12, causal=False)], ids=["slopes", "buckets"])
def test_a_block_is_a_slice_of_the_full_bias(bias):
    mask = Mask(q_offset=np.array([4, 0]))
    whole = bias_block(bias, mask, (0, 9), (0, 11))
    np.testing.assert_array_equal(bias_block(bias, mask, (2, 7), (3, 9)), whole[:, :, 2:7, 3:9])


def test_biases_are_float32_and_sizes_are_static():
    """A bfloat16 table must not make the logits bfloat16."""
    half = BucketedBias(jnp.array(TABLE, jnp.bfloat16), 12, causal=True)
    assert bias_block(half, Mask(), (0, 4), (0, 4)).dtype == jnp.float32
    assert len(jax.tree.leaves(half)) == 1
    assert jax.tree.leaves(SlopeBias(3)) == []
