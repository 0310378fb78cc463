"""Position encodings: against their formulas, against transformers, and their properties."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import BandScaling, DynamicNtkScaling, LinearScaling, Rope, Sinusoidal, YarnScaling
from jaxformer.config.positions import RopeScaling
from jaxformer.ops.positions import apply_rope, rope_frequencies, rope_tables, sinusoidal

# ---------------------------------------------------------------- sinusoids


def rope(x, positions, spec):
    return apply_rope(x, rope_tables(positions, spec, x.shape[-1]))


def test_sinusoids_match_the_formula_of_the_paper():
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same): arXiv:1706.03762, section 3.5."""
    positions, dim = np.array([[0, 1, 2, 511], [7, 0, 0, 3]]), 10
    expected = np.zeros((2, 4, dim))
    for (b, t), position in np.ndenumerate(positions):
        for i in range(dim // 2):
            angle = position / 10_000 ** (2 * i / dim)
            expected[b, t, 2 * i : 2 * i + 2] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(sinusoidal(jnp.array(positions), dim, Sinusoidal()), expected, atol=1e-4)


@pytest.mark.parametrize("offset", [0, 2])
def test_sinusoids_in_halves_match_marian(offset):
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    positions, dim = np.array([[0, 1, 2, 61], [7, 0, 0, 3]]), 10
    table = MarianSinusoidalPositionalEmbedding(64, dim).create_weight().numpy()
    spec = Sinusoidal(layout="halves", offset=offset)
    np.testing.assert_allclose(sinusoidal(jnp.array(positions), dim, spec), table[positions + offset], atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (Sinusoidal(layout="halves", endpoint=True), 0),  # tensor2tensor: layers/common_attention.py
        (Sinusoidal(layout="halves", endpoint=True, offset=1), 1),  # OpenNMT-tf: layers/position.py
        (Sinusoidal(layout="halves", endpoint=True, offset=2), 2),  # fairseq with its usual padding id of 1
    ],
    ids=["tensor2tensor", "OpenNMT-tf", "fairseq"],
)
@pytest.mark.parametrize("dim", [2, 4, 10])
def test_sinusoids_with_an_endpoint_match_the_formulas_of_translation_toolkits(spec, first, dim):
    """Timescales are a geometric sequence from 1 to 10000 with D/2 members; all sines precede all cosines."""
    positions = np.array([[0, 1, 2, 61], [7, 0, 0, 3]])
    expected = np.zeros((2, 4, dim))
    timescales = np.geomspace(1.0, 10_000.0, dim // 2)
    for (b, t), position in np.ndenumerate(positions):
        for i, timescale in enumerate(timescales):
            expected[b, t, i] = np.sin((first + position) / timescale)
            expected[b, t, i + dim // 2] = np.cos((first + position) / timescale)
    np.testing.assert_allclose(sinusoidal(jnp.array(positions), dim, spec), expected, atol=1e-5)


@pytest.mark.parametrize("padding_id", [0, 1, 5])
def test_sinusoids_with_an_endpoint_match_m2m100(padding_id):
    """M2M100 was trained with fairseq: the first position is the padding id plus 1."""
    import torch
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

    length, dim = 60, 10
    theirs = M2M100SinusoidalPositionalEmbedding(64, dim, padding_id)(torch.full((1, length), padding_id + 1))
    spec = Sinusoidal(layout="halves", endpoint=True, offset=padding_id + 1)
    np.testing.assert_allclose(sinusoidal(_count(length), dim, spec), theirs.numpy(), atol=1e-5)


def test_sinusoids_in_halves_match_pegasus():
    from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding

    theirs = PegasusSinusoidalPositionalEmbedding(60, 10).create_weight().numpy()
    ours = sinusoidal(_count(60), 10, Sinusoidal(layout="halves"))
    np.testing.assert_allclose(ours[0], theirs, atol=1e-5)


def test_layouts_hold_the_same_values_and_an_offset_shifts_positions():
    positions, dim = np.array([[0, 1, 5, 30]]), 10
    interleaved, halves = (sinusoidal(positions, dim, Sinusoidal(layout=name)) for name in ("interleaved", "halves"))
    np.testing.assert_array_equal(
        interleaved, np.stack(np.split(halves, 2, axis=-1), axis=-1).reshape(interleaved.shape)
    )
    shifted = sinusoidal(positions, dim, Sinusoidal(offset=3))
    np.testing.assert_array_equal(shifted, sinusoidal(positions + 3, dim, Sinusoidal()))


# ---------------------------------------------------------------- rotary embeddings


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rope_matches_llama(theta):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q, k = _normal((2, 6, 4, 8)), _normal((2, 6, 2, 8))
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 1000]])  # the second row is packed
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.tensor(q), torch.tensor(positions))
    expected = apply_rotary_pos_emb(torch.tensor(q), torch.tensor(k), cos, sin, unsqueeze_dim=2)
    for ours, theirs in zip((q, k), expected, strict=True):
        # Angles up to 1000 rad have float32 errors of 1e-4 in both implementations.
        np.testing.assert_allclose(rope(ours, positions, Rope(theta=theta)), theirs.numpy(), atol=2e-4)
        np.testing.assert_allclose(rope(ours, positions, Rope(theta=theta))[0], theirs.numpy()[0], atol=1e-5)


