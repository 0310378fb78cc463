"""Inverted dropout with an explicit key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dropout(x: Float[Array, "*dims"], rate: float, key: jax.Array | None) -> Float[Array, "*dims"]:
    """Zero a share `rate` of x and scale up the rest; no key means no dropout."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def split_key(key: jax.Array | None, num: int) -> list[jax.Array | None]:
    """`num` independent keys, or as many nones."""
    return [None] * num if key is None else list(jax.random.split(key, num))
