"""Exact-match accuracy of a sequence-to-sequence model on held-out pairs."""

from jaxformer.config import ExactMatch
from jaxformer.decode.api import generate
from jaxformer.evaluate.heldout import HeldOut
from jaxformer.run import Run


def exact_match(config: ExactMatch, run: Run, heldout: HeldOut) -> dict[str, float]:
    """Fraction of the first `num_examples` held-out pairs whose greedy output equals the target."""
    documents = heldout.documents()
    pairs = [documents[i] for i in range(min(config.num_examples, len(documents)))]
    outputs = generate(run, [pair["inputs"] for pair in pairs], max_new_tokens=max_output_length(run))
    return {"exact_match": sum(out == pair["targets"] for out, pair in zip(outputs, pairs, strict=True)) / len(pairs)}


def max_output_length(run: Run) -> int:
    """The length of the longest target in tokens: that of a row, or what fits into the model's context."""
    length, limit = run.config.data.length, run.config.model.max_length
    # The decoder start token takes a place in the context too.
    return length if limit is None else min(length, limit - 1)
