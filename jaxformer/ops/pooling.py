"""One vector for a whole row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def pooled(x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"], pooling: str) -> Float[Array, "B D"]:
    """The first or last real token of each row, or the mean of all; padding may stand on either side."""
    if pooling == "mean":
        return mean_pooled(x_BTD, segments_BT)
    real_BT = segments_BT != 0
    last = x_BTD.shape[1] - 1
    at_B = real_BT.argmax(axis=1) if pooling == "first" else last - real_BT[:, ::-1].argmax(axis=1)
    return jnp.take_along_axis(x_BTD, at_B[:, None, None], axis=1)[:, 0]


def mean_pooled(x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B D"]:
    """The mean over real tokens, summed in float32."""
    real_BT1 = (segments_BT != 0)[..., None].astype(jnp.float32)
    total_BD = (x_BTD.astype(jnp.float32) * real_BT1).sum(axis=1)
    return (total_BD / jnp.maximum(real_BT1.sum(axis=1), 1.0)).astype(x_BTD.dtype)
