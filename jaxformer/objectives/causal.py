"""Causal language modelling: predict every next token of a document."""

from collections.abc import Mapping

import numpy as np

from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.objectives.base import Objective
from jaxformer.typing import Batch


class Causal(Objective):
    kind = "causal"
    fields = {"text": "encode_batch"}  # noqa: RUF012
    predicted = "text"

    @property
    def layout(self) -> Layout:
        return Layout((Side(self.config.length, ("tokens", "targets")),))

    def pieces(self, ids: Mapping[str, list[int]]) -> list[Piece]:
        """The document with BOS and EOS, cut into pieces of at most one row; every token but BOS is a target once."""
        stream = np.array([self.special.bos, *ids["text"], self.special.first_eos], np.int32)
        tokens, targets, length = stream[:-1], stream[1:], self.config.length
        cuts = range(0, len(tokens), length)
        return [{"tokens": tokens[cut : cut + length], "targets": targets[cut : cut + length]} for cut in cuts]

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        weights = (rows["segments"] > 0).astype(np.float32)
        return Batch(packed_tokens(rows["tokens"], rows["segments"]), rows["targets"], weights)
