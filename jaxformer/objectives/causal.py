"""Causal language modelling: predict every next token of a document."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.config import SpecialIds
from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.objectives.base import Objective, split_text
from jaxformer.typing import Batch


class Causal(Objective):
    kind = "causal"
    fields = {"text": "encode_batch"}  # noqa: RUF012
    predicted = "text"

    @property
    def layout(self) -> Layout:
        return Layout((Side(self.config.length, ("tokens", "targets")),))

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        return causal_pieces(ids["text"], self.special, self.config.length)

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        weights = (rows["segments"] > 0).astype(np.float32)
        return Batch(packed_tokens(rows["tokens"], rows["segments"]), rows["targets"], weights)


def causal_pieces(ids: Sequence[int], special: SpecialIds, length: int) -> list[Piece]:
    """The document with BOS and EOS, cut into pieces of at most one row; every token but BOS is a target once."""
    stream = [special.bos, *ids, special.first_eos]
    tokens, targets = (split_text(part, length) for part in (stream[:-1], stream[1:]))
    return [{"tokens": piece, "targets": shifted} for piece, shifted in zip(tokens, targets, strict=True)]
