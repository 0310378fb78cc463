"""The base class of denoising objectives: an encoder-decoder reads a corrupted text and predicts what is missing.

A stored row holds texts; every step corrupts them again. Corrupted texts have other lengths than stored ones, but
bounded ones, so packing makes sure that the texts of a row fit on both sides whatever is drawn.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from jaxformer.config import RunConfig
from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.objectives.base import Objective, split_text
from jaxformer.typing import Batch


class Denoising(Objective):
    fields = {"text": "encode_batch"}  # noqa: RUF012
    splits_texts = True

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        # The special tokens that the tokenizer puts around the input of an encoder: eos, and bos in BART.
        *self._before, self._after = tokenizer.encode_source([""])[0]
        self._stored_length = self._longest_text()

    @abstractmethod
    def lengths(self, length: int) -> tuple[int, int]:
        """The largest lengths of inputs and targets that a text of `length` tokens can give, with special tokens."""

    @abstractmethod
    def corrupt(self, ids: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and targets of a text, with special tokens."""

    # ------------------------------------------------------------ packing
    @property
    def layout(self) -> Layout:
        return Layout((Side(self._stored_length, ("text",)),))

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        return [{"text": text} for text in split_text(ids["text"], self._stored_length)]

    def sizes(self, piece: Piece) -> tuple[int, ...]:
        length = len(piece["text"])
        return (length, *self.lengths(length))

    @property
    def capacities(self) -> tuple[int, ...]:
        return (self._stored_length, self.config.objective.input_length, self.config.length)

    def _longest_text(self) -> int:
        """The number of tokens of the longest text that fits into a row on both sides."""
        limits, length = (self.config.objective.input_length, self.config.length), 0
        # All shorter texts must fit too: because of rounding, lengths do not always grow with the text.
        while all(needed <= limit for needed, limit in zip(self.lengths(length + 1), limits, strict=True)):
            length += 1
        if not length:
            raise UserError(
                f"data.objective.input_length={limits[0]} and data.length={limits[1]} are too short for a text of one "
                "token: raise them"
            )
        return length

    # ------------------------------------------------------------ batches
    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        num_rows, cfg = len(rows["text"]), self.config
        source, source_segments = (np.zeros((num_rows, cfg.objective.input_length), np.int32) for _ in range(2))
        tokens, targets, segments = (np.zeros((num_rows, cfg.length), np.int32) for _ in range(3))
        for i in range(num_rows):
            random, source_end, target_end = generator(i), 0, 0
            for segment, ids in enumerate(_texts(rows["text"][i], rows["segments"][i]), start=1):
                inputs, outputs = self.corrupt(ids, random)
                where = slice(source_end, source_end := source_end + len(inputs))
                source[i, where], source_segments[i, where] = inputs, segment
                where = slice(target_end, target_end := target_end + len(outputs))
                targets[i, where], segments[i, where] = outputs, segment
                tokens[i, where.start], tokens[i, where.start + 1 : where.stop] = self.special.start, outputs[:-1]
        return Batch(
            packed_tokens(tokens, segments),
            targets,
            (segments > 0).astype(np.float32),
            packed_tokens(source, source_segments),
        )

    def with_special(self, ids: np.ndarray) -> np.ndarray:
        """Put the tokenizer's special tokens around the ids."""
        return np.concatenate([self._before, ids, [self._after]]).astype(np.int32)

    @property
    def num_special(self) -> int:
        return len(self._before) + 1


def _texts(ids: np.ndarray, segments: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the texts of a packed row."""
    end = int((segments > 0).sum())
    bounds = [0, *(np.flatnonzero(np.diff(segments[:end])) + 1), end]
    if end:
        yield from (ids[start:stop] for start, stop in pairwise(bounds))
