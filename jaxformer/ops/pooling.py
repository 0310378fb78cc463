"""One vector for a whole row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mean_pooled(x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B D"]:
    """The mean over real tokens, summed in float32."""
    real_BT1 = (segments_BT != 0)[..., None].astype(jnp.float32)
    total_BD = (x_BTD.astype(jnp.float32) * real_BT1).sum(axis=1)
    return (total_BD / jnp.maximum(real_BT1.sum(axis=1), 1.0)).astype(x_BTD.dtype)
