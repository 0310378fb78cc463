"""One training step, a pure function of state and batch."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import RunConfig
from jaxformer.layers import Transformer
from jaxformer.layers.partition import Partition
from jaxformer.objectives import Objective
from jaxformer.ops.losses import LossOptions, LossSums
from jaxformer.train.optim import make_schedule
from jaxformer.train.state import TrainState
from jaxformer.typing import Array, Batch, Float, Params


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

    def loss(params: Params, batch: Batch, key: jax.Array) -> tuple[Float[Array, ""], LossSums]:
        whole = parts.partition.merge(params, frozen)
        sums, _ = parts.objective.loss(parts.model, whole, batch, parts.options, key)
        return sums.loss, sums

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    num_parts = parts.config.train.accumulate
    if num_parts == 1:
        (_, sums), grads = value_and_grad(params, batch, key)
        return grads, sums

    def add(totals, inputs):
        (_, sums), grads = value_and_grad(params, *inputs)
        return jax.tree.map(jnp.add, totals, (grads, sums)), None

    zeros = (jax.tree.map(jnp.zeros_like, params), LossSums(*(jnp.zeros(()) for _ in LossSums._fields)))
    totals, _ = jax.lax.scan(add, zeros, (_micro_batches(batch, num_parts), jax.random.split(key, num_parts)))
    return totals


def _micro_batches(batch: Batch, parts: int) -> Batch:
    # A micro-batch takes every n-th row, so that each device keeps the rows it already holds.
    return jax.tree.map(lambda a: jnp.swapaxes(a.reshape(-1, parts, *a.shape[1:]), 0, 1), batch)
