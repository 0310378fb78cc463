"""Key-value caches: preallocated, explicit, one per layer; a recurrent layer has its state instead.

A layer's cache is its own set of arrays rather than a slice of a stacked one, with heads before positions: a loop that
carries it then updates it in place, and attention reads it as it lies.

There are two places to put a key, a `Full` row in order and a `Ring` that goes round within a window, and two ways to
store one, as it is and as `Int8`; a cache is one of each.
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


class Int8(NamedTuple):
    """Vectors of a head as whole numbers, each with a scale of its own."""

    values: Int[Array, "B K S H"]
    scales: Float[Array, "B K S 1"]


Stored = Float[Array, "B K S H"] | Int8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullCache:
    """All keys and values of a row, in its order; what lies beyond a row's length is never seen."""

    k: Stored
    v: Stored

    def extend(
        self, new: KeysValues, start_B: Int[Array, " B"], lengths_B: Int[Array, " B"], window: int | None
    ) -> tuple["FullCache", KeysValues, Mask]:
        """Each row writes from its own index on, so that prompts of different lengths share a batch."""
        written = FullCache(*(_write(old, part, start_B) for old, part in zip((self.k, self.v), new, strict=True)))
        mask = Mask(causal=True, window=window, q_offset=start_B)
        return written, KeysValues(*(_read(part, new.k_BKSH.dtype) for part in (written.k, written.v))), mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RingCache:
    """The last `size` keys and values of a row: the one of index i lies at i modulo `size`.

    A window of `size` never sees an older one, so memory stays bounded however long the row grows.
    """

    k: Stored
    v: Stored
    size: int = field(metadata={"static": True})

    def extend(
        self, new: KeysValues, start_B: Int[Array, " B"], lengths_B: Int[Array, " B"], window: int | None
    ) -> tuple["RingCache", KeysValues, Mask]:
        if new.k_BKSH.shape[2] == 1:
            return self._extend_by_one(new, start_B, lengths_B, window)
        # A new key may take the place of one that an earlier new query still sees: attend first, then write.
        T, dtype = new.k_BKSH.shape[2], new.k_BKSH.dtype
        fresh = [_stored(part, old) for old, part in zip((self.k, self.v), new, strict=True)]
        seen = [
            jnp.concatenate([_read(old, dtype), _read(part, dtype)], axis=2)
            for old, part in zip((self.k, self.v), fresh, strict=True)
        ]
        index_BS = jnp.concatenate([self._index(start_B), start_B[:, None] + jnp.arange(T)], axis=1)
        mask = Mask(causal=True, window=window, q_offset=start_B, kv_index=index_BS)
        ends_BR = self._index(start_B + lengths_B) - start_B[:, None]  # of `new`, or before it
        merged = [_merged(old, part, ends_BR) for old, part in zip((self.k, self.v), fresh, strict=True)]
        return RingCache(*merged, self.size), KeysValues(*seen), mask

    def _extend_by_one(
        self, new: KeysValues, start_B: Int[Array, " B"], lengths_B: Int[Array, " B"], window: int | None
    ) -> tuple["RingCache", KeysValues, Mask]:
        place_B = start_B % self.size
        written = [_write(old, part, place_B) for old, part in zip((self.k, self.v), new, strict=True)]
        mask = Mask(causal=True, window=window, q_offset=start_B, kv_index=self._index(start_B + 1))
        seen = KeysValues(*(_read(part, new.k_BKSH.dtype) for part in written))
        return RingCache(*written, self.size), seen, mask

    def _index(self, end_B: Int[Array, " B"]) -> Int[Array, "B R"]:
        """The index of what lies in every place of a row of `end` tokens; below 0 where nothing does."""
        last_B1 = end_B[:, None] - 1
        return last_B1 - (last_B1 - jnp.arange(self.size)) % self.size


