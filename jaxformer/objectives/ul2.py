"""UL2: a mixture of denoising tasks, each announced by a mode token (arXiv:2205.05131, section 3.1).

Deviation: the sequential task corrupts exactly its density, where the paper draws the length of the prefix.
"""

import numpy as np

from jaxformer.config import Denoiser, RunConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.objectives.base import require_tokens
from jaxformer.objectives.denoising import Denoising
from jaxformer.objectives.span import (
    SENTINEL_NAMES,
    check_num_spans,
    corrupted_lengths,
    random_spans,
    replace_spans,
    span_counts,
)


class Ul2(Denoising):
    kind = "ul2"

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._denoisers = config.data.objective.denoisers
        modes = [denoiser.mode for denoiser in self._denoisers]
        ids = require_tokens(tokenizer, [*SENTINEL_NAMES, *modes], self.kind)
        self._sentinels, self._modes = np.array(ids[: -len(modes)], np.int32), ids[-len(modes) :]
        self._chances = np.cumsum([denoiser.weight for denoiser in self._denoisers])
        super().__init__(config, tokenizer)
        check_num_spans(max(_counts(self._stored_length, denoiser)[1] for denoiser in self._denoisers))

    def lengths(self, length: int) -> tuple[int, int]:
        each = (corrupted_lengths(length, *_counts(length, denoiser)) for denoiser in self._denoisers)
        inputs, targets = (max(lengths) for lengths in zip(*each, strict=True))
        return inputs + 1 + self.num_special, targets + 1  # 1: the mode token, and eos

    def corrupt(self, ids: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        choice = np.searchsorted(self._chances, random.random_sample() * self._chances[-1], side="right")
        denoiser, counts = self._denoisers[choice], _counts(len(ids), self._denoisers[choice])
        if denoiser.mean_length is None:
            is_noise = np.arange(len(ids)) >= len(ids) - counts[0]
        else:
            is_noise = random_spans(len(ids), *counts, random)
        inputs, targets = replace_spans(ids, is_noise, self._sentinels)
        inputs = np.concatenate([[self._modes[choice]], inputs])
        return self.with_special(inputs), np.append(targets, self.special.first_eos)


def _counts(length: int, denoiser: Denoiser) -> tuple[int, int]:
    """The number of corrupted tokens and of spans."""
    return span_counts(length, denoiser.density, denoiser.mean_length or max(length, 1))
