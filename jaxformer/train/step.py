"""One training step, a pure function of state and batch; its sibling `eval_step` serves evaluation too."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import RunConfig
from jaxformer.evaluate.heldout import eval_step as eval_step
from jaxformer.layers import Transformer
from jaxformer.ops.losses import LossOptions, LossSums, auto_chunks, head_loss
from jaxformer.train.optim import make_schedule
from jaxformer.train.state import TrainState
from jaxformer.typing import Array, Float, Params, model_inputs

Batch = Mapping[str, Array]


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    config: RunConfig,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One update from one global batch."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    grads, sums = gradient_sums(state.params, batch, key, model, config)
    tokens = jnp.maximum(sums.weight, 1.0)
    grads = jax.tree.map(lambda g: g / tokens, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
        ema = optax.incremental_update(params, ema, 1.0 - config.optim.ema_decay)
    schedule = make_schedule(config.optim.schedule, config.optim.learning_rate, config.train.steps)
    metrics = {
        "loss": sums.loss / tokens,
        "perplexity": jnp.exp(sums.nll / tokens),
        "accuracy": sums.correct / tokens,
        "tokens": sums.weight,
        "grad_norm": optax.tree.norm(grads),
        "param_norm": optax.tree.norm(params),
        "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
    }
    return TrainState(state.step + 1, params, opt_state, state.key, ema), metrics


def gradient_sums(
    params: Params, batch: Batch, key: jax.Array, model: Transformer, config: RunConfig
) -> tuple[Params, LossSums]:
    """Gradient of the summed loss, and the sums, over all micro-batches.

    Sums, not means: micro-batches hold different numbers of real tokens, and each token counts the same.
    """

    options = LossOptions(config.train.label_smoothing, config.train.z_loss, loss_chunks(config))

    def head(params: Params, hidden_BTD: Array) -> Array:
        return model.apply({"params": params}, hidden_BTD, method="logits")

    def loss(params: Params, batch: Batch, key: jax.Array) -> tuple[Float[Array, ""], LossSums]:
        inputs = model_inputs(batch)
        hidden_BTD, router = model.apply({"params": params}, *inputs, key, method="hidden_and_router_loss")
        head_params = {name: params[name] for name in ("embedding", "head") if name in params}
        sums, _ = head_loss(head, options, head_params, hidden_BTD, batch["targets"], batch["weights"])
        if router is not None:
            sums = sums._replace(loss=sums.loss + router * sums.weight)
        return sums.loss, sums

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if config.train.accumulate == 1:
        (_, sums), grads = value_and_grad(params, batch, key)
        return grads, sums

    def add(totals, inputs):
        (_, sums), grads = value_and_grad(params, *inputs)
        return jax.tree.map(jnp.add, totals, (grads, sums)), None

    parts = config.train.accumulate
    zeros = (jax.tree.map(jnp.zeros_like, params), LossSums(*(jnp.zeros(()) for _ in LossSums._fields)))
    totals, _ = jax.lax.scan(add, zeros, (_micro_batches(batch, parts), jax.random.split(key, parts)))
    return totals


def loss_chunks(config: RunConfig) -> int:
    """How many parts of the sequence the loss is computed in: small enough logits, large enough products."""
    if config.train.loss_chunks != "auto":
        return config.train.loss_chunks
    rows = config.data.batch_size // config.train.accumulate // jax.device_count()
    return auto_chunks(rows, config.data.length, config.model.vocab_size)


def _micro_batches(batch: Batch, parts: int) -> Batch:
    # Rows are dealt out in strides, so that each device keeps the rows it already holds.
    return {name: jnp.swapaxes(a.reshape(-1, parts, *a.shape[1:]), 0, 1) for name, a in batch.items()}
