"""Pseudo-perplexity of masked language models (arXiv:1910.14659, section 2).

Every token of a text is masked in turn and predicted from all others. The pseudo-perplexity is exp of the negative mean
log-probability over all tokens, without bos and eos.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxformer.config import MASK_TOKEN, PseudoPerplexity
from jaxformer.data.packing import packed_tokens
from jaxformer.evaluate.heldout import HeldOut, mean_losses
from jaxformer.evaluate.perplexity import exp
from jaxformer.objectives.base import require_token
from jaxformer.run import Run
from jaxformer.typing import Batch

Row = tuple[np.ndarray, int]
"""The ids of a text with bos and eos, and the position to mask."""


def pseudo_perplexity(config: PseudoPerplexity, run: Run, heldout: HeldOut) -> dict[str, float]:
    """The pseudo-perplexity of the first `num_examples` held-out texts; long texts are cut as in training."""
    documents, objective = heldout.documents(), heldout.loader.objective
    examples = [documents[i] for i in range(min(config.num_examples, len(documents)))]
    texts = [piece["tokens"] for ids in objective.encode(examples) for piece in objective.pieces(ids)]
    mask_id = require_token(run.tokenizer, MASK_TOKEN, objective.kind)
    # Texts of similar length share a batch, so that little of it is padding.
    texts.sort(key=len)
    rows = [(text, position) for text in texts for position in range(1, len(text) - 1)]
    nats, _ = mean_losses(heldout.batch_losses(run, _batches(rows, heldout, mask_id), length=1))
    return {"pseudo_perplexity": exp(nats)}


def _batches(rows: Sequence[Row], heldout: HeldOut, mask_id: int) -> Iterator[Batch]:
    """This host's rows of every batch; the last batch may have empty rows."""
    loader, limit = heldout.loader, heldout.config.data.length
    for start in range(0, len(rows), loader.num_rows * loader.num_hosts):
        batch = rows[start : start + loader.num_rows * loader.num_hosts]
        # Widths are powers of two, so that only a few shapes are compiled.
        width = min(limit, 1 << (max(len(text) for text, _ in batch) - 1).bit_length())
        own = batch[loader.host * loader.num_rows :][: loader.num_rows]
        yield _masked_batch(own, loader.num_rows, width, mask_id)


def _masked_batch(rows: Sequence[Row], num_rows: int, width: int, mask_id: int) -> Batch:
    ids, segments = np.zeros((2, num_rows, width), np.int32)
    targets, positions = np.zeros((2, num_rows, 1), np.int32)
    weights = np.zeros((num_rows, 1), np.float32)
    for i, (text, position) in enumerate(rows):
        ids[i, : len(text)], segments[i, : len(text)] = text, 1
        targets[i], positions[i], weights[i] = text[position], position, 1.0
        ids[i, position] = mask_id
    return Batch(packed_tokens(ids, segments), targets, weights, predicted=positions)
