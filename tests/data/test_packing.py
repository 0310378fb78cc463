"""Objectives and packing: every token once, nothing overlapping, rows that say what is where."""

import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.config import DataConfig, MemorySource, Seq2Seq
from jaxformer.data import Bytes
from jaxformer.data.objectives import causal_pieces, seq2seq_pieces
from jaxformer.data.packing import Layout, Piece, expand, fill, pack
from jaxformer.data.tokenizer import SpecialTokens

CAPACITIES = (12, 7)
PAIRS = st.lists(st.tuples(st.integers(1, CAPACITIES[0]), st.integers(1, CAPACITIES[1])), min_size=1, max_size=60)


def pieces_of(lengths: np.ndarray) -> list[Piece]:
    """Pieces in which every id differs from all others, so that losses and copies show."""
    fresh = iter(range(1, 10**6))

    def take(n: int) -> np.ndarray:
        return np.array([next(fresh) for _ in range(n)], np.int32)

    return [Piece(take(t), take(t), take(s)) for t, s in lengths]


# ---------------------------------------------------------------- packing
@given(PAIRS)
def test_capacities_hold_and_rows_are_numbered_from_zero(lengths):
    lengths = np.array(lengths)
    rows = pack(lengths, CAPACITIES)
    used = np.zeros((rows.max() + 1, 2), int)
    np.add.at(used, rows, lengths)
    assert (used <= CAPACITIES).all()
    assert (used > 0).all()
    assert (pack(lengths, CAPACITIES) == rows).all()


@given(PAIRS)
def test_rows_hold_every_piece_once_side_by_side(lengths):
    lengths = np.array(lengths)
    pieces, rows = pieces_of(lengths), pack(lengths, CAPACITIES)
    layout = Layout(*CAPACITIES)
    batch = expand(fill(pieces, rows, layout), layout)
    for row in range(rows.max() + 1):
        inside = [piece for piece, at in zip(pieces, rows, strict=True) if at == row]
        _check_side({name: batch[name][row] for name in ("tokens", "positions", "segments")}, inside, "tokens")
        _check_side({"targets": batch["targets"][row], "segments": batch["segments"][row]}, inside, "targets")
        _check_side(
            {name: batch[name][row] for name in ("inputs", "input_positions", "input_segments")}, inside, "inputs"
        )
    assert (batch["weights"] == (batch["segments"] > 0)).all()


def _check_side(row: dict[str, np.ndarray], pieces: list[Piece], name: str) -> None:
    """The row is its pieces one after the other, then zeros."""
    columns = [getattr(piece, name) for piece in pieces]
    expected = {
        name: np.concatenate(columns),
        "positions": np.concatenate([np.arange(len(column)) for column in columns]),
        "segments": np.concatenate([np.full(len(column), i + 1) for i, column in enumerate(columns)]),
    }
    for key, values in row.items():
        real = expected[key.removeprefix("input_")]
        np.testing.assert_array_equal(values, np.pad(real, (0, len(values) - len(real))), key)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_one_sided_packing_loses_nothing(lengths):
    pieces = [Piece(piece.tokens, piece.targets) for piece in pieces_of(np.array([(n, 1) for n in lengths]))]
    rows = pack(np.array(lengths)[:, None], (9,))
    batch = expand(fill(pieces, rows, Layout(9)), Layout(9))
    assert sorted(batch["tokens"][batch["segments"] > 0]) == sorted(np.concatenate([p.tokens for p in pieces]))
    assert set(batch) == {"tokens", "positions", "segments", "targets", "weights"}


def test_dtypes_and_shapes():
    layout = Layout(4, 3)
    batch = expand(fill(pieces_of(np.array([(2, 3)])), np.array([0]), layout), layout)
    assert batch.pop("weights").dtype == np.float32
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: ((1, 3 if name.startswith("input") else 4), np.int32)
        for name in ("tokens", "positions", "segments", "targets", "inputs", "input_positions", "input_segments")
    }


def test_best_fit_takes_the_tightest_row():
    assert pack(np.array([[6], [5], [4], [3]]), (10,)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("sides", [1, 2])
def test_packing_is_fast_and_tight(sides):
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 30, (10_000, sides)), 128)
    start = time.process_time()
    rows = pack(lengths, (128,) * sides)
    assert time.process_time() - start < 1.0  # 0.1 s when the machine is idle
    assert lengths.sum() / ((rows.max() + 1) * 128 * sides) > {1: 0.98, 2: 0.87}[sides]


# ---------------------------------------------------------------- objectives
@given(st.text("ab", max_size=40), st.integers(1, 12))
def test_causal_targets_spell_the_document_once(text, length):
    tokenizer = Bytes()
    cfg = DataConfig(train=MemorySource(documents=("a",)), length=length)
    pieces = causal_pieces(
        {"text": tokenizer.encode(text)}, cfg, SpecialTokens(tokenizer.bos_id, None, (tokenizer.eos_id,))
    )
    tokens, targets = (np.concatenate([getattr(p, name) for p in pieces]).tolist() for name in ("tokens", "targets"))
    assert targets == [*tokenizer.encode(text), tokenizer.eos_id]
    assert tokens == [tokenizer.bos_id, *tokenizer.encode(text)]
    assert all(len(piece.tokens) == length for piece in pieces[:-1])
    assert 1 <= len(pieces[-1].tokens) <= length


def test_seq2seq_shifts_targets_and_ends_both_sides(make_config):
    cfg = make_config(objective=Seq2Seq(input_length=3), length=4).data
    (piece,) = seq2seq_pieces({"inputs": [10, 11, 2], "targets": [20, 21, 22]}, cfg, SpecialTokens(1, 3, (2, 4)))
    assert piece.inputs.tolist() == [10, 11, 2]
    assert piece.tokens.tolist() == [3, 20, 21, 22]
    assert piece.targets.tolist() == [20, 21, 22, 2]


@pytest.mark.parametrize(("inputs", "targets"), [([10] * 4, [20]), ([10], [20] * 4)])
def test_seq2seq_leaves_out_what_does_not_fit(make_config, inputs, targets):
    cfg = make_config(objective=Seq2Seq(input_length=3), length=4).data
    assert seq2seq_pieces({"inputs": inputs, "targets": targets}, cfg, SpecialTokens(1, 1, (2,))) == []
