"""Optax optimizers and learning rate schedules from their typed configs.

Every optimizer is the same chain: clip gradients, apply the algorithm, add weight decay, scale by the learning rate.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxformer.config import OptimConfig
from jaxformer.config.optim import Adafactor, AdamW, AnySchedule, Lion, Muon, Sgd
from jaxformer.ops.axes import Axes, matrix_dims
from jaxformer.train.moments import store_in_bfloat16
from jaxformer.typing import Params, PyTree


def make_optimizer(config: OptimConfig, steps: int, axes: PyTree) -> optax.GradientTransformation:
    """The full update rule; `axes` are the logical axes of the parameters, by which Muon recognises matrices."""
    algorithm = _ALGORITHMS[config.algorithm.kind](config.algorithm, axes)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        store_in_bfloat16(algorithm) if config.moment_dtype == "bfloat16" else algorithm,
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(make_schedule(config.schedule, config.learning_rate, steps)),
    )


def decay_mask(params: Params) -> PyTree:
    """True for parameters with weight decay: all but norms and biases."""
    no_decay = ("scale", "bias", "relative_bias")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in no_decay, params)


def make_schedule(config: AnySchedule, peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up, then the configured schedule; `steps` is the total number of training steps."""
    warmup = config.warmup_steps
    after = _SCHEDULES[config.kind](config, peak, steps - warmup)

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        return jnp.where(step < warmup, peak * step / max(warmup, 1), after(jnp.maximum(step - warmup, 0.0)))

    return schedule


# ---------------------------------------------------------------- algorithms
def _adamw(config: AdamW, axes: PyTree) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def _adafactor(config: Adafactor, axes: PyTree) -> optax.GradientTransformation:
    # Deviation: update clipping treats the stacked layers of one matrix as one block.
    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=config.decay_rate, min_dim_size_to_factor=config.min_dim_to_factor),
        optax.clip_by_block_rms(config.clip_threshold),
    )


def _lion(config: Lion, axes: PyTree) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.b1, config.b2)


def _sgd(config: Sgd, axes: PyTree) -> optax.GradientTransformation:
    return optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity()


def _muon(config: Muon, axes: PyTree) -> optax.GradientTransformation:
    is_axes = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    return contrib.muon(
        learning_rate=-1.0,  # cancels optax's negation: the end of our chain applies sign and learning rate
        beta=config.momentum,
        ns_steps=config.ns_steps,
        adam_b1=config.b1,
        adam_b2=config.b2,
        # arXiv:2502.16982, section 2.2: updates have the RMS of AdamW's, so that both can use one learning rate.
        consistent_rms=0.2,
        muon_weight_dimension_numbers=jax.tree.map(_matrix_dims, axes, is_leaf=is_axes),
    )


def _matrix_dims(axes: Axes) -> contrib.MuonDimensionNumbers | None:
    """Input and output dimensions of a block's kernel; None for biases, norms, embeddings and the head."""
    dims = matrix_dims(axes) if axes[0] == "layers" else None
    return None if dims is None else contrib.MuonDimensionNumbers(dims.inputs, dims.outputs)


_ALGORITHMS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}


# ---------------------------------------------------------------- schedules
def _cosine(config, peak: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, max(steps, 1), alpha=config.final)


def _inverse_sqrt(config, peak: float, steps: int) -> optax.Schedule:
    return lambda step: peak * (config.warmup_steps / (step + config.warmup_steps)) ** 0.5


def _wsd(config, peak: float, steps: int) -> optax.Schedule:
    decay = optax.linear_schedule(peak, config.final * peak, config.decay_steps)
    return optax.join_schedules([optax.constant_schedule(peak), decay], [steps - config.decay_steps])


_SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": lambda config, peak, steps: optax.constant_schedule(peak),
    "linear": lambda config, peak, steps: optax.linear_schedule(peak, config.final * peak, steps),
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
}
