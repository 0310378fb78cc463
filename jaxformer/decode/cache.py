"""KV caches: preallocated arrays, one cache per layer. Recurrent layers have a state instead.

Layers that decoding scans over share one cache, whose arrays are stacked along a leading dimension: with rows first,
the TPU compiler would transpose them at every call. `row_dim` is the dimension of the rows of any array. Extending a
cache writes only the new tokens, so that the decode loop can update the arrays in place. Heads come before positions,
so that attention reads the arrays without a transpose.

A `FullCache` keeps all keys and values of a row; a `RingCache` keeps the most recent ones, for sliding-window
attention. Both store their vectors either in the dtype of the model or as an `Int8Array`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig, RecurrentConfig
from jaxformer.layers.attention import KeysValues
from jaxformer.layers.block import LayerCache
from jaxformer.layers.linear import Runtime
from jaxformer.layers.stack import CachePart, cache_parts
from jaxformer.ops.attention import CachedKeysValues
from jaxformer.ops.masks import Mask
from jaxformer.ops.recurrence import RecurrentState, empty_state
from jaxformer.sharding import constrain
from jaxformer.typing import Array, Bool, Float, Int


class Int8Array(NamedTuple):
    """Vectors quantized to int8, with one scale per token and KV head."""

    values: Int[Array, "*L B K S H"]
    scales: Float[Array, "*L B K S 1"]


CacheArray = Float[Array, "*L B K S H"] | Int8Array
Layer = Int[Array, ""] | None
"""Index of a layer in stacked arrays; None: the arrays are of a single layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullCache:
    """All keys and values of a row in order. Entries beyond a row's length are stale and never attended to."""

    k: CacheArray
    v: CacheArray

    def extend(
        self,
        new: KeysValues,
        start_B: Int[Array, " B"] | None,
        lengths_B: Int[Array, " B"],
        window: int | None,
        prefix_BT: Bool[Array, "B T"] | None = None,
        layer: Layer = None,
    ) -> tuple["FullCache", KeysValues, Mask]:
        """Write new keys and values; returns the cache, the keys and values to attend to, and the attention mask.

        Row i writes from index `start_B[i]` on, so that prompts of different lengths can share a batch.
        """
        # The padding after the `lengths_B` new tokens of a row is written too. The causal mask hides it until the next
        # tokens overwrite it.
        fresh = _store_like((self.k, self.v), new)
        written = FullCache(
            *(_write(old, part, start_B, layer) for old, part in zip((self.k, self.v), fresh, strict=True))
        )
        if start_B is None:
            return written, _read(fresh, new), Mask(causal=True, window=window, prefix=prefix_BT)
        visible = _read((written.k, written.v), new, layer)
        if window is None or window >= visible.k_BKSH.shape[2]:
            visible = _with_cache(visible, new, (written.k, written.v), layer, start_B)
        prefix_BS = None if prefix_BT is None else _place(prefix_BT, start_B, visible.k_BKSH.shape[2])
        return written, visible, Mask(causal=True, window=window, q_offset=start_B, prefix=prefix_BS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RingCache:
    """The last `size` keys and values of a row: token i is stored at index i modulo `size`.

    Attention with a window of `size` never sees older tokens, so memory stays bounded however long the row grows.
    """

    k: CacheArray
    v: CacheArray
    size: int = field(metadata={"static": True})

    def extend(
        self,
        new: KeysValues,
        start_B: Int[Array, " B"] | None,
        lengths_B: Int[Array, " B"],
        window: int | None,
        prefix_BT: Bool[Array, "B T"] | None = None,
        layer: Layer = None,
    ) -> tuple["RingCache", KeysValues, Mask]:
        """See `FullCache.extend`."""
        fresh = _store_like((self.k, self.v), new)
        if start_B is None:
            mask = Mask(causal=True, window=window, prefix=prefix_BT)
            return self._merge(fresh, jnp.zeros_like(lengths_B), lengths_B, layer), _read(fresh, new), mask
        T = new.k_BKSH.shape[2]
        if T == 1:
            return self._extend_by_one(new, fresh, start_B, window, layer)
        # A new key may overwrite one that an earlier new query still attends to. The attention therefore sees the old
        # ring followed by the new keys, and the ring is updated separately.
        before, after = _read((self.k, self.v), new, layer), _read(fresh, new)
        visible = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), before, after)
        token_BS = jnp.concatenate([self._token_index(start_B), start_B[:, None] + jnp.arange(T)], axis=1)
        # Keys in the ring precede all new queries, so they are visible without being marked as prefix.
        prefix_BS = None if prefix_BT is None else jnp.pad(prefix_BT, ((0, 0), (self.size, 0)))
        mask = Mask(causal=True, window=window, q_offset=start_B, prefix=prefix_BS, kv_index=token_BS)
        return self._merge(fresh, start_B, lengths_B, layer), visible, mask

    def _extend_by_one(
        self,
        new: KeysValues,
        fresh: tuple[CacheArray, CacheArray],
        start_B: Int[Array, " B"],
        window: int | None,
        layer: Layer,
    ) -> tuple["RingCache", KeysValues, Mask]:
        # A single token overwrites the one that has just left the window, so it can be written before attention.
        index_B = start_B % self.size
        written = [_write(old, part, index_B, layer) for old, part in zip((self.k, self.v), fresh, strict=True)]
        mask = Mask(causal=True, window=window, q_offset=start_B, kv_index=self._token_index(start_B + 1))
        visible = _with_cache(_read(written, new, layer), new, written, layer, start_B)
        return RingCache(*written, self.size), visible, mask

    def _merge(
        self,
        fresh: tuple[CacheArray, CacheArray],
        start_B: Int[Array, " B"],
        lengths_B: Int[Array, " B"],
        layer: Layer,
    ) -> "RingCache":
        """The ring after several new tokens."""
        # Which of the new tokens each entry of the ring holds afterwards; negative if it keeps its old token.
        new_BR = self._token_index(start_B + lengths_B) - start_B[:, None]
        merged = [_merge(old, part, new_BR, layer) for old, part in zip((self.k, self.v), fresh, strict=True)]
        return RingCache(*merged, self.size)

    def _token_index(self, length_B: Int[Array, " B"]) -> Int[Array, "B R"]:
        """Which token each entry of the ring holds in a row of `length_B` tokens; negative for unused entries."""
        last_B1 = length_B[:, None] - 1
        return last_B1 - (last_B1 - jnp.arange(self.size)) % self.size


