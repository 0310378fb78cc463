"""The train state: arrays only, one pytree, sharded like its parameters."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config import RunConfig
from jaxformer.layers import abstract_params, init_params
from jaxformer.sharding import like_params, param_shardings
from jaxformer.typing import Array, Int, Key, Params, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: Int[Array, ""]
    params: Params
    opt_state: PyTree
    key: Key
    ema: Params | None = None
    """Moving average of the parameters, if the run keeps one."""

    @property
    def best_params(self) -> Params:
        """What to evaluate and decode with."""
        return self.params if self.ema is None else self.ema


def init_state(config: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; a function of the seed alone."""
    init_key, step_key = jax.random.split(jax.random.key(config.seed))
    params = init_params(config.model, init_key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=jax.random.key_data(step_key),
        ema=None if config.optim.ema_decay is None else jax.tree.map(jnp.copy, params),
    )


def state_shardings(config: RunConfig, state: TrainState, mesh: Mesh) -> TrainState:
    """A sharding for every leaf of the (abstract) state."""
    shapes, axes = abstract_params(config.model)
    params = param_shardings(axes, shapes, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    return TrainState(
        step=replicated,
        params=params,
        opt_state=like_params(state.opt_state, shapes, params, mesh),
        key=replicated,
        ema=None if state.ema is None else params,
    )
