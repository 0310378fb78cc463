"""Packing: every token is kept once, pieces do not overlap, and segments and positions are correct."""

import os
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.bench.data import filled_share
from jaxformer.config import (
    DataConfig,
    Masked,
    ParallelSource,
    RunConfig,
    SentencePieceTokenizer,
    Seq2Seq,
    TextSource,
)
from jaxformer.data import build_set, make_tokenizer, open_split
from jaxformer.data.packing import Layout, Piece, Side, fill_records, pack, segment_positions, split_records
from jaxformer.models.bert import bert
from jaxformer.models.vaswani import vaswani
from jaxformer.objectives import make_objective

CAPACITIES = (12, 7)
SHAPE = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "vocab_size": 8000}
LAYOUT = Layout((Side(12, ("tokens", "targets")), Side(7, ("inputs",), "input_segments")))
PAIRS = st.lists(st.tuples(st.integers(1, CAPACITIES[0]), st.integers(1, CAPACITIES[1])), min_size=1, max_size=60)


def make_pieces(lengths: np.ndarray) -> list[Piece]:
    """Make pieces in which all ids are distinct, so that lost and duplicated tokens are detected."""
    ids = iter(range(1, 10**6))

    def take(n: int) -> np.ndarray:
        return np.array([next(ids) for _ in range(n)], np.int32)

    return [{"tokens": take(t), "targets": take(t), "inputs": take(s)} for t, s in lengths]


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
def test_rows_hold_every_piece_once_and_contiguously(lengths):
    lengths = np.array(lengths)
    pieces, rows = make_pieces(lengths), pack(lengths, CAPACITIES)
    batch = unpack(pieces, rows, LAYOUT)
    for row in range(rows.max() + 1):
        inside = [piece for piece, at in zip(pieces, rows, strict=True) if at == row]
        _check_side({name: batch[name][row] for name in ("tokens", "positions", "segments")}, inside, "tokens")
        _check_side({"targets": batch["targets"][row], "segments": batch["segments"][row]}, inside, "targets")
        _check_side(
            {name: batch[name][row] for name in ("inputs", "input_positions", "input_segments")}, inside, "inputs"
        )


def unpack(pieces: list[Piece], rows: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    columns = dict(split_records(fill_records(pieces, rows, layout), layout))
    for side in layout.sides:
        columns[side.segments.replace("segments", "positions")] = segment_positions(columns[side.segments])
    return columns


def _check_side(row: dict[str, np.ndarray], pieces: list[Piece], name: str) -> None:
    """Check that a row holds its pieces one after another, followed by zeros."""
    columns = [piece[name] for piece in pieces]
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
    pieces = make_pieces(np.array([(n, 1) for n in lengths]))
    rows, layout = pack(np.array(lengths)[:, None], (9,)), Layout((Side(9, ("tokens",)),))
    batch = unpack(pieces, rows, layout)
    assert sorted(batch["tokens"][batch["segments"] > 0]) == sorted(np.concatenate([p["tokens"] for p in pieces]))
    assert set(batch) == {"tokens", "positions", "segments"}


def test_column_order_of_records():
    """Prepared files of earlier versions depend on this order."""
    assert LAYOUT.width == 3 * 12 + 2 * 7
    bounds = {name: (column.start, column.stop) for name, column in LAYOUT.columns.items()}
    wanted = {
        "tokens": (0, 12),
        "targets": (12, 24),
        "segments": (24, 36),
        "inputs": (36, 43),
        "input_segments": (43, 50),
    }
    assert bounds == wanted
    columns = split_records(fill_records(make_pieces(np.array([(2, 3)])), np.array([0]), LAYOUT), LAYOUT)
    assert {array.dtype for array in columns.values()} == {np.dtype(np.int32)}


def test_best_fit_takes_the_tightest_row():
    assert pack(np.array([[6], [5], [4], [3]]), (10,)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("sides", [1, 2])
def test_packing_is_fast_and_tight(sides):
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 30, (10_000, sides)), 128)
    start = time.process_time()
    rows = pack(lengths, (128,) * sides)
    assert time.process_time() - start < 1.0  # 0.1 s when the machine is idle
    assert lengths.sum() / ((rows.max() + 1) * 128 * sides) > {1: 0.98, 2: 0.87}[sides]


@pytest.mark.slow
@pytest.mark.skipif("JAXFORMER_DATA" not in os.environ, reason="JAXFORMER_DATA names no data directory")
@pytest.mark.parametrize(("corpus", "expected"), [("wikitext-2", 0.97), ("multi30k", 0.95)])
def test_rows_of_real_corpora_are_full(corpus, expected):
    """On all sides together, with documents of one line and the lengths of configs/multi30k_ende.py."""
    root = f"{os.environ['JAXFORMER_DATA']}/{corpus}"
    if corpus == "multi30k":
        source = ParallelSource(inputs=f"{root}/train.en.gz", targets=f"{root}/train.de.gz")
        model, objective, length = vaswani(**SHAPE), Seq2Seq(input_length=128), 128
    else:
        source = TextSource(paths=f"{root}/wiki.train.txt.xz", document="line")
        model, objective, length = bert(**SHAPE), Masked(), 256
    tokenizer = SentencePieceTokenizer(byte_fallback=False, train_bytes=16_000_000)
    data = DataConfig(train=source, tokenizer=tokenizer, objective=objective, length=length)
    config = RunConfig(model=model, data=data)
    objective = make_objective(config, make_tokenizer(config, open_split(data, "train")))
    packed = build_set(data, objective, "train")
    assert filled_share(packed) > expected
