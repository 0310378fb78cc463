"""Held-out loss: perplexity, token accuracy and bits per byte."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer.data import Loader
from jaxformer.decode.scoring import token_scores
from jaxformer.layers import Transformer
from jaxformer.ops.losses import LossSums
from jaxformer.sharding import global_batch
from jaxformer.typing import Array, Params, model_inputs


def eval_step(params: Params, batch: Mapping[str, Array], *, model: Transformer) -> LossSums:
    """Sums over one batch: no dropout, no smoothing, no z-loss."""
    target, source = model_inputs(batch)
    scores, weights_BT = token_scores(model, params, target, batch["targets"], source), batch["weights"]
    nll = -jnp.sum(scores.log_probs_BT * weights_BT)
    return LossSums(nll, nll, jnp.sum(scores.correct_BT * weights_BT), jnp.sum(weights_BT))


def heldout_metrics(
    step: Callable[[Params, Mapping[str, Array]], LossSums],
    params: Params,
    loader: Loader,
    mesh: Mesh,
    max_batches: int | None = None,
) -> dict[str, float]:
    """Means over the held-out set, or its first `max_batches` batches; `step` is a jitted `eval_step`."""
    num_batches = min(loader.num_batches, max_batches or loader.num_batches)
    # Sums stay on the device until the end: fetching each would stall it.
    sums = [step(params, global_batch(batch, mesh)) for batch in loader.iterate(0, num_batches)]
    _, nll, correct, weight = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
    packed = loader.packed_set
    bits_per_token = nll / weight / math.log(2)
    return {
        "heldout_loss": float(nll / weight),
        "heldout_perplexity": float(np.exp(nll / weight)),
        "heldout_accuracy": float(correct / weight),
        # Over the whole set exact; over its first batches with the whole set's tokens per byte.
        "heldout_bits_per_byte": float(bits_per_token * packed.num_tokens / packed.num_bytes),
    }
