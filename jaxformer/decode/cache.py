"""KV caches: preallocated arrays, one cache per layer. Recurrent layers have a state instead.

Each layer has its own arrays, not a slice of a stacked array, so that the decode loop can update them in place. Heads
come before positions, so that attention reads the arrays without a transpose.

A `FullCache` keeps all keys and values of a row; a `RingCache` keeps the most recent ones, for sliding-window
attention. Both store their vectors either in the dtype of the model or as an `Int8Array`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import AttentionConfig, ModelConfig, RecurrentConfig
from jaxformer.layers.attention import KeysValues
from jaxformer.layers.block import LayerCache
from jaxformer.layers.linear import Runtime
from jaxformer.ops.masks import Mask
from jaxformer.ops.recurrence import RecurrentState, empty_state
from jaxformer.sharding import constrain
from jaxformer.typing import Array, Bool, Float, Int


class Int8Array(NamedTuple):
    """Vectors quantized to int8, with one scale per token and KV head."""

    values: Int[Array, "B K S H"]
    scales: Float[Array, "B K S 1"]


CacheArray = Float[Array, "B K S H"] | Int8Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullCache:
    """All keys and values of a row in order. Entries beyond a row's length are stale and never attended to."""

    k: CacheArray
    v: CacheArray

    def extend(
        self,
        new: KeysValues,
        start_B: Int[Array, " B"],
        lengths_B: Int[Array, " B"],
        window: int | None,
        prefix_BT: Bool[Array, "B T"] | None = None,
    ) -> tuple["FullCache", KeysValues, Mask]:
        """Write new keys and values; returns the cache, the keys and values to attend to, and the attention mask.

        Row i writes from index `start_B[i]` on, so that prompts of different lengths can share a batch.
        """
        # The padding after the `lengths_B` new tokens of a row is written too. The causal mask hides it until the next
        # tokens overwrite it.
        written = FullCache(*(_write(old, part, start_B) for old, part in zip((self.k, self.v), new, strict=True)))
        visible = KeysValues(*(_dequantize(part, new.k_BKSH.dtype) for part in (written.k, written.v)))
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
        start_B: Int[Array, " B"],
        lengths_B: Int[Array, " B"],
        window: int | None,
        prefix_BT: Bool[Array, "B T"] | None = None,
    ) -> tuple["RingCache", KeysValues, Mask]:
        """See `FullCache.extend`."""
        if new.k_BKSH.shape[2] == 1:
            return self._extend_by_one(new, start_B, window)
        # A new key may overwrite one that an earlier new query still attends to. The attention therefore sees the old
        # ring followed by the new keys, and the ring is updated separately.
        T, dtype = new.k_BKSH.shape[2], new.k_BKSH.dtype
        fresh = [_quantize_like(old, part) for old, part in zip((self.k, self.v), new, strict=True)]
        visible = [
            jnp.concatenate([_dequantize(old, dtype), _dequantize(part, dtype)], axis=2)
            for old, part in zip((self.k, self.v), fresh, strict=True)
        ]
        token_BS = jnp.concatenate([self._token_index(start_B), start_B[:, None] + jnp.arange(T)], axis=1)
        # Keys in the ring precede all new queries, so they are visible without being marked as prefix.
        prefix_BS = None if prefix_BT is None else jnp.pad(prefix_BT, ((0, 0), (self.size, 0)))
        mask = Mask(causal=True, window=window, q_offset=start_B, prefix=prefix_BS, kv_index=token_BS)
        # Which of the T new tokens each entry of the ring holds afterwards; negative if it keeps its old token.
        new_BR = self._token_index(start_B + lengths_B) - start_B[:, None]
        merged = [_merge(old, part, new_BR) for old, part in zip((self.k, self.v), fresh, strict=True)]
        return RingCache(*merged, self.size), KeysValues(*visible), mask

    def _extend_by_one(
        self, new: KeysValues, start_B: Int[Array, " B"], window: int | None
    ) -> tuple["RingCache", KeysValues, Mask]:
        # A single token overwrites the one that has just left the window, so it can be written before attention.
        written = [_write(old, part, start_B % self.size) for old, part in zip((self.k, self.v), new, strict=True)]
        mask = Mask(causal=True, window=window, q_offset=start_B, kv_index=self._token_index(start_B + 1))
        visible = KeysValues(*(_dequantize(part, new.k_BKSH.dtype) for part in written))
        return RingCache(*written, self.size), visible, mask

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
        LayerCache(
            _make_cache(stack.block(layer).attention, batch, length, runtime), None if cross is None else cross[layer]
        )
        for layer in range(stack.num_layers)
    )


