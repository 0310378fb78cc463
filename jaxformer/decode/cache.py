"""Key-value caches: preallocated, explicit, one per layer. A recurrent layer carries its state instead.

Each layer has arrays of its own rather than a slice of a stacked array, with heads before positions. A loop that
carries them can then update them in place, and attention reads them without a transpose.

A `FullCache` keeps every key of a row; a `RingCache` keeps the last ones, for attention with a window. Either stores
its vectors as they are or as an `Int8Array`.
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
from jaxformer.typing import Array, Float, Int


class Int8Array(NamedTuple):
    """Vectors quantized to int8, with one scale per vector (a head of a token)."""

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
        self, new: KeysValues, start_B: Int[Array, " B"], lengths_B: Int[Array, " B"], window: int | None
    ) -> tuple["FullCache", KeysValues, Mask]:
        """Write new keys and values; returns the cache, everything it holds, and the mask for attention.

        Each row writes from its own index on, so that prompts of different lengths share a batch.
        """
        # Padding behind a row's `lengths_B` is written too: it lies beyond the row's length, and the next tokens
        # overwrite it before the causal mask lets anything see it.
        written = FullCache(*(_write(old, part, start_B) for old, part in zip((self.k, self.v), new, strict=True)))
        mask = Mask(causal=True, window=window, q_offset=start_B)
        return written, KeysValues(*(_dequantize(part, new.k_BKSH.dtype) for part in (written.k, written.v))), mask


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
        self, new: KeysValues, start_B: Int[Array, " B"], lengths_B: Int[Array, " B"], window: int | None
    ) -> tuple["RingCache", KeysValues, Mask]:
        """As `FullCache.extend`."""
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
        mask = Mask(causal=True, window=window, q_offset=start_B, kv_index=token_BS)
        # For every entry of the ring, which of the T new tokens it holds afterwards; negative: it keeps its old one.
        new_BR = self._token_index(start_B + lengths_B) - start_B[:, None]
        merged = [_merge(old, part, new_BR) for old, part in zip((self.k, self.v), fresh, strict=True)]
        return RingCache(*merged, self.size), KeysValues(*visible), mask

    def _extend_by_one(
        self, new: KeysValues, start_B: Int[Array, " B"], window: int | None
    ) -> tuple["RingCache", KeysValues, Mask]:
        # One token overwrites the one that has just left the window, so it may be written before attention.
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
    """Split over the mesh by rows and heads. Positions stay whole: a token is written at a different one per row."""
    return constrain(array_BKSH, "batch", "kv_heads", None, None)


# ---------------------------------------------------------------- storage
def _quantize_like(cache: CacheArray, new_BKTH: Float[Array, "B K T H"]) -> CacheArray:
    """New vectors in the representation of the cache."""
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


def _merge(cache: CacheArray, new: CacheArray, new_BR: Int[Array, "B R"]) -> CacheArray:
    """For every entry of the ring the new vector of that index, or the old one where the index is negative."""

    def merge(old_BKRH: Array, new_BKTH: Array) -> Array:
        gathered = jnp.take_along_axis(new_BKTH, jnp.maximum(new_BR, 0)[:, None, :, None], axis=2)
        return _shard(jnp.where((new_BR >= 0)[:, None, :, None], gathered, old_BKRH))

    return jax.tree.map(merge, cache, new)


# ---------------------------------------------------------------- beams
def repeat_rows(caches: Sequence[LayerCache], times: int) -> tuple[LayerCache, ...]:
    """Repeat every row `times` times, next to each other. Sources are not repeated: beams share theirs."""
    return _map_rows(caches, lambda array: jnp.repeat(array, times, axis=0))


def reorder_rows(caches: Sequence[LayerCache], rows: Int[Array, " B"]) -> tuple[LayerCache, ...]:
    """Row i of the result is row `rows[i]`. Sources keep their order: beams move within one request only."""
    return _map_rows(caches, lambda array: array[rows])


def _map_rows(caches: Sequence[LayerCache], change: Callable[[Array], Array]) -> tuple[LayerCache, ...]:
    """Apply `change` to the self-attention cache or the recurrent state, not to cross-attention."""

    def map_layer(cache: LayerCache | RecurrentState) -> LayerCache | RecurrentState:
        if isinstance(cache, LayerCache):
            return cache._replace(attention=jax.tree.map(change, cache.attention))
        return jax.tree.map(change, cache)

    return tuple(map_layer(cache) for cache in caches)
