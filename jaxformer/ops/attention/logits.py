"""Functions shared by the kernels written in XLA operations: bias and mask of a block of logits, layout of heads.

A block is a range of queries and a range of keys, each as (start, stop).
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.ops.biases import Bias, bias_block
from jaxformer.ops.masks import Mask, dense_mask

# Finite, so that a query without any visible key averages all values instead of producing NaN.
MASKED = -1e30

Range = tuple[int, int]

einsum_f32 = partial(jnp.einsum, preferred_element_type=jnp.float32)


def add_bias(
    logits: Float[Array, "B K G T S"],
    mask: Mask,
    bias: Bias | None,
    queries: Range,
    keys: Range,
    transposed: bool = False,
) -> Float[Array, "B K G T S"]:
    """Add the bias of a block; `transposed` logits are [B, K, G, S, T]."""
    if bias is None:
        return logits
    bias_BNTS = bias_block(bias, mask, queries, keys)
    if transposed:
        bias_BNTS = bias_BNTS.swapaxes(2, 3)
    heads = logits.shape[1:3]
    return logits + bias_BNTS.reshape(bias_BNTS.shape[0], *heads, *bias_BNTS.shape[2:])


def apply_mask(
    logits: Float[Array, "B K G T S"], mask: Mask, queries: Range, keys: Range, transposed: bool = False
) -> Float[Array, "B K G T S"]:
    """Replace the logits of keys that a query must not see; `transposed` logits are [B, K, G, S, T]."""
    allowed_BTS = dense_mask(mask, queries, keys)
    if allowed_BTS is None:
        return logits
    if transposed:
        allowed_BTS = allowed_BTS.swapaxes(1, 2)
    return jnp.where(allowed_BTS[:, None, None], logits, MASKED)


def split_heads(x_BTNH: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K G T H"]:
    """Group query heads by key-value head and move heads before positions, so that products need no transposes."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, num_kv_heads, N // num_kv_heads, H).transpose(0, 2, 3, 1, 4)


def merge_heads(x_BKGTH: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    """The inverse of `split_heads`."""
    B, K, G, T, H = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)
