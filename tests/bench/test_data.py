"""`jaxformer bench data --objective KIND` measures whole texts, and prints the ratio to what training consumes."""

import re

import numpy as np
import pytest

from jaxformer.bench import data
from jaxformer.config import apply_overrides
from jaxformer.data.packing import Layout, Side, fill_records
from jaxformer.data.sets import MemoryRecords, PackedSet
from jaxformer.errors import UserError


@pytest.mark.parametrize("kind", data.kinds())
def test_every_objective_has_a_small_config(kind, monkeypatch):
    monkeypatch.setattr(data, "open_source", lambda source: [{"text": "def f(x):\n    return x\n"}])
    config = data.objective_config(kind)
    assert config.data.objective.kind == kind
    assert apply_overrides(config, ["data.length=64"]).data.length == 64


def test_the_report_counts_all_tokens_and_has_the_ratio(monkeypatch):
    monkeypatch.setattr(data, "NUM_BATCHES", 2)
    long = '{"kind":"memory","documents":["' + "spam eggs " * 150 + '"]}'
    options = [f"data.train={long}", "data.length=16", "model.vocab_size=64", "model.embed_dim=8"]
    report = data.bench_data(None, options, 1, "word2vec")
    assert re.match(r"input \(word2vec\): best [\d,]+ batches/s, [\d,]+ tokens/s of 1 runs over 2 batches; ", report)
    assert re.search(r"training takes [\d.]+ batches/s, a ratio of \d+; .* packing 300 tokens took", report)
    assert re.search(r"rows are \d+\.\d% full$", report)


def test_rows_are_full_if_both_sides_are():
    layout = Layout((Side(4, ("tokens",)), Side(6, ("inputs",), "input_segments")))
    pieces = [{"tokens": np.ones(4, np.int32), "inputs": np.ones(1, np.int32)}] * 2
    records = fill_records(pieces, np.array([0, 1]), layout)
    assert data.filled_share(PackedSet(MemoryRecords(records), layout, 8, 0)) == 0.5


def test_an_unknown_objective_and_no_config():
    with pytest.raises(UserError, match="--objective mask: unknown; there are: causal, prefix, masked"):
        data.bench_data(None, [], 1, "mask")
    with pytest.raises(UserError, match=r"needs either a config, such as --config .*, or --objective"):
        data.bench_data(None, [], 1)