def make_caches(
    config: ModelConfig, batch: int, length: int, runtime: Runtime, cross: Sequence[KeysValues] | None = None
) -> tuple[LayerCache | RecurrentState, ...]:
    """Empty caches of all decoder layers for `length` tokens per row; recurrent layers get their initial state."""
    stack = config.decoder
    if isinstance(stack, RecurrentConfig):
        return tuple(empty_state(stack.cell, batch, stack.dim) for _ in range(stack.num_layers))
    return tuple(
        LayerCache(_make_cache(part, batch, length, runtime), None if cross is None else jax.tree.map(_shard, cross[i]))
        for i, part in enumerate(cache_parts(stack, runtime))
    )


def _make_cache(part: CachePart, batch: int, length: int, runtime: Runtime) -> FullCache | RingCache:
    attention = part.block.attention
    is_ring = attention.window is not None and attention.window < length
    size = attention.window if is_ring else length
    layers = () if part.num_layers is None else (part.num_layers,)
    shape = (*layers, batch, attention.kv_heads, size, attention.head_dim)

    def zeros() -> CacheArray:
        if runtime.cache == "int8":
            scales = jnp.zeros((*shape[:-1], 1), jnp.float32)
            return Int8Array(_shard(jnp.zeros(shape, jnp.int8)), _shard(scales))
        return _shard(jnp.zeros(shape, runtime.dtype))

    return RingCache(zeros(), zeros(), size) if is_ring else FullCache(zeros(), zeros())


