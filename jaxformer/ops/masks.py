"""Attention masks as a small spec that kernels can read, and the dense form for kernels that cannot.

The spec never holds a [T, S] array; `dense_mask` makes one for any block of queries and keys.
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
    """A key is visible if all conditions hold. Indices count columns of the row, not positions, which restart."""

    causal: bool = _static(False)
    window: int | None = _static(None)
    """Keys at this distance or farther are not visible."""
    q_segments: Int[Array, "B T"] | None = None
    kv_segments: Int[Array, "B S"] | None = None
    q_offset: Int[Array, " B"] | None = None
    """Index of the first query among the keys; None is 0. Set when queries extend a cache."""
    prefix: Int[Array, " B"] | None = None
    """Keys before this index are visible to all queries, also under `causal` (prefix language models)."""
    kv_lengths: Int[Array, " B"] | None = None
    """Keys from this index on are empty."""
    kv_index: Int[Array, "B S"] | None = None
    """Index of every key, if they are not stored in order (ring buffers); None is 0, 1, 2, ... Negative: no key."""


def dense_mask(mask: Mask, queries: tuple[int, int], keys: tuple[int, int]) -> Bool[Array, "#B T S"] | None:
    """True where a query of the range [start, stop) may see a key of the range; None if all see all."""
    distance_BTS = distances(mask, queries, keys)
    k_BS = _key_index(mask, keys)
    conditions = []
    if mask.causal:
        seen = distance_BTS <= 0
        if mask.prefix is not None:
            seen = seen | (k_BS < mask.prefix[:, None, None])
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
    """Index of each key minus index of each query of the ranges [start, stop)."""
    q_BT = jnp.arange(*queries)[None, :, None]
    if mask.q_offset is not None:
        q_BT = q_BT + mask.q_offset[:, None, None]
    return _key_index(mask, keys) - q_BT


def _key_index(mask: Mask, keys: tuple[int, int]) -> Int[Array, "#B 1 S"]:
    if mask.kv_index is None:
        return jnp.arange(*keys)[None, None]
    return mask.kv_index[:, None, slice(*keys)]
