"""What a query may see, as a small spec that kernels can read, and its dense form for those that cannot.

A spec never holds a [T, S] array; `allowed` makes one, for any block of queries and keys.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def _static(default):
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """All conditions must hold. Query and key indices count columns of the row, not restarting positions."""

    causal: bool = _static(False)
    window: int | None = _static(None)
    """Keys this far away, or farther, are not seen."""
    q_segments: Int[Array, "B T"] | None = None
    kv_segments: Int[Array, "B S"] | None = None
    q_offset: Int[Array, " B"] | None = None
    """Index of the first query among the keys; none is 0. Set when queries extend a cache."""
    prefix: Int[Array, " B"] | None = None
    """Keys before this index are seen by all queries, also under `causal` (prefix language models)."""
    kv_lengths: Int[Array, " B"] | None = None
    """Keys from this index on are empty."""
    kv_index: Int[Array, "B S"] | None = None
    """Index of every key, where they do not lie in order; none is 0, 1, 2, ... Below 0 there is no key."""


def allowed(mask: Mask, queries: tuple[int, int], keys: tuple[int, int]) -> Bool[Array, "#B T S"] | None:
    """Dense mask of the query and key index ranges [start, stop); none if everything is allowed."""
    distance_BTS = distances(mask, queries, keys)
    k_BS = _key_index(mask, keys)
    terms = []
    if mask.causal:
        seen = distance_BTS <= 0
        if mask.prefix is not None:
            seen = seen | (k_BS < mask.prefix[:, None, None])
        terms.append(seen)
    if mask.window is not None:
        terms.append(jnp.abs(distance_BTS) < mask.window)
    if mask.q_segments is not None:
        q_segments = mask.q_segments[:, slice(*queries), None]
        terms.append(q_segments == mask.kv_segments[:, None, slice(*keys)])
    if mask.kv_lengths is not None:
        terms.append(k_BS < mask.kv_lengths[:, None, None])
    if mask.kv_index is not None:
        terms.append(k_BS >= 0)
    if not terms:
        return None
    result = terms[0]
    for term in terms[1:]:
        result = result & term
    return result


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
