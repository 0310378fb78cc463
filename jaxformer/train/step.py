"""One training step, a pure function of state and batch."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxformer.config import RunConfig
from jaxformer.layers import Transformer
from jaxformer.layers.partition import Partition
from jaxformer.objectives import Objective
from jaxformer.ops.losses import LossOptions, LossSums
from jaxformer.ops.sharded import Fsdp, shard_weights
from jaxformer.sharding import RULES, batch_spec, on_devices, sum_devices
from jaxformer.train.optim import make_schedule
from jaxformer.train.state import TrainState
from jaxformer.typing import Array, Batch, Float, Params, PyTree


@dataclass(frozen=True)
class StepParts:
    """The parts of a train step that are not arrays."""

    config: RunConfig
    model: Transformer
    objective: type[Objective]
    """Only its loss is used; the objective of a run, which also makes batches, needs a tokenizer."""
    options: LossOptions
    optimizer: optax.GradientTransformation
    partition: Partition
    mesh: Mesh | AbstractMesh
    axes: PyTree
    """Logical axes of all parameters."""
    specs: tuple[PyTree, PyTree | None]
    """PartitionSpecs of the trainable and the frozen parameters."""
    fsdp: Fsdp | None
    """How parameters are sharded over the mesh axis `fsdp`; None if they are not."""


def train_step(state: TrainState, batch: Batch, *, parts: StepParts) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One update from one global batch."""
    optim = parts.config.optim
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    grads, sums = gradient_sums(state.params, state.frozen, batch, key, parts)
    tokens = jnp.maximum(sums.weight, 1.0)
    grads = jax.tree.map(lambda g: g / tokens, grads)
    updates, opt_state = parts.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
        ema = optax.incremental_update(params, ema, 1.0 - optim.ema_decay)
    schedule = make_schedule(optim.schedule, optim.learning_rate, parts.config.train.steps)
    metrics = {
        "loss": sums.loss / tokens,
        **parts.objective.step_metrics(sums, parts.model.config),
        "tokens": sums.weight,
        "grad_norm": optax.tree.norm(grads),
        "param_norm": optax.tree.norm((params, state.frozen)),
        "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
    }
    return TrainState(state.step + 1, params, opt_state, state.key, ema, state.frozen), metrics


def gradient_sums(
    params: Params, frozen: Params | None, batch: Batch, key: jax.Array, parts: StepParts
) -> tuple[Params, LossSums]:
    """Gradient of the summed loss with respect to the trainable parameters, and the loss sums, over all micro-batches.

    Sums instead of means, because micro-batches hold different numbers of real tokens and all tokens weigh the same.
    """
    trainable, fixed = parts.specs
    local = on_devices(
        partial(_local_sums, parts=parts),
        parts.mesh,
        in_specs=(trainable, fixed, batch_spec(parts.mesh), PartitionSpec()),
        out_specs=(trainable, PartitionSpec()),
    )
    return local(params, frozen, batch, key)


def _local_sums(
    params: Params, frozen: Params | None, batch: Batch, key: jax.Array, *, parts: StepParts
) -> tuple[Params, LossSums]:
    """`gradient_sums` from the shards and the rows of one device."""

    def loss(params: Params, batch: Batch, key: jax.Array) -> tuple[Float[Array, ""], LossSums]:
        whole = shard_weights(parts.partition.merge(params, frozen), parts.axes, parts.fsdp)
        sums, _ = parts.objective.loss(parts.model, whole, batch, parts.options, key)
        return sums.loss, sums

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    num_parts = parts.config.train.accumulate

    def add(totals, inputs):
        (_, sums), grads = value_and_grad(params, *inputs)
        return jax.tree.map(jnp.add, totals, (grads, sums)), None

    if num_parts == 1:
        (_, sums), grads = value_and_grad(params, batch, key)
    else:
        zeros = (jax.tree.map(jnp.zeros_like, params), LossSums(*(jnp.zeros(()) for _ in LossSums._fields)))
        micro_batches = (_micro_batches(batch, num_parts), jax.random.split(key, num_parts))
        (grads, sums), _ = jax.lax.scan(add, zeros, micro_batches)
    # Gradients of sharded parameters are already summed over the devices that share them, in every micro-batch.
    return jax.tree.map(_sum_copies, grads, parts.specs[0]), sum_devices(sums)


def _sum_copies(gradient: Array, spec: PartitionSpec) -> Array:
    """Sum a gradient over the devices with other rows that hold the same shard of its parameter."""
    sharded = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    return sum_devices(gradient, [axis for axis in RULES["batch"] if axis not in sharded])


def _micro_batches(batch: Batch, parts: int) -> Batch:
    # Each device takes every n-th of its rows for a micro-batch, which does not depend on the number of devices.
    return jax.tree.map(lambda a: jnp.swapaxes(a.reshape(-1, parts, *a.shape[1:]), 0, 1), batch)
