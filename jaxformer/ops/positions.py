"""Position encodings. Angles are always float32: bfloat16 cannot tell neighbouring positions apart."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sinusoidal(positions: Int[Array, "B T"], dim: int) -> Float[Array, "B T D"]:
    """Sine in even and cosine in odd channels (arXiv:1706.03762, section 3.5)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, dim)


def rope(x_BTNH: Float[Array, "B T N H"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T N H"]:
    """Rotate channel i with channel i + H/2 by position * theta^(-2i/H) (arXiv:2104.09864, section 3.4).

    Deviation: the paper pairs neighbouring channels; pairing the halves is what published checkpoints use.
    """
    half = x_BTNH.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
