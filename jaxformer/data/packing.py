"""Packing: several pieces in one row of fixed length, kept apart by segment numbers.

A packed row is stored as one flat int32 record, its columns side by side as `Layout` says. An objective declares that
layout and turns stored rows into model batches, whose lengths and fields may be others. Padding is id 0 whatever the
tokenizer: segments, not ids, say what is real.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxformer.typing import Batch, Tokens

OPEN_ROWS = 128  # rows a piece may still go to: four times as many gain less than one percent

Piece = Mapping[str, np.ndarray]
"""The ids of every column of a layout: what one example, or a part of it, adds to a row."""
StoredRows = Mapping[str, np.ndarray]
"""Columns [rows, length] of stored rows, segment numbers among them."""
RowGenerator = Callable[[int], np.random.RandomState]
"""The random numbers of a row of the batch, by its index in this host's share."""


class Side(NamedTuple):
    """Columns of one length that share their segment numbers."""

    length: int
    columns: tuple[str, ...]
    segments: str = "segments"
    """Name of the column that holds the segment numbers."""


class Layout(NamedTuple):
    """The columns of a stored record."""

    sides: tuple[Side, ...]

    @property
    def capacities(self) -> tuple[int, ...]:
        """Positions of a row on each side."""
        return tuple(side.length for side in self.sides)

    @property
    def columns(self) -> dict[str, slice]:
        widths = {name: side.length for side in self.sides for name in (*side.columns, side.segments)}
        ends = np.cumsum(list(widths.values())).tolist()
        return {name: slice(end - widths[name], end) for name, end in zip(widths, ends, strict=True)}

    @property
    def width(self) -> int:
        return sum(side.length * (len(side.columns) + 1) for side in self.sides)


class Objective(Protocol):
    """What the input pipeline needs to know about a training objective; `objectives/` has the implementations."""

    kind: str
    fields: Mapping[str, str]
    """Source fields that an example must have, each with the tokenizer's method that encodes it."""
    predicted: str | None
    """The field whose text the targets spell, for bits per byte; None where they spell no field."""
    layout: Layout
    """Columns of a stored row."""

    def pieces(self, ids: Mapping[str, list[int]]) -> list[Piece]:
        """What an example adds to rows; no piece at all means that it does not fit and is left out."""

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        """The model's batch from stored rows, corrupted if the objective does that.

        A pure function: row i may depend on its own columns and on `generator(i)` alone.
        """


# ---------------------------------------------------------------- which row
def pack(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """The row of every piece, by best fit in the order given.

    Args:
      lengths: [pieces, sides], at least 1 and at most the side's capacity.
      capacities: positions of a row on each side; a piece needs enough of them on all sides.
    """
    assert lengths.size == 0 or (lengths.min() >= 1 and (lengths <= capacities).all())
    free = np.zeros((len(capacities), OPEN_ROWS), np.int64)
    row_in_slot = np.zeros(OPEN_ROWS, np.int64)
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    for i, length in enumerate(lengths.astype(np.int64)):
        # As unsigned numbers the negative ones, where the piece does not fit, are the largest; a quarter of each can
        # be summed over sides without overflow.
        waste = ((free - length[:, None]).view(np.uint64) >> 2).sum(axis=0)
        slot = waste.argmin()
        if waste[slot] > sum(capacities):
            # It fits nowhere: the row that is fullest on any side is closed, because it has the least to offer.
            slot = free.min(axis=0).argmin()
            free[:, slot], row_in_slot[slot] = capacities, num_rows
            num_rows += 1
        free[:, slot] -= length
        rows[i] = row_in_slot[slot]
    return rows


# ---------------------------------------------------------------- records
def fill_records(pieces: Sequence[Piece], rows: np.ndarray, layout: Layout) -> np.ndarray:
    """The records [rows, width] that hold each piece in its row, in order."""
    records = np.zeros((int(rows.max()) + 1, layout.width), np.int32)
    columns = layout.columns
    for side in layout.sides:
        lengths = np.array([len(piece[side.columns[0]]) for piece in pieces])
        positions, numbers = _positions_in_rows(lengths, rows)
        records[:, columns[side.segments]][positions] = numbers
        for name in side.columns:
            records[:, columns[name]][positions] = np.concatenate([piece[name] for piece in pieces])
    return records


def split_records(records: np.ndarray, layout: Layout) -> StoredRows:
    """The columns [rows, length] of records."""
    return {name: np.ascontiguousarray(records[:, column]) for name, column in layout.columns.items()}


def packed_tokens(ids: np.ndarray, segments: np.ndarray) -> Tokens:
    """Tokens of packed rows: positions restart with every segment."""
    return Tokens(ids, segment_positions(segments), segments)


def segment_positions(segments: np.ndarray) -> np.ndarray:
    """Position of every id in its segment; 0 on padding."""
    index = np.arange(segments.shape[1], dtype=np.int32)
    begins = np.zeros_like(segments)
    begins[:, 1:] = np.where(segments[:, 1:] != segments[:, :-1], index[1:], 0)
    # A running maximum carries the index at which the current segment began.
    return np.where(segments > 0, index - np.maximum.accumulate(begins, axis=1), 0)


def _positions_in_rows(lengths: np.ndarray, rows: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """(row, column) and segment number of every id, for pieces that follow one another in their rows."""
    order = np.argsort(rows, kind="stable")
    starts = np.empty_like(lengths)
    segments = np.empty_like(lengths)
    first = np.searchsorted(rows[order], rows[order])  # where the piece's row begins, in `order`
    before = np.cumsum(lengths[order]) - lengths[order]
    starts[order] = before - before[first]
    segments[order] = np.arange(len(order)) - first + 1
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (np.repeat(rows, lengths), np.repeat(starts, lengths) + within), np.repeat(segments, lengths)