# name: (our scaling, their parameters, their max_position_embeddings)
SCALINGS = {
    "linear": (LinearScaling(factor=4.0), {"rope_type": "linear", "factor": 4.0}, 64),
    "dynamic, short": (DynamicNtkScaling(factor=3.0, original_length=64), {"rope_type": "dynamic", "factor": 3.0}, 64),
    "dynamic, as long": (
        DynamicNtkScaling(factor=3.0, original_length=40),
        {"rope_type": "dynamic", "factor": 3.0},
        40,
    ),
    "dynamic, long": (DynamicNtkScaling(factor=3.0, original_length=16), {"rope_type": "dynamic", "factor": 3.0}, 16),
    "bands": (
        BandScaling(factor=8.0, original_length=256),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 256},
        2048,
    ),
    "other bands": (
        BandScaling(factor=5.0, low_factor=2.0, high_factor=9.0, original_length=512),
        {"rope_type": "llama3", "factor": 5.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0}
        | {"original_max_position_embeddings": 512},
        2560,
    ),
    "yarn": (
        YarnScaling(factor=4.0, original_length=256),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        1024,
    ),
    "yarn of other turns": (
        YarnScaling(factor=6.0, original_length=512, fast_turns=20.0, slow_turns=2.0),
        {"rope_type": "yarn", "factor": 6.0, "original_max_position_embeddings": 512}
        | {"beta_fast": 20.0, "beta_slow": 2.0},
        3072,
    ),
    "yarn of a given magnitude": (
        YarnScaling(factor=4.0, original_length=256, magnitude=0.7),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 0.7},
        1024,
    ),
    "yarn between channels": (
        YarnScaling(factor=4.0, original_length=4096, whole_channels=False),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
        16384,
    ),
    "yarn with a ramp of no width": (
        YarnScaling(factor=4.0, original_length=8, fast_turns=32.0, slow_turns=2.0),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
        | {"beta_fast": 32.0, "beta_slow": 2.0},
        32,
    ),
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_match_transformers(name, fraction):
    import torch
    from transformers import StableLmConfig
    from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding, apply_rotary_pos_emb

    scaling, theirs, max_length = SCALINGS[name]
    spec, x, positions = (
        Rope(theta=5_000.0, fraction=fraction, scaling=scaling),
        _normal((1, 40, 2, 32)),
        _count(40),
    )
    config = StableLmConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=max_length,
        rope_parameters={"rope_theta": 5_000.0, "partial_rotary_factor": fraction, **theirs},
    )
    rotary, dim = StableLmRotaryEmbedding(config), int(32 * fraction)
    cos, sin = rotary(torch.tensor(x), torch.tensor(positions))
    rotated, _ = apply_rotary_pos_emb(*(torch.tensor(x[..., :dim]),) * 2, cos, sin, unsqueeze_dim=2)
    frequencies, magnitude = rope_frequencies(spec, dim, positions)
    np.testing.assert_allclose(frequencies[0, 0, 0], rotary.inv_freq.numpy(), rtol=2e-6)
    assert magnitude == pytest.approx(rotary.attention_scaling)
    expected = np.concatenate([rotated.numpy(), x[..., dim:]], axis=-1)
    np.testing.assert_allclose(rope(x, positions, spec), expected, atol=2e-5)