def make_caches(
    config: ModelConfig, batch: int, length: int, runtime: Runtime, cross: Sequence[KeysValues] | None = None
) -> tuple[LayerCache | RecurrentState, ...]:
    """Empty caches of all decoder layers, with room for `length` tokens a row; a recurrent state needs no room."""
    stack = config.decoder
    if isinstance(stack, RecurrentConfig):
        return tuple(empty_state(stack.cell, batch, stack.dim) for _ in range(stack.num_layers))
    return tuple(
        LayerCache(
            _empty(stack.block(layer).attention, batch, length, runtime), None if cross is None else cross[layer]
        )
        for layer in range(stack.num_layers)
    )


def _empty(attention: AttentionConfig, batch: int, length: int, runtime: Runtime) -> FullCache | RingCache:
    is_ring = attention.window is not None and attention.window < length
    size = attention.window if is_ring else length
    shape = (batch, attention.kv_heads, size, attention.head_dim)

    def zeros() -> Stored:
        if runtime.cache == "int8":
            scales = jnp.zeros((*shape[:-1], 1), jnp.float32)
            return Int8(_split(jnp.zeros(shape, jnp.int8)), _split(scales))
        return _split(jnp.zeros(shape, runtime.dtype))

    return RingCache(zeros(), zeros(), size) if is_ring else FullCache(zeros(), zeros())


def _split(array_BKSH: Array) -> Array:
    """Over the mesh, by rows and heads."""
    return constrain(array_BKSH, "batch", "kv_heads", None, None)


# ---------------------------------------------------------------- storing
def _stored(new_BKTH: Float[Array, "B K T H"], like: Stored) -> Stored:
    """As the cache stores it."""
    if not isinstance(like, Int8):
        return new_BKTH.astype(like.dtype)
    largest = jnp.abs(new_BKTH.astype(jnp.float32)).max(axis=-1, keepdims=True)
    scales = largest / 127.0
    values = jnp.round(new_BKTH / jnp.where(scales > 0.0, scales, 1.0))
    return Int8(values.astype(jnp.int8), scales)


def _read(stored: Stored, dtype: jnp.dtype) -> Float[Array, "B K S H"]:
    if isinstance(stored, Int8):
        return (stored.values * stored.scales).astype(dtype)
    return stored.astype(dtype)


def _write(old: Stored, new_BKTH: Float[Array, "B K T H"], place_B: Int[Array, " B"]) -> Stored:
    def one_row(old_KSH: Array, new_KTH: Array, place: Array) -> Array:
        return jax.lax.dynamic_update_slice(old_KSH, new_KTH, (0, place, 0))

    def all_rows(old_BKSH: Array, new_BKTH: Array) -> Array:
        if len(place_B) == 1:
            return one_row(old_BKSH[0], new_BKTH[0], place_B[0])[None]
        return _split(jax.vmap(one_row)(old_BKSH, new_BKTH, place_B))

    return jax.tree.map(all_rows, old, _stored(new_BKTH, old))


def _merged(old: Stored, new: Stored, index_BR: Int[Array, "B R"]) -> Stored:
    """For every place the new vector of that index, the old one where the index is below 0."""

    def one(old_BKRH: Array, new_BKTH: Array) -> Array:
        taken = jnp.take_along_axis(new_BKTH, jnp.maximum(index_BR, 0)[:, None, :, None], axis=2)
        return _split(jnp.where((index_BR >= 0)[:, None, :, None], taken, old_BKRH))

    return jax.tree.map(one, old, new)


# ---------------------------------------------------------------- beams
def repeated(caches: Sequence[LayerCache], times: int) -> tuple[LayerCache, ...]:
    """Every row `times` times in a row; a source stays one."""
    return _own(caches, lambda array: jnp.repeat(array, times, axis=0))


def reordered(caches: Sequence[LayerCache], rows: Int[Array, " B"]) -> tuple[LayerCache, ...]:
    """Row i becomes what row `rows[i]` was; sources stay where they are."""
    return _own(caches, lambda array: array[rows])


def _own(caches: Sequence[LayerCache], change: Callable[[Array], Array]) -> tuple[LayerCache, ...]:
    """`change` applied to what a row has of its own."""

    def one(cache: LayerCache) -> LayerCache:
        if isinstance(cache, LayerCache):
            return cache._replace(attention=jax.tree.map(change, cache.attention))
        return jax.tree.map(change, cache)

    return tuple(one(cache) for cache in caches)
