"""Activations, soft caps and dropout.

Activations save only their input for the backward pass and recompute the rest: differentiating GELU term by term would
save four arrays of the MLP's width, and moving them through memory costs more than a second tanh.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.ops.random import uniform

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.checkpoint(partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": jax.checkpoint(partial(jax.nn.gelu, approximate=True)),
    "silu": jax.checkpoint(jax.nn.silu),
    "tanh": jax.nn.tanh,
}


def apply_softcap(x: Float[Array, "*dims"], cap: float | None) -> Float[Array, "*dims"]:
    """Squash x smoothly into (-cap, cap)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def dropout(x: Float[Array, "B *dims"], rate: float, key: jax.Array | None) -> Float[Array, "B *dims"]:
    """Inverted dropout: zero a fraction `rate` of x and scale up the rest; no dropout if `key` is None.

    Which elements are kept does not depend on how rows are split over devices.
    """
    if key is None or rate == 0.0:
        return x
    keep = uniform(key, x.shape) < 1.0 - rate
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def split_key(key: jax.Array | None, num: int) -> list[jax.Array | None]:
    """`num` independent keys, or `num` times None if `key` is None."""
    return [None] * num if key is None else list(jax.random.split(key, num))
