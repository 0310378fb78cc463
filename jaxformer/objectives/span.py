"""Span corruption: predict the spans of a text that sentinels replace (T5, arXiv:1910.10683, section 3.1.4).

Span lengths are drawn as in T5's own code: the number of corrupted tokens and of spans follows from the length of the
text, and both the corrupted and the other tokens are split into that many parts at random.
"""

import numpy as np

from jaxformer.config import NUM_SENTINELS, RunConfig, sentinel_token
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.objectives.base import require_tokens
from jaxformer.objectives.denoising import Denoising

SENTINEL_NAMES = tuple(map(sentinel_token, range(NUM_SENTINELS)))  # in the order of the spans that they replace


class Span(Denoising):
    kind = "span"

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._sentinels = np.array(require_tokens(tokenizer, SENTINEL_NAMES, self.kind), np.int32)
        super().__init__(config, tokenizer)
        cfg = self.config.objective
        check_num_spans(span_counts(self._stored_length, cfg.density, cfg.mean_length)[1])

    def lengths(self, length: int) -> tuple[int, int]:
        cfg = self.config.objective
        inputs, targets = corrupted_lengths(length, *span_counts(length, cfg.density, cfg.mean_length))
        return inputs + self.num_special, targets + 1

    def corrupt(self, ids: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        cfg = self.config.objective
        is_noise = random_spans(len(ids), *span_counts(len(ids), cfg.density, cfg.mean_length), random)
        inputs, targets = replace_spans(ids, is_noise, self._sentinels)
        return self.with_special(inputs), np.append(targets, self.special.first_eos)


# ---------------------------------------------------------------- shared with UL2
def check_num_spans(num_spans: int) -> None:
    if num_spans > NUM_SENTINELS:
        raise UserError(
            f"data.objective: a row has up to {num_spans} spans, but there are {NUM_SENTINELS} sentinels: raise "
            "mean_length, or lower density or input_length"
        )


def span_counts(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """The number of corrupted tokens and of spans in a text; both are at least 1 if the text has two tokens."""
    if length < 2:
        return 0, 0
    # T5 computes in float32, which decides where the product is close to a half: 190 * 0.15 is rounded to 29.
    num_noise = min(max(round(float(np.float32(length) * np.float32(density))), 1), length - 1)
    num_spans = min(max(round(num_noise / mean_length), 1), num_noise, length - num_noise)
    return num_noise, num_spans


def corrupted_lengths(length: int, num_noise: int, num_spans: int) -> tuple[int, int]:
    """The lengths of inputs and targets without special tokens."""
    return length - num_noise + num_spans, max(num_noise + num_spans, 1)


def random_spans(length: int, num_noise: int, num_spans: int, random: np.random.RandomState) -> np.ndarray:
    """A mask of corrupted tokens: spans of random lengths, of which the first begins after at least one token."""
    if not num_spans:
        return np.zeros(length, bool)
    lengths = np.empty(2 * num_spans, np.int64)
    lengths[1::2] = _random_parts(num_noise, num_spans, random)
    lengths[0::2] = _random_parts(length - num_noise, num_spans, random)
    return np.repeat(np.arange(2 * num_spans) % 2 == 1, lengths)


def _random_parts(total: int, num_parts: int, random: np.random.RandomState) -> np.ndarray:
    """Split `total` into positive parts; all ways to split it are equally likely."""
    cuts = np.sort(random.permutation(total - 1)[: num_parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def replace_spans(ids: np.ndarray, is_noise: np.ndarray, sentinels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with a sentinel for every corrupted span; targets with the same sentinels for everything between them."""
    return _with_sentinels(ids, is_noise, sentinels), _with_sentinels(ids, ~is_noise, sentinels)


def _with_sentinels(ids: np.ndarray, is_replaced: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    begins = is_replaced & ~np.concatenate([[False], is_replaced[:-1]])
    out = ids.copy()
    out[begins] = sentinels[: begins.sum()]
    return out[begins | ~is_replaced]