def _make_cache(attention: AttentionConfig, batch: int, length: int, runtime: Runtime) -> FullCache | RingCache:
    is_ring = attention.window is not None and attention.window < length
    size = attention.window if is_ring else length
    shape = (batch, attention.kv_heads, size, attention.head_dim)

    def zeros() -> CacheArray:
        if runtime.cache == "int8":
            scales = jnp.zeros((*shape[:-1], 1), jnp.float32)
            return Int8Array(_shard(jnp.zeros(shape, jnp.int8)), _shard(scales))
        return _shard(jnp.zeros(shape, runtime.dtype))

    return RingCache(zeros(), zeros(), size) if is_ring else FullCache(zeros(), zeros())


def _shard(array_BKSH: Array) -> Array:
    """Shard by rows and KV heads, but not by positions: each row writes its next token at a different position."""
    return constrain(array_BKSH, "batch", "kv_heads", None, None)


# ---------------------------------------------------------------- storage
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


def _write(cache: CacheArray, new_BKTH: Float[Array, "B K T H"], start_B: Int[Array, " B"]) -> CacheArray:
    def write_row(old_KSH: Array, new_KTH: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice(old_KSH, new_KTH, (0, start, 0))

    def write_all(old_BKSH: Array, new_BKTH: Array) -> Array:
        if len(start_B) == 1:
            # vmap turns the slice update into a scatter; a single row does not need one.
            return write_row(old_BKSH[0], new_BKTH[0], start_B[0])[None]
        return _shard(jax.vmap(write_row)(old_BKSH, new_BKTH, start_B))

    return jax.tree.map(write_all, cache, _quantize_like(cache, new_BKTH))


def _place(new_BT: Bool[Array, "B T"], start_B: Int[Array, " B"], length: int) -> Bool[Array, "B S"]:
    """Put the flags of new tokens at the index of their keys; all other keys have the flag False."""
    new_BS = jnp.arange(length) - start_B[:, None]
    is_new_BS = (new_BS >= 0) & (new_BS < new_BT.shape[1])
    return is_new_BS & jnp.take_along_axis(new_BT, jnp.clip(new_BS, 0, new_BT.shape[1] - 1), axis=1)


def _merge(cache: CacheArray, new: CacheArray, new_BR: Int[Array, "B R"]) -> CacheArray:
    """Replace entry r of row b by vector `new_BR[b, r]` of `new`; a negative index keeps the old entry."""

    def merge(old_BKRH: Array, new_BKTH: Array) -> Array:
        gathered = jnp.take_along_axis(new_BKTH, jnp.maximum(new_BR, 0)[:, None, :, None], axis=2)
        return _shard(jnp.where((new_BR >= 0)[:, None, :, None], gathered, old_BKRH))

    return jax.tree.map(merge, cache, new)


# ---------------------------------------------------------------- beams
def repeat_rows(caches: Sequence[LayerCache], times: int) -> tuple[LayerCache, ...]:
    """Repeat every row `times` times, next to each other, but not the cross-attention keys and values."""
    return _map_rows(caches, lambda array: jnp.repeat(array, times, axis=0))


def reorder_rows(caches: Sequence[LayerCache], rows: Int[Array, " B"]) -> tuple[LayerCache, ...]:
    """Row i of the result is row `rows[i]`. Beams stay within their request, so cross-attention keeps its order."""
    return _map_rows(caches, lambda array: array[rows])


def _map_rows(caches: Sequence[LayerCache], change: Callable[[Array], Array]) -> tuple[LayerCache, ...]:
    """Apply `change` to self-attention caches and recurrent states, not to cross-attention: beams share it."""

    def map_layer(cache: LayerCache | RecurrentState) -> LayerCache | RecurrentState:
        if isinstance(cache, LayerCache):
            return cache._replace(attention=jax.tree.map(change, cache.attention))
        return jax.tree.map(change, cache)

    return tuple(map_layer(cache) for cache in caches)
