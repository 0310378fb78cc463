"""Packed sets: tokenised and packed rows with random access."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxformer.config import DataConfig, HeldoutSplit
from jaxformer.data.packing import Layout, Objective, Piece, StoredRows, fill_records, pack, split_records
from jaxformer.data.sources import Documents, Example, SplitName, has_text, open_split, place_of
from jaxformer.errors import UserError

log = logging.getLogger(__name__)

SHOWN = 5  # examples that a message names
CHUNK = 1024  # examples per tokenizer call: enough to keep its threads busy


class Records(Protocol):
    """Random access to the records of a set, in memory or on disk."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the records at these indices, of shape [indices, width]."""


class MemoryRecords(NamedTuple):
    matrix: np.ndarray

    def __len__(self) -> int:
        return len(self.matrix)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.matrix[indices]


@dataclass(frozen=True)
class PackedSet:
    """Packed rows of fixed length, addressed by index."""

    records: Records
    layout: Layout
    num_tokens: int
    """Number of tokens on the first side of all rows, without padding."""
    num_bytes: int
    """UTF-8 bytes of the text that the targets encode, needed for bits per byte; 0 if they encode no text."""

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, indices: Sequence[int] | np.ndarray, size: int | None = None) -> StoredRows:
        """Return the rows at these indices, padded with empty rows to `size`."""
        records = self.records.read(indices)
        if size is not None and size > len(records):
            records = np.pad(records, ((0, size - len(records)), (0, 0)))
        return split_records(records, self.layout)


class Sets(NamedTuple):
    train: PackedSet
    heldout: PackedSet | None


def build_sets(cfg: DataConfig, objective: Objective) -> Sets:
    """Build the training and held-out sets of a run in memory."""
    check_pairs(cfg)
    heldout = None if cfg.heldout is None else build_set(cfg, objective, "heldout")
    return Sets(build_set(cfg, objective, "train"), heldout)


def check_pairs(cfg: DataConfig) -> None:
    """Raise if a classifier trains on pairs of texts and is evaluated on single texts, or the other way round."""
    if cfg.objective.kind != "classify" or cfg.heldout is None or isinstance(cfg.heldout, HeldoutSplit):
        return
    train, heldout = ("text_pair" in open_split(cfg, split)[0] for split in ("train", "heldout"))
    if train != heldout:
        having, missing = ("train", "heldout") if train else ("heldout", "train")
        raise UserError(
            f"data.{having} has pairs of texts, but data.{missing} has no text_pair: name the field or column of the "
            "second text with text_pair= of both sources, or of neither"
        )


def build_set(cfg: DataConfig, objective: Objective, split: SplitName) -> PackedSet:
    """Tokenise and pack the training or the held-out examples in memory."""
    documents = open_split(cfg, split)
    _check_fields(documents[0], objective, split)
    pieces: list[Piece] = []
    empty: list[int] = []
    num_bytes = num_dropped = num_truncated = 0
    for index, (example, ids) in enumerate(_encode(documents, objective, split)):
        new_pieces = objective.pieces(ids)
        if not has_text(example) or (not new_pieces and objective.splits_texts):
            empty.append(index)
            continue
        is_truncated = bool(ids.get("truncated"))
        if cfg.too_long == "truncate" and len(new_pieces) > 1:
            new_pieces, is_truncated = new_pieces[:1], True
        if new_pieces and objective.predicted:
            text = example[objective.predicted]
            if is_truncated:
                text = objective.tokenizer.decode(new_pieces[0]["targets"])
            num_bytes += len(text.encode())
        pieces += new_pieces
        num_dropped += not new_pieces
        num_truncated += is_truncated and bool(new_pieces)
    _report_empty(empty, documents, split)
    _report_long(num_dropped, num_truncated, len(documents) - len(empty), objective.layout, split)
    return _pack(pieces, cfg.pack and objective.can_pack, objective, num_bytes)


def _pack(pieces: list[Piece], share_rows: bool, objective: Objective, num_bytes: int) -> PackedSet:
    layout, sizes = objective.layout, np.array([objective.sizes(piece) for piece in pieces])
    rows = pack(sizes, objective.capacities) if share_rows else np.arange(len(pieces))
    matrix = fill_records(pieces, rows, layout)
    num_tokens = sum(len(piece[layout.sides[0].columns[0]]) for piece in pieces)
    return PackedSet(MemoryRecords(matrix), layout, num_tokens, num_bytes)


def _encode(documents: Documents, objective: Objective, split: SplitName) -> Iterator[tuple[Example, dict[str, Any]]]:
    """Yield every example with the token ids of its fields."""
    for start in range(0, len(documents), CHUNK):
        examples = [documents[i] for i in range(start, min(start + CHUNK, len(documents)))]
        try:
            encoded = objective.encode(examples)
        except UserError:
            _name_invalid_example(documents, examples, start, objective, split)
            raise
        yield from zip(examples, encoded, strict=True)


def _name_invalid_example(
    documents: Documents, examples: list[Example], start: int, objective: Objective, split: SplitName
) -> None:
    """Raise the error of the first example that cannot be encoded, for example because of its label."""
    for offset, example in enumerate(examples):
        try:
            objective.encode([example])
        except UserError as error:
            raise UserError(f"data.{split}, {place_of(documents, start + offset)}: {error}") from None


def _check_fields(example: Example, objective: Objective, split: SplitName) -> None:
    if any(field not in example for field in objective.fields):
        raise UserError(
            f"data.objective.kind={objective.kind} needs examples with {' and '.join(objective.fields)}, but "
            f"data.{split} has {' and '.join(example)}: change the objective or the source"
        )


def _report_empty(empty: Sequence[int], documents: Documents, split: SplitName) -> None:
    """Warn about examples without tokens to train on; raise if there are no others."""
    if not empty:
        return
    places = ", ".join(place_of(documents, index) for index in empty[:SHOWN]) + ", ..." * (len(empty) > SHOWN)
    if len(empty) == len(documents):
        raise UserError(
            f"data.{split}: no example has enough text that the tokenizer knows ({places}): check the texts and the "
            "tokenizer"
        )
    log.warning(
        "data.%s: %s of %s examples have too little text that the tokenizer knows and are skipped (%s)",
        split,
        f"{len(empty):,}",
        f"{len(documents):,}",
        places,
    )


def _report_long(num_dropped: int, num_truncated: int, total: int, layout: Layout, split: SplitName) -> None:
    limits = " or ".join(dict.fromkeys(f"{side.limit}={side.length}" for side in layout.sides if side.limit))
    if num_dropped == total:
        raise UserError(
            f"data.{split}: no example fits into a row: all {total:,} are longer than {limits} tokens: raise these "
            "limits or set data.too_long=truncate"
        )
    for count, fate in (
        (num_dropped, "dropped; data.too_long=truncate keeps the beginning of each"),
        (num_truncated, "truncated"),
    ):
        if count:
            log.warning(
                "data.%s: %s of %s examples are longer than %s tokens and are %s",
                split,
                f"{count:,}",
                f"{total:,}",
                limits,
                fate,
            )
