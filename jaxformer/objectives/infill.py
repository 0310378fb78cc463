"""Text infilling and sentence permutation: restore a text whose spans are masked (BART, arXiv:1910.13461, section 2.2).

Deviation: masks that are inserted between tokens (spans of length 0) are limited so that the corrupted text is never
longer than the original one.
"""

import numpy as np

from jaxformer.config import MASK_TOKEN, RunConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.objectives.base import require_token
from jaxformer.objectives.denoising import Denoising


class Infill(Denoising):
    """The targets have the same special tokens around the text as the inputs."""

    kind = "infill"

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._mask_id = require_token(tokenizer, MASK_TOKEN, self.kind)
        self._ends_sentence = tokenizer.sentence_ends

    def lengths(self, length: int) -> tuple[int, int]:
        return length + self.num_special, length + self.num_special

    def corrupt(self, ids: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        cfg = self.config.objective
        shuffled = self._permute_sentences(ids, random) if cfg.permute_sentences else ids
        num_masked = max(1, round(cfg.rate * len(ids)))
        inputs = mask_spans(shuffled, span_lengths(num_masked, cfg.mean_length, random), self._mask_id, random)
        return self.with_special(inputs), self.with_special(ids)

    def _permute_sentences(self, ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        sentences = np.split(ids, np.flatnonzero(self._ends_sentence[ids[:-1]]) + 1)
        return np.concatenate([sentences[i] for i in random.permutation(len(sentences))])


def span_lengths(num_masked: int, mean_length: float, random: np.random.RandomState) -> np.ndarray:
    """Poisson-distributed lengths that add up to `num_masked`; the last one is shortened, and some are 0."""
    lengths = np.zeros(0, np.int64)
    while lengths.sum() < num_masked:
        lengths = np.concatenate([lengths, random.poisson(mean_length, num_masked)])
    num = int(np.searchsorted(np.cumsum(lengths), num_masked)) + 1
    lengths = lengths[:num].copy()
    lengths[-1] -= lengths.sum() - num_masked
    return lengths


def mask_spans(ids: np.ndarray, lengths: np.ndarray, mask_id: int, random: np.random.RandomState) -> np.ndarray:
    """Replace spans of these lengths at random places by one mask each; a span of length 0 inserts a mask."""
    spans, num_inserted = lengths[lengths > 0], int((lengths == 0).sum())
    num_kept = len(ids) - int(spans.sum())
    # Order the kept tokens and the spans at random: each span takes one of num_kept + len(spans) places.
    places = np.sort(random.permutation(num_kept + len(spans))[: len(spans)])
    starts = places - np.arange(len(spans)) + np.cumsum(spans) - spans
    is_masked = np.zeros(len(ids), bool)
    is_masked[np.repeat(starts, spans) + _within(spans)] = True
    out = ids.copy()
    out[starts] = mask_id
    is_masked[starts] = False  # the first token of a span becomes its mask
    corrupted = out[~is_masked]
    num_inserted = min(num_inserted, len(ids) - len(corrupted))
    return np.insert(corrupted, random.randint(0, len(corrupted) + 1, num_inserted), mask_id)


def _within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... for every span, one after another."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
