"""Reductions: pooling a sequence into one vector, and top-k of long rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Rows shorter than SHORT_ROW go directly to XLA's top-k; longer ones are first narrowed down to a few blocks.
SHORT_ROW, BLOCK = 4096, 128


def pool(x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"], pooling: str) -> Float[Array, "B D"]:
    """The first or last real token of each row, or the mean of all real tokens; padding may be on either side."""
    if pooling == "mean":
        return _mean_pool(x_BTD, segments_BT)
    real_BT = segments_BT != 0
    last = x_BTD.shape[1] - 1
    index_B = real_BT.argmax(axis=1) if pooling == "first" else last - real_BT[:, ::-1].argmax(axis=1)
    return jnp.take_along_axis(x_BTD, index_B[:, None, None], axis=1)[:, 0]


def _mean_pool(x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B D"]:
    """The mean over real tokens, summed in float32."""
    real_BT1 = (segments_BT != 0)[..., None].astype(jnp.float32)
    total_BD = (x_BTD.astype(jnp.float32) * real_BT1).sum(axis=1)
    return (total_BD / jnp.maximum(real_BT1.sum(axis=1), 1.0)).astype(x_BTD.dtype)


def top_k(values_RV: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Like `jax.lax.top_k`, but faster on long rows: the k largest are in the k blocks with the largest maxima."""
    R, V = values_RV.shape
    num_blocks = V // BLOCK
    if SHORT_ROW > V or k >= num_blocks:
        return jax.lax.top_k(values_RV, k)
    whole = num_blocks * BLOCK
    _, blocks_RK = jax.lax.top_k(values_RV[:, :whole].reshape(R, num_blocks, BLOCK).max(axis=-1), k)
    # Candidates keep the order of their indices, so that ties are broken as in `jax.lax.top_k`: lowest index first.
    index_RKS = jnp.sort(blocks_RK, axis=1)[:, :, None] * BLOCK + jnp.arange(BLOCK)
    rest_RS = jnp.broadcast_to(jnp.arange(whole, V), (R, V - whole))
    index_RC = jnp.concatenate([index_RKS.reshape(R, -1), rest_RS], axis=1)
    largest_RK, chosen_RK = jax.lax.top_k(jnp.take_along_axis(values_RV, index_RC, axis=1), k)
    return largest_RK, jnp.take_along_axis(index_RC, chosen_RK, axis=1)
