"""Packed sets: tokenised and packed rows, opened for random access."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxformer.config import DataConfig, RunConfig, Source
from jaxformer.data.objectives import OBJECTIVES, Objective
from jaxformer.data.packing import Batch, Layout, Piece, expand, fill, pack
from jaxformer.data.sources import Documents, Example, open_source
from jaxformer.data.tokenizer import Tokenizer, special_ids
from jaxformer.errors import UserError

log = logging.getLogger(__name__)

CHUNK = 1024  # examples tokenised at once: enough to keep the tokenizer's threads busy


class Records(Protocol):
    """Where the records of a set are kept."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The records [indices, width]."""


class MemoryRecords(NamedTuple):
    matrix: np.ndarray

    def __len__(self) -> int:
        return len(self.matrix)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.matrix[indices]


@dataclass(frozen=True)
class PackedSet:
    """Rows of fixed length, by index."""

    records: Records
    layout: Layout
    num_tokens: int
    """Targets in all rows, padding not counted."""
    num_bytes: int
    """UTF-8 bytes of the text the targets spell, for bits per byte."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: column[0] for name, column in self.rows([index]).items()}

    def rows(self, indices: Sequence[int] | np.ndarray, size: int | None = None) -> Batch:
        """The rows of these indices, followed by empty ones up to `size`."""
        records = self.records.read(indices)
        if size is not None and size > len(records):
            records = np.pad(records, ((0, size - len(records)), (0, 0)))
        return expand(records, self.layout)


class Sets(NamedTuple):
    train: PackedSet
    heldout: PackedSet | None


def build_sets(cfg: RunConfig, tokenizer: Tokenizer) -> Sets:
    """Both sets of a run, in memory."""
    heldout = None if cfg.data.heldout is None else build_set(cfg, tokenizer, cfg.data.heldout)
    return Sets(build_set(cfg, tokenizer, cfg.data.train), heldout)


def build_set(cfg: RunConfig, tokenizer: Tokenizer, source: Source) -> PackedSet:
    """A source tokenised and packed, in memory."""
    documents = open_source(source)
    objective = OBJECTIVES[cfg.data.objective.kind]
    _check_fields(documents[0], cfg.data.objective.kind, objective, source)
    pieces: list[Piece] = []
    num_bytes = left_out = 0
    special = special_ids(cfg.model, tokenizer)
    for example, ids in _encoded(documents, objective.fields, tokenizer):
        made = objective.pieces(ids, cfg.data, special)
        pieces += made
        num_bytes += len(example[objective.predicted].encode()) if made else 0
        left_out += not made
    _report_left_out(left_out, len(documents), objective.layout(cfg.data))
    return _packed(pieces, cfg.data, objective.layout(cfg.data), num_bytes)


def _packed(pieces: list[Piece], cfg: DataConfig, layout: Layout, num_bytes: int) -> PackedSet:
    lengths = np.array([[len(side) for side in (piece.tokens, piece.inputs) if side is not None] for piece in pieces])
    rows = pack(lengths, layout.capacities) if cfg.pack else np.arange(len(pieces))
    matrix = fill(pieces, rows, layout)
    return PackedSet(MemoryRecords(matrix), layout, int(lengths[:, 0].sum()), num_bytes)


def _encoded(
    documents: Documents, fields: tuple[str, ...], tokenizer: Tokenizer
) -> Iterator[tuple[Example, dict[str, list[int]]]]:
    """Every example with the ids of its fields."""
    for start in range(0, len(documents), CHUNK):
        examples = [documents[i] for i in range(start, min(start + CHUNK, len(documents)))]
        encoders = {"inputs": tokenizer.encode_source}
        ids = {
            field: encoders.get(field, tokenizer.encode_batch)([example[field] for example in examples])
            for field in fields
        }
        for i, example in enumerate(examples):
            yield example, {field: ids[field][i] for field in fields}


def _check_fields(example: Example, kind: str, objective: Objective, source: Source) -> None:
    missing = [field for field in objective.fields if field not in example]
    if missing:
        raise UserError(
            f"data.objective.kind={kind} needs examples with {' and '.join(objective.fields)}, but the {source.kind} "
            f"source has {' and '.join(example)}: change the objective or the source"
        )


def _report_left_out(left_out: int, total: int, layout: Layout) -> None:
    if not left_out:
        return
    limits = f"data.length={layout.length} or data.objective.input_length={layout.input_length}"
    if left_out == total:
        raise UserError(f"all {total:,} pairs are longer than {limits} tokens: raise them")
    log.warning("%s of %s pairs are longer than %s tokens and are left out", f"{left_out:,}", f"{total:,}", limits)
