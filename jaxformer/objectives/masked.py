"""Masked language modelling: predict tokens of a text that were masked (arXiv:1810.04805, section 3.1)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.config import MASK_TOKEN, RunConfig
from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.objectives.base import Objective, require_token, split_text
from jaxformer.typing import Batch


class Masked(Objective):
    """Every piece of a text has bos and eos around it, BERT's [CLS] and [SEP], which are never masked."""

    kind = "masked"
    fields = {"text": "encode_batch"}  # noqa: RUF012
    splits_texts = True

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        if self.config.length < 3:
            raise UserError(f"data.length={self.config.length}: masked needs bos, a token and eos, set 3 or more")
        self._mask_id = require_token(tokenizer, MASK_TOKEN, self.kind)
        self._special = np.array([self.special.bos, self.special.first_eos, tokenizer.pad_id, self._mask_id])
        self._random_ids = np.setdiff1d(np.arange(tokenizer.vocab_size), self._special)
        self._begins_word = tokenizer.word_starts

    @property
    def layout(self) -> Layout:
        return Layout((Side(self.config.length, ("tokens",)),))

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        bos, eos = self.special.bos, self.special.first_eos
        texts = split_text(ids["text"], self.config.length - 2)
        return [{"tokens": np.array([bos, *text, eos], np.int32)} for text in texts]

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        ids, segments = rows["tokens"].copy(), rows["segments"]
        shape = (len(ids), self.config.objective.num_predictions(self.config.length))
        predicted, targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for i in range(len(ids)):
            random = generator(i)
            positions = self._choose(ids[i], segments[i], random)
            num = len(positions)
            predicted[i, :num], targets[i, :num], weights[i, :num] = positions, ids[i, positions], 1.0
            ids[i, positions] = self._replace(ids[i, positions], random)
        return Batch(packed_tokens(ids, segments), targets, weights, predicted=predicted)

    def _choose(self, ids: np.ndarray, segments: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """The positions to predict, in order."""
        cfg = self.config.objective
        candidates = np.flatnonzero((segments > 0) & ~np.isin(ids, self._special))
        num = cfg.num_predictions(len(candidates))
        if not cfg.whole_words:
            return np.sort(candidates[random.permutation(len(candidates))[:num]])
        return candidates[self._choose_words(ids[candidates], candidates, num, random)]

    def _choose_words(
        self, ids: np.ndarray, positions: np.ndarray, num: int, random: np.random.RandomState
    ) -> np.ndarray:
        """Select whole words with at most `num` tokens in total; a boolean for each of the ids.

        If every word has more tokens than that, the first tokens of one word are selected: a row without any token to
        predict would teach nothing, and a set of such rows has no loss.
        """
        if not len(ids):
            return np.zeros(0, bool)
        # Special tokens separate the texts of a row: after a gap, a word begins even without a space.
        begins = self._begins_word[ids] | (np.diff(positions, prepend=-2) > 1)
        word_of = np.cumsum(begins) - 1
        sizes = np.bincount(word_of)
        order = random.permutation(len(sizes))
        if sizes.min() > num:
            return (word_of == order[0]) & (np.cumsum(word_of == order[0]) <= num)
        # Words longer than the whole budget would end the selection early.
        order = order[sizes[order] <= num]
        chosen = order[np.cumsum(sizes[order]) <= num]
        return np.isin(word_of, chosen)

    def _replace(self, ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Replace most ids by the mask token, some by random tokens, and keep the others."""
        cfg = self.config.objective
        action = random.random_sample(len(ids))
        other = self._random_ids[random.randint(0, len(self._random_ids), len(ids))]
        is_random = action < cfg.mask_share + cfg.random_share
        return np.where(action < cfg.mask_share, self._mask_id, np.where(is_random, other, ids))
