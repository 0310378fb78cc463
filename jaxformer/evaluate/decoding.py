"""Outputs of a sequence-to-sequence model for held-out pairs, which BLEU and exact match compare with the targets."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.config import Bleu, ExactMatch, RunConfig
from jaxformer.data import Tokenizer, open_split
from jaxformer.decode.api import generate
from jaxformer.errors import UserError
from jaxformer.evaluate.heldout import HeldOut
from jaxformer.run import Run

log = logging.getLogger(__name__)

Pair = Mapping[str, str]


def heldout_pairs(config: Bleu | ExactMatch, heldout: HeldOut) -> list[Pair]:
    """The first `num_examples` held-out pairs."""
    return _first_pairs(config, heldout.documents())


def check_lengths(metric: Bleu | ExactMatch, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise if outputs, or inputs that may not be truncated, are longer than the model's context.

    Metrics decode all pairs, also those that are too long for a row of the held-out set."""
    limit = config.model.max_length
    if limit is None:
        return
    max_new_tokens = getattr(metric, "max_new_tokens", None)
    if max_new_tokens is not None and max_new_tokens >= limit:
        raise UserError(
            f"evaluate.metrics: {metric.kind}.max_new_tokens={max_new_tokens} does not fit into the model's context of "
            f"{limit} tokens together with the decoder start token: set at most {limit - 1}"
        )
    pairs = _first_pairs(metric, open_split(config.data, "heldout"))
    num_long = sum(len(ids) > limit for ids in tokenizer.encode_source([pair["inputs"] for pair in pairs]))
    if not num_long:
        return
    long = f"{num_long:,} of {len(pairs):,} inputs of data.heldout exceed the model's context of {limit} tokens"
    if config.data.too_long == "drop":
        raise UserError(
            f"evaluate.metrics: {metric.kind} decodes all inputs, but {long}: set data.too_long=truncate, "
            "or remove them"
        )
    log.warning("%s: %s and are truncated", metric.kind, long)


def decode_pairs(run: Run, pairs: Sequence[Pair], **settings: Any) -> list[str]:
    """The outputs for the inputs of the pairs; inputs longer than the model's context are truncated."""
    prompts: list[str | list[int]] = [pair["inputs"] for pair in pairs]
    limit = run.config.model.max_length
    if limit is not None and run.config.data.too_long == "truncate":
        for i, ids in enumerate(run.tokenizer.encode_source(prompts)):
            if len(ids) > limit:
                prompts[i] = [*ids[: limit - 1], ids[-1]]  # the special token that ends the inputs is kept
    outputs = generate(run, prompts, **settings)
    return [output if isinstance(output, str) else run.tokenizer.decode(output) for output in outputs]


def max_output_length(run: Run) -> int:
    """The length of the longest target in tokens: that of a row, or what fits into the model's context."""
    length, limit = run.config.data.length, run.config.model.max_length
    # The decoder start token takes a place in the context too.
    return length if limit is None else min(length, limit - 1)


def _first_pairs(config: Bleu | ExactMatch, documents: Sequence[Pair]) -> list[Pair]:
    return [documents[i] for i in range(min(config.num_examples or len(documents), len(documents)))]