def test_every_scaling_is_covered_and_changes_frequencies():
    assert {type(scaling) for scaling, _, _ in SCALINGS.values()} == set(get_args(get_args(RopeScaling)[0]))
    plain = rope_frequencies(Rope(), 32)[0]
    for name, (scaling, _, _) in SCALINGS.items():
        frequencies = rope_frequencies(Rope(scaling=scaling), 32, _count(40))[0]
        is_plain = np.allclose(frequencies, plain, rtol=1e-4)
        assert is_plain == (name in ("dynamic, short", "dynamic, as long")), name


def test_dynamic_scaling_of_a_row_does_not_affect_other_rows():
    """Each row of a batch is scaled by its own length."""
    spec, x = Rope(scaling=DynamicNtkScaling(factor=2.0, original_length=8)), _normal((2, 6, 1, 16))
    positions = np.array([[0, 1, 2, 3, 4, 5], [14, 15, 16, 17, 18, 19]])
    both = rope(x, positions, spec)
    for row in range(2):
        one = slice(row, row + 1)
        np.testing.assert_allclose(both[one], rope(x[one], positions[one], spec), atol=1e-6)
    np.testing.assert_allclose(both[:1], rope(x[:1], positions[:1], Rope()), atol=1e-6)
    assert np.abs(both[1:] - rope(x[1:], positions[1:], Rope())).max() > 1e-2


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_rotated_neighbours_match_gptj(fraction):
    import torch
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    x, positions, dim = _normal((2, 6, 4, 16)), np.array([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 30]]), int(16 * fraction)
    sin, cos = torch.split(create_sinusoidal_positions(32, dim)[torch.tensor(positions)], dim // 2, dim=-1)
    rotated = apply_rotary_pos_emb(torch.tensor(x[..., :dim]), sin, cos).numpy()
    ours = rope(x, positions, Rope(fraction=fraction, pairing="neighbours"))
    np.testing.assert_allclose(ours, np.concatenate([rotated, x[..., dim:]], axis=-1), atol=1e-5)


@pytest.mark.parametrize("fraction", [0.5, 0.25])
def test_partially_rotated_halves_match_neox(fraction):
    import torch
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

    x, positions = _normal((2, 6, 4, 16)), np.array([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 30]])
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": fraction}
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    cos, sin = GPTNeoXRotaryEmbedding(config)(torch.tensor(x), torch.tensor(positions))
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)
    np.testing.assert_allclose(rope(x, positions, Rope(fraction=fraction)), expected.numpy(), atol=1e-5)


def test_scores_depend_only_on_the_distance():
    q, k = _normal((2, 1, 1, 1, 16))

    def score(q_position, k_position):
        products = rope(q, np.array([[q_position]]), Rope()) * rope(k, np.array([[k_position]]), Rope())
        return float(products.sum())

    assert score(9, 5) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(9, 5) != pytest.approx(score(9, 6), abs=1e-2)
    assert score(9, 5) != pytest.approx(score(5, 9), abs=1e-2)


def test_position_zero_is_not_rotated_and_norms_are_preserved():
    x = _normal((1, 3, 2, 8))
    rotated = rope(x, np.array([[0, 1, 50]]), Rope())
    np.testing.assert_allclose(rotated[:, 0], x[:, 0], atol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_neighbouring_positions_differ_in_bfloat16():
    """With bfloat16 angles, positions 1000 and 1001 would have the same rotation."""
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    rotated = rope(x, np.array([[1000, 1001]]), Rope())
    assert rotated.dtype == jnp.bfloat16
    expected = rope(x.astype(jnp.float32), np.array([[1000, 1001]]), Rope())
    np.testing.assert_array_equal(rotated, expected.astype(jnp.bfloat16))
    assert (rotated[0, 0] != rotated[0, 1]).any()


def _count(length):
    return np.arange(length)[None]


def _normal(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)
