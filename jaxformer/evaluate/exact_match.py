"""Exact-match accuracy of a sequence-to-sequence model on held-out pairs."""

from jaxformer.config import ExactMatch
from jaxformer.evaluate.decoding import decode_pairs, heldout_pairs, max_output_length
from jaxformer.evaluate.heldout import HeldOut
from jaxformer.run import Run


def exact_match(config: ExactMatch, run: Run, heldout: HeldOut) -> dict[str, float]:
    """Fraction of the first `num_examples` held-out pairs whose greedy output equals the target."""
    pairs = heldout_pairs(config, heldout)
    outputs = decode_pairs(run, pairs, max_new_tokens=max_output_length(run))
    return {"exact_match": sum(out == pair["targets"] for out, pair in zip(outputs, pairs, strict=True)) / len(pairs)}
