"""Prefix language modelling: predict the tokens after a prefix that is read in both directions (arXiv:1910.10683)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.config import RunConfig
from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.objectives.base import Objective
from jaxformer.objectives.causal import causal_pieces
from jaxformer.typing import Batch


class Prefix(Objective):
    kind = "prefix"
    fields = {"text": "encode_batch"}  # noqa: RUF012

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._has_pairs = self.config.objective.fields == "pairs"
        if self._has_pairs:
            # Inputs are encoded as prompts, so that generation reads what training read.
            self.fields = {"inputs": "encode_prompt", "targets": "encode_batch"}

    @property
    def layout(self) -> Layout:
        return Layout((Side(self.config.length, ("tokens", "targets", *(["prefix"] if self._has_pairs else []))),))

    def encode(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        encoded = super().encode(examples)
        return [self._truncate(ids) for ids in encoded] if self.config.too_long == "truncate" else encoded

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        if not self._has_pairs:
            return causal_pieces(ids["text"], self.special, self.config.length)
        inputs = ids["inputs"] or [self.special.bos]
        stream = np.array([*inputs, *ids["targets"], self.special.first_eos], np.int32)
        if len(stream) - 1 > self.config.length:
            return []
        is_prefix = (np.arange(len(stream) - 1) < len(inputs)).astype(np.int32)
        return [{"tokens": stream[:-1], "targets": stream[1:], "prefix": is_prefix}]

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        tokens = packed_tokens(rows["tokens"], rows["segments"])
        is_real = rows["segments"] > 0
        if self._has_pairs:
            is_prefix = rows["prefix"] > 0
        else:
            sizes = self._prefix_sizes(rows["segments"], generator)
            is_prefix = is_real & (tokens.positions < np.take_along_axis(sizes, rows["segments"], axis=1))
        # The last token of a prefix predicts the first token after it; the tokens before it predict nothing.
        follows = np.zeros_like(is_prefix)
        follows[:, :-1] = is_prefix[:, 1:] & (rows["segments"][:, 1:] == rows["segments"][:, :-1])
        weights = (is_real & ~follows).astype(np.float32)
        return Batch(tokens._replace(prefix=is_prefix), rows["targets"], weights)

    def _prefix_sizes(self, segments: np.ndarray, generator: RowGenerator) -> np.ndarray:
        """The number of prefix tokens of every segment, [rows, segments + 1]; index 0 is padding."""
        cfg = self.config.objective
        sizes = np.zeros((len(segments), int(segments.max(initial=0)) + 1), np.int64)
        for i, row in enumerate(segments):
            lengths = np.bincount(row)[1:]
            low = np.clip(np.ceil(cfg.min_fraction * lengths), 1, None).astype(np.int64)
            high = np.maximum(np.floor(cfg.max_fraction * lengths).astype(np.int64), low)
            drawn = low + np.floor(generator(i).random_sample(len(lengths)) * (high - low + 1)).astype(np.int64)
            sizes[i, 1 : len(lengths) + 1] = drawn
        return sizes

    def _truncate(self, ids: dict[str, Any]) -> dict[str, Any]:
        """Shorten a pair to one row: first the targets, then the inputs, so that one target token is left."""
        if not self._has_pairs or len(ids["inputs"]) + len(ids["targets"]) <= self.config.length:
            return ids
        inputs = ids["inputs"][: self.config.length - 1]
        return {"inputs": inputs, "targets": ids["targets"][: self.config.length - len(inputs)], "truncated": True}
