"""Packing: several pieces of text share one row of fixed length, separated by segment ids.

A packed row is stored as one flat int32 record, which concatenates the columns of a `Layout`. An objective declares the
layout and turns stored rows into model batches, which may have different lengths and fields. Padding has token id 0 for
every tokenizer and is recognised by its segment id 0, not by its token id.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.typing import Batch, Tokens

OPEN_ROWS = 128  # rows that can still take a piece; 512 would improve packing by less than 1%

Piece = Mapping[str, np.ndarray]
"""The ids that one example, or a chunk of it, contributes to each column of a row."""
StoredRows = Mapping[str, np.ndarray]
"""The columns of stored rows, including segment ids, each of shape [rows, length]."""
RowGenerator = Callable[[int], np.random.RandomState]
"""Returns the random generator of a row, given its index within this host's batch."""


class Side(NamedTuple):
    """Columns of the same length that share segment ids: the decoder side or the encoder side of a row."""

    length: int
    columns: tuple[str, ...]
    segments: str = "segments"
    """Name of the column that holds the segment ids."""
    limit: str = "data.length"
    """The config key that sets the length, for messages about examples that do not fit."""


class Layout(NamedTuple):
    """The columns of a stored record."""

    sides: tuple[Side, ...]

    @property
    def capacities(self) -> tuple[int, ...]:
        """Length of a row on each side."""
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
    """The interface of training objectives to the input pipeline; `objectives/` implements it."""

    kind: str
    fields: Mapping[str, str]
    """The source fields that an example must have; the values are for `encode` only."""
    predicted: str | None
    """The source field that the targets encode, needed for bits per byte; None if they encode no field."""
    tokenizer: Tokenizer
    can_pack: bool
    """Whether several examples may share a row."""
    splits_texts: bool
    """Whether long texts become several pieces, so that only a text without enough tokens to train on gives none."""
    layout: Layout
    """Columns of a stored row."""
    capacities: Sequence[int]
    """Limits of what `sizes` of all pieces in a row may add up to; by default the lengths of the layout's sides."""

    model_settings: Mapping[str, Any]
    """The settings of the model that stored rows depend on, by their names in the config."""

    def encode(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tokenise examples; the keys of a result are those that `pieces` reads.

        The key `truncated` marks an example that was shortened to fit into a row.
        """

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        """Split an encoded example into pieces to be packed.

        An empty list means that it is too long and is dropped; if the objective splits texts, that it has too few.
        """

    def sizes(self, piece: Piece) -> tuple[int, ...]:
        """How much of each of the `capacities` of a row a piece takes."""

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        """Make the model's batch from stored rows, corrupted if the objective corrupts its inputs.

        This is a pure function: row i may depend only on its own columns and on `generator(i)`.
        """


# ---------------------------------------------------------------- assignment to rows
def pack(lengths: np.ndarray, capacities: Sequence[int]) -> np.ndarray:
    """Assign a row to every piece by online best-fit bin packing.

    Args:
      lengths: the length of every piece on every side, [pieces, sides], between 1 and the side's capacity.
      capacities: the length of a row on each side; a piece must fit on all sides.
    """
    assert lengths.size == 0 or (lengths.min() >= 1 and (lengths <= capacities).all())
    free = np.zeros((len(capacities), OPEN_ROWS), np.int64)
    row_in_slot = np.zeros(OPEN_ROWS, np.int64)
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    for i, length in enumerate(lengths.astype(np.int64)):
        # Space that is left after adding the piece. Where the piece does not fit it is negative, which is huge as an
        # unsigned integer; dividing by 4 avoids overflow in the sum over sides.
        waste = ((free - length[:, None]).view(np.uint64) >> 2).sum(axis=0)
        slot = waste.argmin()
        if waste[slot] > sum(capacities):
            # The piece fits in no open row: close the row with the least space on any side, and open a new one.
            slot = free.min(axis=0).argmin()
            free[:, slot], row_in_slot[slot] = capacities, num_rows
            num_rows += 1
        free[:, slot] -= length
        rows[i] = row_in_slot[slot]
    return rows


# ---------------------------------------------------------------- records
def fill_records(pieces: Sequence[Piece], rows: np.ndarray, layout: Layout) -> np.ndarray:
    """Write the pieces into records of shape [rows, width]; pieces of one row keep their order."""
    records = np.zeros((int(rows.max()) + 1, layout.width), np.int32)
    columns = layout.columns
    for side in layout.sides:
        lengths = np.array([len(piece[side.columns[0]]) for piece in pieces])
        positions, segments = _positions_in_rows(lengths, rows)
        # Slicing returns views, so these assignments write into `records`.
        records[:, columns[side.segments]][positions] = segments
        for name in side.columns:
            records[:, columns[name]][positions] = np.concatenate([piece[name] for piece in pieces])
    return records


def split_records(records: np.ndarray, layout: Layout) -> StoredRows:
    """Split records into columns of shape [rows, length]."""
    return {name: np.ascontiguousarray(records[:, column]) for name, column in layout.columns.items()}


def packed_tokens(ids: np.ndarray, segments: np.ndarray) -> Tokens:
    """Make the tokens of packed rows, with positions that restart at every segment."""
    return Tokens(ids, segment_positions(segments), segments)


def segment_positions(segments: np.ndarray) -> np.ndarray:
    """Return the position of every token within its segment; 0 for padding."""
    index = np.arange(segments.shape[1], dtype=np.int32)
    begins = np.zeros_like(segments)
    begins[:, 1:] = np.where(segments[:, 1:] != segments[:, :-1], index[1:], 0)
    # The running maximum is the index at which the current segment begins.
    return np.where(segments > 0, index - np.maximum.accumulate(begins, axis=1), 0)


def _positions_in_rows(lengths: np.ndarray, rows: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return the (row, column) and the segment id of every token when pieces are placed one after another."""
    order = np.argsort(rows, kind="stable")
    starts = np.empty_like(lengths)
    segments = np.empty_like(lengths)
    first = np.searchsorted(rows[order], rows[order])  # index in `order` of the first piece of the same row
    before = np.cumsum(lengths[order]) - lengths[order]
    starts[order] = before - before[first]
    segments[order] = np.arange(len(order)) - first + 1
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (np.repeat(rows, lengths), np.repeat(starts, lengths) + within), np.repeat(segments, lengths)
