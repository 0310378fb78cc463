"""Held-out loss: perplexity, token accuracy and bits per byte."""

import math

import jax
import numpy as np

from jaxformer.config import Perplexity
from jaxformer.evaluate.heldout import HeldOut
from jaxformer.run import Run


def perplexity(config: Perplexity, run: Run, heldout: HeldOut) -> dict[str, float]:
    """Means over the held-out set, or over its first batches if `batches` is set."""
    sums = list(heldout.losses(run, config.batches or run.config.evaluate.batches))
    _, nll, correct, weight = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
    values = {
        "heldout_loss": float(nll / weight),
        "heldout_perplexity": float(np.exp(nll / weight)),
        "heldout_accuracy": float(correct / weight),
    }
    packed = heldout.packed_set
    if packed.num_bytes:
        # Tokens per byte are those of the whole set, so the value is exact only if all batches are evaluated.
        bits_per_token = nll / weight / math.log(2)
        values["heldout_bits_per_byte"] = float(bits_per_token * packed.num_tokens / packed.num_bytes)
    return values
