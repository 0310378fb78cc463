"""Masked language modelling: loss, perplexity and accuracy at the masked positions of the held-out set."""

from jaxformer.config import MaskedAccuracy
from jaxformer.evaluate.heldout import HeldOut, mean_losses
from jaxformer.evaluate.perplexity import exp
from jaxformer.run import Run


def masked(config: MaskedAccuracy, run: Run, heldout: HeldOut) -> dict[str, float]:
    """Means over the masked positions, which are the same in every evaluation."""
    nats, accuracy = mean_losses(heldout.losses(run, config.batches or run.config.evaluate.batches))
    return {"heldout_loss": nats, "heldout_perplexity": exp(nats), "masked_accuracy": accuracy}
