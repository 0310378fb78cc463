"""Attention in blocks of queries under `lax.scan`, for accelerators where no fused kernel supports the inputs.

It computes the same function as `reference`, on which it builds, with the logits of one block of queries in memory. The
backward pass recomputes them (arXiv:2112.05682). Unlike `blocked`, it compiles equally fast for rows of any length.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxformer.ops.attention import reference
from jaxformer.ops.attention.inputs import SAVED_NAME, AttentionInputs, unsupported_shape
from jaxformer.ops.masks import Mask

MIN_BLOCK, MAX_BLOCK = 128, 1024
MAX_LOGITS = 2**26  # logits of a block, in all rows and heads: 256 MiB
CAUSAL_GROUPS = 4  # parts of a causal matrix whose keys are cut off at different places; more would compile slowly

Block = tuple[Int[Array, ""], Float[Array, "B T N H"], Int[Array, "B T"] | None]
"""The index of the first query, the queries, and their segments."""


def unsupported(inputs: AttentionInputs, platform: str) -> str | None:
    return unsupported_shape(inputs)


def not_worthwhile(inputs: AttentionInputs, platform: str) -> str | None:
    if platform == "cpu":
        return "`blocked` skips more masked keys, and compiles fast enough for the rows that a CPU trains on"
    if inputs.num_queries <= MIN_BLOCK:
        return f"{inputs.num_queries} queries fit in a single block of {MIN_BLOCK}"
    return None


def attend(inputs: AttentionInputs) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + bias + mask) v."""
    size, num_queries = _block_size(inputs), inputs.num_queries
    num_blocks = -(-num_queries // size)
    starts = size * jnp.arange(num_blocks)
    blocks = (starts, *(_split(array, num_blocks, size) for array in (inputs.q_BTNH, inputs.mask.q_segments)))
    # Gradients of keys and values are sums over all blocks, and have the dtype of what the loop reads.
    wide = replace(inputs, k_BKSH=inputs.k_BKSH.astype(jnp.float32), v_BKSH=inputs.v_BKSH.astype(jnp.float32))
    outs = []
    for (first, last), num_keys in _groups(inputs, num_blocks, size):
        attend_block = jax.checkpoint(partial(_attend_block, wide, num_keys), prevent_cse=False)
        outs.append(jax.lax.map(attend_block, jax.tree.map(lambda a, i=first, j=last: a[i:j], blocks)))
    out_BTNH = _join(jnp.concatenate(outs))[:, :num_queries]
    # Named for rematerialisation policies: if it is saved, attention is recomputed only once, block by block.
    return checkpoint_name(out_BTNH, SAVED_NAME)


def _attend_block(inputs: AttentionInputs, num_keys: int, block: Block) -> Float[Array, "B T N H"]:
    """Attention of a block of queries to those of the first `num_keys` keys that it may see."""
    start, q_BTNH, q_segments = block
    mask, dtype = inputs.mask, q_BTNH.dtype
    offset = start if mask.q_offset is None else mask.q_offset + start
    mask = replace(mask, q_segments=q_segments, q_offset=jnp.broadcast_to(offset, (len(q_BTNH),)))
    first_key, num_keys = _visible_keys(inputs.mask, start, q_BTNH.shape[1], num_keys)

    def cut(array: Array | None, axis: int = 1) -> Array | None:
        return None if array is None else jax.lax.dynamic_slice_in_dim(array, first_key, num_keys, axis)

    index = cut(mask.kv_index)
    if index is None and mask.window is not None:
        index = (first_key + jnp.arange(num_keys))[None]
    mask = replace(mask, kv_segments=cut(mask.kv_segments), prefix=cut(mask.prefix), kv_index=index)
    key = inputs.dropout_key
    return reference.weighted_values(
        replace(
            inputs,
            q_BTNH=q_BTNH,
            k_BKSH=cut(inputs.k_BKSH, 2).astype(dtype),
            v_BKSH=cut(inputs.v_BKSH, 2).astype(dtype),
            mask=mask,
            dropout_key=None if key is None else jax.random.fold_in(key, start),
        )
    )


# ---------------------------------------------------------------- which keys
def _groups(inputs: AttentionInputs, num_blocks: int, size: int) -> list[tuple[tuple[int, int], int]]:
    """Ranges of blocks, each with the number of keys that the last of its queries may see."""
    mask, num_keys = inputs.mask, inputs.num_keys
    if not mask.causal or mask.prefix is not None or mask.window is not None or not _is_static(mask):
        return [((0, num_blocks), num_keys)]
    bounds = sorted({round(num_blocks * i / CAUSAL_GROUPS) for i in range(CAUSAL_GROUPS + 1)})
    return [((a, b), min(b * size, num_keys)) for a, b in pairwise(bounds)]


def _visible_keys(mask: Mask, start: Int[Array, ""], num_queries: int, num_keys: int) -> tuple[Array | int, int]:
    """The first key and the number of keys that a block may see; the number is known at compile time."""
    if mask.window is None or not _is_static(mask):
        return 0, num_keys
    # Any later key might be in a prefix.
    ahead = 0 if mask.causal and mask.prefix is None else mask.window - 1
    visible = min(num_keys, num_queries + mask.window - 1 + ahead)
    return jnp.clip(start - mask.window + 1, 0, num_keys - visible), visible


def _is_static(mask: Mask) -> bool:
    """Whether the distances between queries and keys are known at compile time."""
    return mask.q_offset is None and mask.kv_index is None


# ---------------------------------------------------------------- blocks
def _block_size(inputs: AttentionInputs) -> int:
    """Queries per block: a power of two that keeps the logits of a block below `MAX_LOGITS` if possible."""
    rows, length, heads, _ = inputs.q_BTNH.shape
    size = MAX_BLOCK
    while size > MIN_BLOCK and (rows * heads * size * inputs.num_keys > MAX_LOGITS or size >= 2 * length):
        size //= 2
    return size


def _split(array: Array | None, num_blocks: int, size: int) -> Array | None:
    """[B, T, ...] as [blocks, B, T of a block, ...]; the last block is padded."""
    if array is None:
        return None
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, num_blocks * size - array.shape[1])
    return jnp.moveaxis(jnp.pad(array, padding).reshape(len(array), num_blocks, size, *array.shape[2:]), 1, 0)


def _join(blocks: Array) -> Array:
    """The inverse of `_split`, with the padding."""
    blocks = jnp.moveaxis(blocks, 0, 1)
    return blocks.reshape(len(blocks), -1, *blocks.shape[3:])
