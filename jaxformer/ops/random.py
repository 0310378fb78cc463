"""Random numbers that do not depend on how arrays are split over devices, and stochastic rounding."""

import math

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float

from jaxformer.sharding import first_row


def uniform(key: jax.Array, shape: tuple[int, ...]) -> Float[Array, "B *dims"]:
    """Like `jax.random.uniform(key, shape)`, in float32; inside `on_devices`, this device's rows of the whole batch.

    The counter of the generator is the index of an element in the whole batch, as in JAX's own partitionable generator,
    so that one device gives the numbers of `jax.random.uniform`.
    """
    hi, lo = _element_index(first_row(shape[0]), shape)
    word_0, word_1 = jax.random.key_data(key)[:2]
    bits_hi, bits_lo = threefry2x32_p.bind(*jnp.broadcast_arrays(word_0, word_1, hi, lo))
    # The upper bits become the mantissa of a number in [1, 2).
    ones = jnp.uint32(jnp.finfo(jnp.float32).bits - jnp.finfo(jnp.float32).nmant)
    mantissa = jax.lax.shift_right_logical(bits_hi ^ bits_lo, ones) | jnp.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0


def round_to_bfloat16(key: jax.Array, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Round a float32 array stochastically: up or down, with the probabilities that make the mean equal to `x`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # A bfloat16 is the upper half of a float32. The carry from a random lower half rounds up as often as it should.
    carried = bits + jax.random.bits(key, x.shape, jnp.uint16)
    rounded = jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _element_index(first: jax.Array | int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The index of every element in the whole batch, as the upper and the lower 32 bits."""
    rest = shape[1:]
    rows = jnp.uint32(first) + jnp.arange(shape[0], dtype=jnp.uint32)
    hi, start = (a.reshape(-1, *[1] * len(rest)) for a in _wide_product(rows, math.prod(rest)))
    strides = [math.prod(rest[i + 1 :]) for i in range(len(rest))]
    within = sum(
        (jax.lax.broadcasted_iota(jnp.uint32, shape, i + 1) * jnp.uint32(n) for i, n in enumerate(strides)),
        start=jnp.zeros(shape, jnp.uint32),
    )
    lo = start + within
    return hi + (lo < within).astype(jnp.uint32), lo


def _wide_product(a: Array, b: int) -> tuple[Array, Array]:
    """The upper and the lower 32 bits of the product of uint32 numbers."""
    a_0, a_1, b_0, b_1 = a & 0xFFFF, a >> 16, jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    low, middle_0, middle_1 = a_0 * b_0, a_1 * b_0, a_0 * b_1
    middle = (low >> 16) + (middle_0 & 0xFFFF) + (middle_1 & 0xFFFF)
    return a_1 * b_1 + (middle_0 >> 16) + (middle_1 >> 16) + (middle >> 16), (middle << 16) | (low & 0xFFFF)
