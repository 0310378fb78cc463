"""Sequence to sequence: predict the targets from the inputs, with teacher forcing."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.objectives.base import Objective
from jaxformer.typing import Batch

INPUT_LENGTH = "data.objective.input_length"


class Seq2Seq(Objective):
    kind = "seq2seq"
    fields = {"inputs": "encode_source", "targets": "encode_batch"}  # noqa: RUF012
    predicted = "targets"
    has_pairs = True

    @property
    def layout(self) -> Layout:
        target = Side(self.config.length, ("tokens", "targets"))
        return Layout((target, Side(self.config.objective.input_length, ("inputs",), "input_segments", INPUT_LENGTH)))

    def encode(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        encoded = super().encode(examples)
        return [self._truncate(ids) for ids in encoded] if self.config.too_long == "truncate" else encoded

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
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

    def _truncate(self, ids: dict[str, Any]) -> dict[str, Any]:
        """Shorten both sides to their rows; the inputs keep the special token that ends them."""
        inputs, targets = ids["inputs"], ids["targets"]
        input_length, target_length = self.config.objective.input_length, self.config.length - 1
        if len(inputs) <= input_length and len(targets) <= target_length:
            return ids
        if len(inputs) > input_length:
            inputs = [*inputs[: input_length - 1], inputs[-1]]
        return {"inputs": inputs, "targets": targets[:target_length], "truncated": True}
