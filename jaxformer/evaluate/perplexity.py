"""Held-out loss: perplexity, token accuracy and bits per byte."""

import math

from jaxformer.config import Perplexity
from jaxformer.evaluate.heldout import HeldOut, mean_losses
from jaxformer.run import Run


def perplexity(config: Perplexity, run: Run, heldout: HeldOut) -> dict[str, float]:
    """Means over the held-out set, or over its first batches if `batches` is set."""
    nats, accuracy = mean_losses(heldout.losses(run, config.batches or run.config.evaluate.batches))
    values = {"heldout_loss": nats, "heldout_perplexity": exp(nats), "heldout_accuracy": accuracy}
    packed = heldout.packed_set
    if packed.num_bytes:
        # Tokens per byte are those of the whole set, so the value is exact only if all batches are evaluated.
        values["heldout_bits_per_byte"] = nats / math.log(2) * packed.num_tokens / packed.num_bytes
    return values


def exp(nats: float) -> float:
    """The perplexity of a mean loss; infinity instead of an overflow error."""
    return math.inf if nats >= 709 else math.exp(nats)  # NaN stays NaN