def _shard(array: Float[Array, "*L B K S H"]) -> Array:
    """Shard by rows and KV heads, but not by positions: each row writes its next token at a different position."""
    return constrain(array, *cache_axes(array.ndim))


def cache_axes(ndim: int) -> tuple[str | None, ...]:
    """The logical axes of keys and values, of one layer or stacked."""
    return (*("layers",) * (ndim - 4), "batch", "kv_heads", None, None)


def row_dim(ndim: int) -> int:
    """Which dimension of an array of a decoding state is the row: the first one, but the second of stacked caches."""
    return max(ndim - 4, 0)


def row_index(ndim: int, rows: Int[Array, " N"]) -> tuple[slice | Array, ...]:
    """The index of these rows in such an array."""
    return (*[slice(None)] * row_dim(ndim), rows)


# ---------------------------------------------------------------- storage
def _store_like(caches: tuple[CacheArray, CacheArray], new: KeysValues) -> tuple[CacheArray, CacheArray]:
    """New keys and values in the format of the cache."""
    return tuple(_quantize_like(cache, part) for cache, part in zip(caches, (new.k_BKSH, new.v_BKSH), strict=True))


def _read(caches: Sequence[CacheArray], like: KeysValues, layer: Layer = None) -> KeysValues:
    """Keys and values of a layer in the dtype of `like`."""
    parts = (jax.tree.map(lambda array: _layer_of(array, layer), cache) for cache in caches)
    return KeysValues(*(_dequantize(part, like.k_BKSH.dtype) for part in parts))


def _with_cache(
    visible: KeysValues, new: KeysValues, stored: Sequence[CacheArray], layer: Layer, start_B: Int[Array, " B"]
) -> KeysValues:
    """Tell attention where keys and values are stored if it can read them there: for one query and without int8."""
    if new.k_BKSH.shape[2] > 1 or isinstance(stored[0], Int8Array):
        return visible
    lengths_B = jnp.minimum(start_B + 1, visible.k_BKSH.shape[2])
    return visible._replace(cache=CachedKeysValues(*stored, layer, lengths_B))


def _layer_of(array: Float[Array, "*L B K S H"], layer: Layer) -> Float[Array, "B K S H"]:
    return array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)


def _quantize_like(cache: CacheArray, new_BKTH: Float[Array, "B K T H"]) -> CacheArray:
    """Convert new vectors to the format of the cache: its dtype, or int8."""
    if not isinstance(cache, Int8Array):
        return new_BKTH.astype(cache.dtype)
    largest = jnp.abs(new_BKTH.astype(jnp.float32)).max(axis=-1, keepdims=True)
    scales = largest / 127.0
    values = jnp.round(new_BKTH / jnp.where(scales > 0.0, scales, 1.0))  # a vector of zeros has scale 0
    return Int8Array(values.astype(jnp.int8), scales)


def _dequantize(cache: CacheArray, dtype: jnp.dtype) -> Float[Array, "B K S H"]:
    if isinstance(cache, Int8Array):
        return (cache.values * cache.scales).astype(dtype)
    return cache.astype(dtype)


def _write(cache: CacheArray, new: CacheArray, start_B: Int[Array, " B"] | None, layer: Layer) -> CacheArray:
    """Write new vectors of all rows from index `start_B` on, or from the beginning."""

    def write(old: Array, new_BKTH: Array) -> Array:
        if start_B is None:
            return _shard(_put(old, new_BKTH, 0, layer))
        if len(start_B) == 1:
            # A single row needs no scatter; with its dimension, XLA would copy the cache (see `loop.advance`).
            row = row_dim(old.ndim)
            return jnp.expand_dims(_put(jnp.squeeze(old, row), new_BKTH[0], start_B[0], layer), row)
        if layer is not None and new_BKTH.shape[2:] == (1, 1):
            # The TPU compiler pads int8 scales to 64 times their size to scatter into them, so they are rewritten.
            is_new_BS = jnp.arange(old.shape[-2]) == start_B[:, None]
            written = jnp.where(is_new_BS[:, None, :, None], new_BKTH, _layer_of(old, layer))
            return _shard(_put(old, written, 0, layer))
        return _shard(_scatter(old, new_BKTH, start_B, layer))

    return jax.tree.map(write, cache, new)


