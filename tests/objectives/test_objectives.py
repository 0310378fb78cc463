"""Objectives: targets, the layout of batches, and a span-corruption objective that is defined here."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, RunConfig, Seq2Seq
from jaxformer.data import Bytes, build_set, make_loader
from jaxformer.data.packing import Layout, Side, packed_tokens
from jaxformer.data.tokenizer import SpecialTokens
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani
from jaxformer.objectives import OBJECTIVES, Objective, make_objective
from jaxformer.typing import Batch, abstract_batch

SHAPE = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "vocab_size": 300}
BYTES = Bytes()


def causal(length: int) -> Objective:
    cfg = DataConfig(train=MemorySource(documents=("a",)), length=length)
    return OBJECTIVES["causal"](cfg, SpecialTokens(BYTES.bos_id, None, (BYTES.eos_id,)))


def seq2seq(special: SpecialTokens) -> Objective:
    cfg = DataConfig(train=MemorySource(pairs=(("a", "b"),)), objective=Seq2Seq(input_length=3), length=4)
    return OBJECTIVES["seq2seq"](cfg, special)


@given(st.text("ab", max_size=40), st.integers(1, 12))
def test_causal_targets_contain_every_token_once(text, length):
    pieces = causal(length).pieces({"text": BYTES.encode(text)})
    tokens, targets = (np.concatenate([p[name] for p in pieces]).tolist() for name in ("tokens", "targets"))
    assert targets == [*BYTES.encode(text), BYTES.eos_id]
    assert tokens == [BYTES.bos_id, *BYTES.encode(text)]
    assert all(len(piece["tokens"]) == length for piece in pieces[:-1])
    assert 1 <= len(pieces[-1]["tokens"]) <= length


def test_seq2seq_shifts_targets_and_appends_eos():
    (piece,) = seq2seq(SpecialTokens(1, 3, (2, 4))).pieces({"inputs": [10, 11, 2], "targets": [20, 21, 22]})
    assert piece["inputs"].tolist() == [10, 11, 2]
    assert piece["tokens"].tolist() == [3, 20, 21, 22]
    assert piece["targets"].tolist() == [20, 21, 22, 2]


@pytest.mark.parametrize(("inputs", "targets"), [([10] * 4, [20]), ([10], [20] * 4)])
def test_seq2seq_skips_pairs_that_do_not_fit(inputs, targets):
    assert seq2seq(SpecialTokens(1, 1, (2,))).pieces({"inputs": inputs, "targets": targets}) == []


# ---------------------------------------------------------------- contract of every objective
def config_for(kind: str) -> RunConfig:
    documents, pairs = (
        tuple(f"text {i}" * (i % 5 + 1) for i in range(20)),
        tuple((f"in {i}", str(i)) for i in range(20)),
    )
    data = {"tokenizer": ByteTokenizer(), "length": 24, "batch_size": 4}
    if kind == "causal":
        data = DataConfig(train=MemorySource(documents=documents), **data)
        return RunConfig(model=gpt2(**SHAPE), data=data)
    data = DataConfig(train=MemorySource(pairs=pairs), objective=Seq2Seq(input_length=16), **data)
    return RunConfig(model=vaswani(**SHAPE, mlp_dim=8), data=data)


@pytest.fixture(params=sorted(OBJECTIVES))
def config(request) -> RunConfig:
    return config_for(request.param)


def test_batches_have_the_declared_layout(config):
    objective = make_objective(config, BYTES)
    packed = build_set(config.data, objective, BYTES, "train")
    batch = make_loader(config, packed, objective).batch(0)
    expected = abstract_batch(config.data.batch_layout, config.data.batch_size)
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    shapes = [(a.shape, a.dtype) for a in jax.tree.leaves(batch)]
    assert shapes == [(a.shape, a.dtype) for a in jax.tree.leaves(expected)]


def test_empty_rows_have_no_targets(config):
    objective = make_objective(config, BYTES)
    packed = build_set(config.data, objective, BYTES, "train")
    batch = objective.batch(packed.rows([0], size=3), lambda row: np.random.RandomState(row))
    assert batch.weights[0].any()
    assert not batch.weights[1:].any()


# ---------------------------------------------------------------- an objective that corrupts text to make its source
FIRST_SENTINEL = 290


class SpanCorruption(Objective):
    """A small version of T5's objective (arXiv:1910.10683, section 3.1.4): source and targets come from one text.

    In the source, a sentinel replaces a span of two tokens of every segment; the targets are the sentinel, the span and
    EOS. A stored row has one side; the batch has two sides with different lengths.
    """

    kind = "span"
    fields = {"text": "encode_batch"}  # noqa: RUF012

    @property
    def layout(self) -> Layout:
        return Layout((Side(self.config.length, ("text",)),))

    def pieces(self, ids):
        return [{"text": np.array(ids["text"][: self.config.length], np.int32)}]

    def batch(self, rows, generator) -> Batch:
        num_rows, length = rows["text"].shape
        names = ("source", "source_segments", "tokens", "targets", "segments")
        columns = {name: np.zeros((num_rows, length), np.int32) for name in names}
        for i in range(num_rows):
            self._corrupt(rows["text"][i], rows["segments"][i], generator(i), {n: c[i] for n, c in columns.items()})
        return Batch(
            packed_tokens(columns["tokens"], columns["segments"]),
            columns["targets"],
            (columns["segments"] > 0).astype(np.float32),
            packed_tokens(columns["source"], columns["source_segments"]),
        )

    def _corrupt(self, text, segments, random, columns):
        ends = {"source": 0, "targets": 0}
        for segment in range(1, segments.max() + 1):
            ids = text[segments == segment]
            start = random.randint(0, max(len(ids) - 1, 1))
            span = ids[start : start + 2]
            source = [*ids[:start], FIRST_SENTINEL, *ids[start + 2 :]]
            targets = [FIRST_SENTINEL, *span, self.special.first_eos]
            for name, values, marks in (("source", source, "source_segments"), ("targets", targets, "segments")):
                where = slice(ends[name], ends[name] + len(values))
                columns[name][where], columns[marks][where] = values, segment
                ends[name] += len(values)
            first = ends["targets"] - len(targets)
            columns["tokens"][first : first + len(targets)] = [self.special.start, *targets[:-1]]


@pytest.fixture
def span_loader():
    config = config_for("causal")
    objective = SpanCorruption(config.data, SpecialTokens(BYTES.bos_id, BYTES.bos_id, (BYTES.eos_id,)))
    packed = build_set(config.data, objective, BYTES, "train")
    return make_loader(config, packed, objective)


def test_span_corruption_keeps_every_token(span_loader):
    """Replacing the sentinel by the span restores the text of the stored row."""
    batch = span_loader.batch(3)
    stored = span_loader.packed_set.rows(span_loader._indices(np.arange(12, 16)))
    for i in range(4):
        for segment in range(1, stored["segments"][i].max() + 1):
            source = batch.source.ids[i][batch.source.segments[i] == segment].tolist()
            targets = batch.targets[i][batch.tokens.segments[i] == segment].tolist()
            start = source.index(FIRST_SENTINEL)
            restored = [*source[:start], *targets[1:-1], *source[start + 1 :]]
            assert restored == stored["text"][i][stored["segments"][i] == segment].tolist()


def test_spans_change_with_the_step_and_give_a_finite_loss(span_loader):
    """The shared loss applies to the new objective without changes elsewhere."""
    from jaxformer.layers import Transformer, init_params
    from jaxformer.ops.losses import LossOptions

    batch, epoch_later = span_loader.batch(0), span_loader.batch(span_loader.num_batches)
    assert (np.sort(batch.source.ids) != np.sort(epoch_later.source.ids)).any()
    model = vaswani(**SHAPE, mlp_dim=8)
    params = init_params(model, jax.random.key(0))
    sums, _ = SpanCorruption.loss(Transformer(model), params, batch, LossOptions())
    assert float(sums.weight) == batch.weights.sum()
    assert np.isfinite(float(sums.loss))
