"""Position encodings against the formula, against transformers' rotary embedding, and their properties."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.positions import rope, sinusoidal


def test_sinusoids_are_the_paper_s_formula():
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same): arXiv:1706.03762, section 3.5."""
    positions, dim = np.array([[0, 1, 2, 511], [7, 0, 0, 3]]), 10
    wanted = np.zeros((2, 4, dim))
    for (b, t), position in np.ndenumerate(positions):
        for i in range(dim // 2):
            angle = position / 10_000 ** (2 * i / dim)
            wanted[b, t, 2 * i : 2 * i + 2] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(sinusoidal(jnp.array(positions), dim), wanted, atol=1e-4)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rope_is_that_of_llama(theta):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q, k = _normal((2, 6, 4, 8)), _normal((2, 6, 2, 8))
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 1000]])  # the second row is packed
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.tensor(q), torch.tensor(positions))
    wanted = apply_rotary_pos_emb(torch.tensor(q), torch.tensor(k), cos, sin, unsqueeze_dim=2)
    for ours, theirs in zip((q, k), wanted, strict=True):
        # Angles up to 1000 rad carry float32 errors of 1e-4 on both sides.
        np.testing.assert_allclose(rope(ours, positions, theta), theirs.numpy(), atol=2e-4)
        np.testing.assert_allclose(rope(ours, positions, theta)[0], theirs.numpy()[0], atol=1e-5)


def test_scores_depend_on_the_distance_alone():
    q, k = _normal((2, 1, 1, 1, 16))

    def score(at_q, at_k):
        turned = rope(q, np.array([[at_q]]), 10_000.0) * rope(k, np.array([[at_k]]), 10_000.0)
        return float(turned.sum())

    assert score(9, 5) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(9, 5) != pytest.approx(score(9, 6), abs=1e-2)
    assert score(9, 5) != pytest.approx(score(5, 9), abs=1e-2)


def test_position_zero_turns_nothing_and_length_is_kept():
    x = _normal((1, 3, 2, 8))
    turned = rope(x, np.array([[0, 1, 50]]), 10_000.0)
    np.testing.assert_allclose(turned[:, 0], x[:, 0], atol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_neighbouring_positions_differ_in_bfloat16():
    """Angles of bfloat16 would give positions 1000 and 1001 the same rotation."""
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    turned = rope(x, np.array([[1000, 1001]]), 10_000.0)
    assert turned.dtype == jnp.bfloat16
    wanted = rope(x.astype(jnp.float32), np.array([[1000, 1001]]), 10_000.0)
    np.testing.assert_array_equal(turned, wanted.astype(jnp.bfloat16))
    assert (turned[0, 0] != turned[0, 1]).any()


def _normal(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)
