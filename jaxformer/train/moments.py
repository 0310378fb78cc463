"""Optimizer moments stored in bfloat16, at half the memory; updates are computed in float32.

Moments are rounded stochastically. A moving average whose decay rate is near 1 changes by less than half a bfloat16
step per update, so that rounding to nearest would leave it where it is: with a decay rate of 0.999, the second moment
would never decrease. Stochastic rounding is right on average.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.ops.random import round_to_bfloat16
from jaxformer.sharding import path_name
from jaxformer.typing import Array, Int, PyTree


class RoundedState(NamedTuple):
    count: Int[Array, ""]
    """Number of updates, which seeds the rounding: a resumed run rounds like one that was not interrupted."""
    inner: PyTree


def store_in_bfloat16(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with every moment in bfloat16; other state, such as counters, keeps its dtype."""

    def init(params: PyTree) -> RoundedState:
        state = _map_moments(lambda moment: moment.astype(jnp.bfloat16), optimizer.init(params), params)
        return RoundedState(jnp.zeros((), jnp.int32), state)

    def update(updates: PyTree, state: RoundedState, params: PyTree | None = None) -> tuple[PyTree, RoundedState]:
        wide = _map_moments(lambda moment: moment.astype(jnp.float32), state.inner, updates)
        updates, wide = optimizer.update(updates, wide, params)
        keys = _keys(state.count)
        rounded = _map_moments(lambda moment: round_to_bfloat16(next(keys), moment), wide, updates)
        return updates, RoundedState(state.count + 1, rounded)

    return optax.GradientTransformation(init, update)


def _map_moments(function: Callable[[Array], Array], state: PyTree, params: PyTree) -> PyTree:
    """Apply a function to every array of the state whose path ends in the path of a parameter."""
    # `optax.tree.map_params` cannot do this for Muon, whose `init` reads the structure of the parameters.
    paths = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}

    def one(path: tuple, leaf: Array) -> Array:
        is_moment = any(path_name(path[start:]) in paths for start in range(len(path)))
        return function(leaf) if is_moment else leaf

    return jax.tree_util.tree_map_with_path(one, state)


def _keys(count: Int[Array, ""]) -> Iterator[jax.Array]:
    """A key for each moment of an update."""
    key, index = jax.random.fold_in(jax.random.key(0), count), 0
    while True:
        yield jax.random.fold_in(key, index)
        index += 1
