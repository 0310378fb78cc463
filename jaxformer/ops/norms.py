"""Normalisation over the last dimension, computed in float32.

The backward pass recomputes from the input: storing the centred and scaled copies costs more than recomputing them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.checkpoint, static_argnums=(3,))
def layer_norm(
    x: Float[Array, "*dims D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*dims D"]:
    """(x - mean) / sqrt(var + eps) * scale + bias (arXiv:1607.06450)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


@partial(jax.checkpoint, static_argnums=(2,))
def rms_norm(x: Float[Array, "*dims D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*dims D"]:
    """x / sqrt(mean(x^2) + eps) * scale (arXiv:1910.07467)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(axis=-1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)
