"""Token cross-entropy as sums, so that micro-batches and hosts add up to the whole batch exactly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LossSums(NamedTuple):
    """Sums over weighted tokens; divide by `weight` for means."""

    loss: Float[Array, ""]  # what is minimised: smoothed cross-entropy plus z-loss
    nll: Float[Array, ""]  # plain negative log-likelihood, in nats
    correct: Float[Array, ""]
    weight: Float[Array, ""]


def cross_entropy(
    logits_BTV: Float[Array, "B T V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> LossSums:
    """Label smoothing spreads its share evenly over all V (arXiv:1512.00567, section 7); z_loss is PaLM's."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nll_BT = log_z_BT - target_BT
    loss_BT = nll_BT
    if label_smoothing:
        loss_BT = (1 - label_smoothing) * nll_BT + label_smoothing * (log_z_BT - logits_BTV.mean(axis=-1))
    if z_loss:
        loss_BT = loss_BT + z_loss * jnp.square(log_z_BT)
    # The target wins if it reaches the maximum: as argmax, without a second pass over V for indices.
    correct_BT = target_BT >= jax.lax.stop_gradient(logits_BTV).max(axis=-1)
    sums = (loss_BT, nll_BT, correct_BT, jnp.ones_like(loss_BT))
    return LossSums(*(jnp.sum(term * weights_BT) for term in sums))
