"""Key-value caches: preallocated, explicit, one per layer; a recurrent layer has its state instead.

A layer's cache is its own set of arrays rather than a slice of a stacked one: a loop that carries it then
updates it in place, and attention reads it without slicing it out first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig, RecurrentConfig
from jaxformer.layers.attention import KeysValues
from jaxformer.layers.block import LayerCache
from jaxformer.ops.masks import Mask
from jaxformer.ops.recurrence import RecurrentState, empty_state
from jaxformer.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullCache:
    """All keys and values of a row, in its order; what lies beyond a row's length is never seen."""

    k_BSKH: Float[Array, "B S K H"]
    v_BSKH: Float[Array, "B S K H"]

    def extend(
        self, new: KeysValues, start_B: Int[Array, " B"], window: int | None
    ) -> tuple["FullCache", KeysValues, Mask]:
        """Each row writes from its own index on, so that prompts of different lengths share a batch."""
        written = FullCache(_write(self.k_BSKH, new.k_BSKH, start_B), _write(self.v_BSKH, new.v_BSKH, start_B))
        mask = Mask(causal=True, window=window, q_offset=start_B)
        return written, KeysValues(written.k_BSKH, written.v_BSKH), mask


def make_caches(
    config: ModelConfig, batch: int, length: int, dtype: jnp.dtype, cross: Sequence[KeysValues] | None = None
) -> tuple[LayerCache | RecurrentState, ...]:
    """Empty caches of all decoder layers, with room for `length` tokens a row; a recurrent state needs no room."""
    stack = config.decoder
    if isinstance(stack, RecurrentConfig):
        return tuple(empty_state(stack.cell, batch, stack.dim) for _ in range(stack.num_layers))
    caches = []
    for layer in range(stack.num_layers):
        attention = stack.block(layer).attention
        shape = (batch, length, attention.kv_heads, attention.head_dim)
        empty = FullCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        caches.append(LayerCache(empty, None if cross is None else cross[layer]))
    return tuple(caches)


def _write(
    cache_BSKH: Float[Array, "B S K H"], new_BTKH: Float[Array, "B T K H"], start_B: Int[Array, " B"]
) -> Float[Array, "B S K H"]:
    def one_row(cache_SKH: Array, new_TKH: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice(cache_SKH, new_TKH.astype(cache_SKH.dtype), (start, 0, 0))

    return jax.vmap(one_row)(cache_BSKH, new_BTKH, start_B)


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
