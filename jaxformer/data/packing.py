"""Packing: several pieces in one row of fixed length, kept apart by segment numbers.

A row is stored as one flat int32 record, its columns side by side as `Layout` says; `expand` turns records
into the arrays of a batch. Padding is id 0 whatever the tokenizer: segments and weights, not ids, say what
is real.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]

OPEN_ROWS = 128  # rows a piece may still go to: four times as many gain less than one percent


class Piece(NamedTuple):
    """What the model reads and answers; `inputs`, if any, is the encoder's side."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: np.ndarray | None = None


class Layout(NamedTuple):
    """The columns of a record."""

    length: int
    input_length: int = 0
    """0 if there is no encoder."""

    @property
    def capacities(self) -> tuple[int, ...]:
        return (self.length, self.input_length) if self.input_length else (self.length,)

    @property
    def columns(self) -> dict[str, slice]:
        widths = {"tokens": self.length, "targets": self.length, "segments": self.length}
        if self.input_length:
            widths |= {"inputs": self.input_length, "input_segments": self.input_length}
        ends = np.cumsum(list(widths.values())).tolist()
        return {name: slice(end - widths[name], end) for name, end in zip(widths, ends, strict=True)}

    @property
    def width(self) -> int:
        return 3 * self.length + 2 * self.input_length


# ---------------------------------------------------------------- which row
def pack(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """The row of every piece, by best fit in the order given.

    Args:
      lengths: [pieces, sides], at least 1 and at most the side's capacity.
      capacities: room of a row on each side; a piece needs room on all of them.
    """
    assert lengths.size == 0 or (lengths.min() >= 1 and (lengths <= capacities).all())
    free = np.zeros((len(capacities), OPEN_ROWS), np.int64)
    row_in_slot = np.zeros(OPEN_ROWS, np.int64)
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    for i, length in enumerate(lengths.astype(np.int64)):
        # As unsigned numbers the negative ones, where there is no room, are the largest; a quarter of each can
        # be summed over sides without overflow.
        waste = ((free - length[:, None]).view(np.uint64) >> 2).sum(axis=0)
        slot = waste.argmin()
        if waste[slot] > sum(capacities):
            slot = free.min(axis=0).argmin()  # the row that is fullest on any side makes place for a new one
            free[:, slot], row_in_slot[slot] = capacities, num_rows
            num_rows += 1
        free[:, slot] -= length
        rows[i] = row_in_slot[slot]
    return rows


# ---------------------------------------------------------------- records
def fill(pieces: Sequence[Piece], rows: np.ndarray, layout: Layout) -> np.ndarray:
    """The records [rows, width] that hold each piece in its row, in order."""
    num_rows = int(rows.max()) + 1
    columns = layout.columns
    records = np.zeros((num_rows, layout.width), np.int32)
    sides = [("segments", ("tokens", "targets"))]
    if layout.input_length:
        sides.append(("input_segments", ("inputs",)))
    for segments, names in sides:
        lengths = np.array([len(getattr(piece, names[0])) for piece in pieces])
        places, numbers = _places(lengths, rows)
        records[:, columns[segments]][places] = numbers
        for name in names:
            records[:, columns[name]][places] = np.concatenate([getattr(piece, name) for piece in pieces])
    return records


def expand(records: np.ndarray, layout: Layout) -> Batch:
    """The arrays of a batch [rows, length] from its records."""
    batch = {name: np.ascontiguousarray(records[:, column]) for name, column in layout.columns.items()}
    batch["positions"] = _positions(batch["segments"])
    batch["weights"] = (batch["segments"] > 0).astype(np.float32)
    if layout.input_length:
        batch["input_positions"] = _positions(batch["input_segments"])
    return batch


def _places(lengths: np.ndarray, rows: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
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


def _positions(segments: np.ndarray) -> np.ndarray:
    """Place of every id in its piece; 0 on padding."""
    place = np.arange(segments.shape[1], dtype=np.int32)
    begins = np.zeros_like(segments)
    begins[:, 1:] = np.where(segments[:, 1:] != segments[:, :-1], place[1:], 0)
    return np.where(segments > 0, place - np.maximum.accumulate(begins, axis=1), 0)
