"""Packed sets: tokenised and packed rows, opened for random access."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from jaxformer.config import DataConfig, Source
from jaxformer.data.packing import Layout, Objective, Piece, StoredRows, fill_records, pack, split_records
from jaxformer.data.sources import Documents, Example, open_source
from jaxformer.data.tokenizer import Tokenizer
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
    """Real positions of the first side in all rows; padding is not counted."""
    num_bytes: int
    """UTF-8 bytes of the text the targets spell, for bits per byte; 0 where they spell none."""

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, indices: Sequence[int] | np.ndarray, size: int | None = None) -> StoredRows:
        """The rows of these indices, followed by empty ones up to `size`."""
        records = self.records.read(indices)
        if size is not None and size > len(records):
            records = np.pad(records, ((0, size - len(records)), (0, 0)))
        return split_records(records, self.layout)


class Sets(NamedTuple):
    train: PackedSet
    heldout: PackedSet | None


def build_sets(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer) -> Sets:
    """Both sets of a run, in memory."""
    heldout = None if cfg.heldout is None else build_set(cfg, objective, tokenizer, cfg.heldout)
    return Sets(build_set(cfg, objective, tokenizer, cfg.train), heldout)


def build_set(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, source: Source) -> PackedSet:
    """A source tokenised and packed, in memory."""
    documents = open_source(source)
    _check_fields(documents[0], objective, source)
    pieces: list[Piece] = []
    num_bytes = left_out = 0
    for example, ids in _encode(documents, objective, tokenizer):
        made = objective.pieces(ids)
        pieces += made
        num_bytes += len(example[objective.predicted].encode()) if made and objective.predicted else 0
        left_out += not made
    _report_left_out(left_out, len(documents), objective.layout)
    return _pack(pieces, cfg.pack, objective.layout, num_bytes)


def _pack(pieces: list[Piece], together: bool, layout: Layout, num_bytes: int) -> PackedSet:
    lengths = np.array([[len(piece[side.columns[0]]) for side in layout.sides] for piece in pieces])
    rows = pack(lengths, layout.capacities) if together else np.arange(len(pieces))
    matrix = fill_records(pieces, rows, layout)
    return PackedSet(MemoryRecords(matrix), layout, int(lengths[:, 0].sum()), num_bytes)


def _encode(
    documents: Documents, objective: Objective, tokenizer: Tokenizer
) -> Iterator[tuple[Example, dict[str, list[int]]]]:
    """Every example with the ids of its fields."""
    for start in range(0, len(documents), CHUNK):
        examples = [documents[i] for i in range(start, min(start + CHUNK, len(documents)))]
        ids = {
            field: getattr(tokenizer, method)([example[field] for example in examples])
            for field, method in objective.fields.items()
        }
        for i, example in enumerate(examples):
            yield example, {field: ids[field][i] for field in objective.fields}


def _check_fields(example: Example, objective: Objective, source: Source) -> None:
    if any(field not in example for field in objective.fields):
        raise UserError(
            f"data.objective.kind={objective.kind} needs examples with {' and '.join(objective.fields)}, but the "
            f"{source.kind} source has {' and '.join(example)}: change the objective or the source"
        )


def _report_left_out(left_out: int, total: int, layout: Layout) -> None:
    if not left_out:
        return
    names = ("data.length", "data.objective.input_length")
    limits = " or ".join(f"{name}={size}" for name, size in zip(names, layout.capacities, strict=False))
    if left_out == total:
        raise UserError(f"all {total:,} examples are longer than {limits} tokens: raise them")
    log.warning("%s of %s examples are longer than %s tokens and are left out", f"{left_out:,}", f"{total:,}", limits)
