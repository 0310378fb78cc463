"""Exact-match accuracy of a sequence-to-sequence model on held-out pairs."""

from jaxformer.data import open_source
from jaxformer.decode.api import generate
from jaxformer.run import Run


def exact_match(run: Run, num_examples: int) -> float:
    """Share of held-out pairs whose greedy output is the target to the letter."""
    documents = open_source(run.config.data.heldout)
    pairs = [documents[i] for i in range(min(num_examples, len(documents)))]
    outputs = generate(run, [pair["inputs"] for pair in pairs], max_new_tokens=run.config.data.length)
    return sum(out == pair["targets"] for out, pair in zip(outputs, pairs, strict=True)) / len(pairs)
