"""The train state: a pytree of arrays, sharded like the parameters."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config import RunConfig
from jaxformer.layers import abstract_params
from jaxformer.layers.partition import Partition, whole_leaf
from jaxformer.sharding import like_params, param_shardings
from jaxformer.typing import Array, Int, Key, Params, PyTree


@dataclass(frozen=True)
class TrainState:
    step: Int[Array, ""]
    params: Params
    """The trainable parameters: all parameters unless `train.freeze` selects some."""
    opt_state: PyTree
    key: Key
    ema: Params | None = None
    """Exponential moving average of `params`; None if `optim.ema_decay` is not set."""
    frozen: Params | None = None
    """The frozen parameters; None if there are none."""


def _flatten_with_keys(state: TrainState) -> tuple[list[tuple[Any, PyTree]], tuple[str, ...]]:
    # Without frozen parameters, the pytree has no `frozen` entry at all, not even an empty one, so that checkpoints of
    # earlier versions still match.
    names = tuple(f.name for f in fields(state) if f.name != "frozen" or state.frozen is not None)
    return [(jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in names], names


def _unflatten(names: tuple[str, ...], children: Iterable[PyTree]) -> TrainState:
    return TrainState(**dict(zip(names, children, strict=True)))


jax.tree_util.register_pytree_with_keys(TrainState, _flatten_with_keys, _unflatten)


def init_state(
    config: RunConfig, params: Params, optimizer: optax.GradientTransformation, partition: Partition
) -> TrainState:
    """The state before the first step, from all parameters of the model."""
    trainable, frozen = partition.split(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=trainable,
        opt_state=optimizer.init(trainable),
        key=jax.random.key_data(jax.random.split(jax.random.key(config.seed))[1]),
        ema=None if config.optim.ema_decay is None else jax.tree.map(jnp.copy, trainable),
        frozen=frozen,
    )


def state_shardings(config: RunConfig, state: TrainState, partition: Partition, mesh: Mesh) -> TrainState:
    """A sharding for every leaf of the (abstract) state."""
    shapes, axes = abstract_params(config.model)
    params, frozen = partition.split(param_shardings(axes, shapes, mesh), take=whole_leaf)
    replicated = NamedSharding(mesh, PartitionSpec())
    return TrainState(
        step=replicated,
        params=params,
        opt_state=like_params(state.opt_state, state.params, params, mesh),
        key=replicated,
        ema=None if state.ema is None else params,
        frozen=frozen,
    )
