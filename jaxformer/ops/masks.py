"""Attention masks as a small spec, and their dense form for kernels that cannot interpret the spec.

The spec never holds a [T, S] array; `dense_mask` computes one for any block of queries and keys.
"""

import operator
from dataclasses import dataclass, field
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def _static(default):
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A key is visible to a query if all conditions hold.

    Indices are columns of the row, not positions: positions restart at 0 with every packed document.
    """

    causal: bool = _static(False)
    window: int | None = _static(None)
    """Keys at this distance or farther are not visible."""
    q_segments: Int[Array, "B T"] | None = None
    kv_segments: Int[Array, "B S"] | None = None
    q_offset: Int[Array, " B"] | None = None
    """Index of the first query among the keys; None means 0. Set when queries extend a KV cache."""
    prefix: Bool[Array, "B S"] | None = None
    """Keys that are visible to earlier queries too, despite `causal` (prefix language models)."""
    kv_lengths: Int[Array, " B"] | None = None
    """Keys from this index on are unused."""
    kv_index: Int[Array, "B S"] | None = None
    """Index of every key if keys are not stored in order (ring buffers), negative if unused; None means 0, 1, 2, ..."""


def dense_mask(mask: Mask, queries: tuple[int, int], keys: tuple[int, int]) -> Bool[Array, "#B T S"] | None:
    """True where a query may see a key, for ranges [start, stop) of both; None if every query sees every key."""
    distance_BTS = distances(mask, queries, keys)
    k_BS = _key_index(mask, keys)
    conditions = []
    if mask.causal:
        seen = distance_BTS <= 0
        if mask.prefix is not None:
            seen = seen | mask.prefix[:, None, slice(*keys)]
        conditions.append(seen)
    if mask.window is not None:
        conditions.append(jnp.abs(distance_BTS) < mask.window)
    if mask.q_segments is not None:
        q_segments = mask.q_segments[:, slice(*queries), None]
        conditions.append(q_segments == mask.kv_segments[:, None, slice(*keys)])
    if mask.kv_lengths is not None:
        conditions.append(k_BS < mask.kv_lengths[:, None, None])
    if mask.kv_index is not None:
        conditions.append(k_BS >= 0)
    return reduce(operator.and_, conditions) if conditions else None


def distances(mask: Mask, queries: tuple[int, int], keys: tuple[int, int]) -> Int[Array, "#B T S"]:
    """Index of each key minus index of each query, for ranges [start, stop) of both."""
    q_BT = jnp.arange(*queries)[None, :, None]
    if mask.q_offset is not None:
        q_BT = q_BT + mask.q_offset[:, None, None]
    return _key_index(mask, keys) - q_BT


def _key_index(mask: Mask, keys: tuple[int, int]) -> Int[Array, "#B 1 S"]:
    if mask.kv_index is None:
        return jnp.arange(*keys)[None, None]
    return mask.kv_index[:, None, slice(*keys)]
