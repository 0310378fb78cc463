"""Sequence to sequence: predict the targets from the inputs, with teacher forcing."""

from collections.abc import Mapping

import numpy as np

from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.objectives.base import Objective
from jaxformer.typing import Batch


class Seq2Seq(Objective):
    kind = "seq2seq"
    fields = {"inputs": "encode_source", "targets": "encode_batch"}  # noqa: RUF012
    predicted = "targets"

    @property
    def layout(self) -> Layout:
        target = Side(self.config.length, ("tokens", "targets"))
        return Layout((target, Side(self.config.objective.input_length, ("inputs",), "input_segments")))

    def pieces(self, ids: Mapping[str, list[int]]) -> list[Piece]:
        """One piece per pair; none if a side is too long, because a truncated pair would teach a wrong translation."""
        inputs = np.array(ids["inputs"], np.int32)
        stream = np.array([self.special.start, *ids["targets"], self.special.first_eos], np.int32)
        if len(inputs) > self.config.objective.input_length or len(stream) - 1 > self.config.length:
            return []
        return [{"tokens": stream[:-1], "targets": stream[1:], "inputs": inputs}]

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        return Batch(
            packed_tokens(rows["tokens"], rows["segments"]),
            rows["targets"],
            (rows["segments"] > 0).astype(np.float32),
            packed_tokens(rows["inputs"], rows["input_segments"]),
        )