def _put(
    old: Float[Array, "*L_and_B K S H"], new: Float[Array, "*B K T H"], start: Int[Array, ""] | int, layer: Layer
) -> Array:
    """Write new vectors of a layer at the same index in all rows, or of a single row without its dimension."""
    index = (*(0,) * (new.ndim - 2), start, 0)
    if layer is None:
        return jax.lax.dynamic_update_slice(old, new, index)
    return jax.lax.dynamic_update_slice(old, new[None], (layer, *index))


def _scatter(
    old: Float[Array, "*L B K S H"], new_BKTH: Float[Array, "B K T H"], start_B: Int[Array, " B"], layer: Layer
) -> Array:
    """Write new vectors of a layer at a different index in each row."""
    num_lead = old.ndim - 4
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3),
        inserted_window_dims=tuple(range(num_lead)),
        operand_batching_dims=(num_lead,),
        scatter_indices_batching_dims=(0,),
        scatter_dims_to_operand_dims=(*range(num_lead), num_lead + 2),
    )
    index = start_B[:, None] if layer is None else jnp.stack([jnp.full_like(start_B, layer), start_B], axis=1)
    modes = {"indices_are_sorted": True, "unique_indices": True, "mode": jax.lax.GatherScatterMode.CLIP}
    return jax.lax.scatter(old, index, new_BKTH, dims, **modes)


def _place(new_BT: Bool[Array, "B T"], start_B: Int[Array, " B"], length: int) -> Bool[Array, "B S"]:
    """Put the flags of new tokens at the index of their keys; all other keys have the flag False."""
    new_BS = jnp.arange(length) - start_B[:, None]
    is_new_BS = (new_BS >= 0) & (new_BS < new_BT.shape[1])
    return is_new_BS & jnp.take_along_axis(new_BT, jnp.clip(new_BS, 0, new_BT.shape[1] - 1), axis=1)


def _merge(cache: CacheArray, new: CacheArray, new_BR: Int[Array, "B R"], layer: Layer) -> CacheArray:
    """Replace entry r of row b by vector `new_BR[b, r]` of `new`; a negative index keeps the old entry."""

    def merge(old: Array, new_BKTH: Array) -> Array:
        gathered = jnp.take_along_axis(new_BKTH, jnp.maximum(new_BR, 0)[:, None, :, None], axis=2)
        merged = jnp.where((new_BR >= 0)[:, None, :, None], gathered, _layer_of(old, layer))
        return _shard(_put(old, merged, 0, layer))

    return jax.tree.map(merge, cache, new)


# ---------------------------------------------------------------- beams
def repeat_rows(caches: Sequence[LayerCache], times: int) -> tuple[LayerCache, ...]:
    """Repeat every row `times` times, next to each other, but not the cross-attention keys and values."""
    return _map_rows(caches, lambda array: jnp.repeat(array, times, axis=row_dim(array.ndim)))


def reorder_rows(caches: Sequence[LayerCache], rows: Int[Array, " B"]) -> tuple[LayerCache, ...]:
    """Row i of the result is row `rows[i]`. Beams stay within their request, so cross-attention keeps its order."""
    return _map_rows(caches, lambda array: array[row_index(array.ndim, rows)])


def _map_rows(caches: Sequence[LayerCache], change: Callable[[Array], Array]) -> tuple[LayerCache, ...]:
    """Apply `change` to self-attention caches and recurrent states, not to cross-attention: beams share it."""

    def map_layer(cache: LayerCache | RecurrentState) -> LayerCache | RecurrentState:
        if isinstance(cache, LayerCache):
            return cache._replace(attention=jax.tree.map(change, cache.attention))
        return jax.tree.map(change, cache)

    return tuple(map_layer(cache) for cache in caches)
