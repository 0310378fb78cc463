"""Sets and batches: the same rows on any number of hosts, after restarts, and from memory or disk."""

import itertools
import json
import logging
import os

import jax
import numpy as np
import pytest

from jaxformer.config import DatesSource, MemorySource, SentencePieceTokenizer, Seq2Seq, TextSource
from jaxformer.data import (
    Bytes,
    build_set,
    load_heldout,
    load_sentencepiece,
    load_sets,
    load_tokenizer,
    make_loader,
    open_prepared,
    open_source,
    prepare,
    train_sentencepiece,
)
from jaxformer.data.loader import _order, row_generator
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective

DOCUMENTS = tuple(f"document {i} " + "x" * (i * 7 % 23) for i in range(38))


@pytest.fixture
def cfg(make_config):
    return make_config(train=MemorySource(documents=DOCUMENTS), batch_size=4, length=16)


@pytest.fixture
def pairs(make_config):
    return make_config(
        train=DatesSource(num_examples=60),
        heldout=DatesSource(split="heldout", num_examples=21),
        objective=Seq2Seq(input_length=64),
        length=24,
        batch_size=4,
    )


def data_arguments(cfg, tokenizer=None):
    """Return the arguments that the functions of `jaxformer.data` need from a config."""
    tokenizer = tokenizer or Bytes()
    return cfg.data, make_objective(cfg, tokenizer), tokenizer


def build(cfg):
    return build_set(*data_arguments(cfg)[:2], "train")


def loader_of(cfg, rows, **options):
    return make_loader(cfg, rows, make_objective(cfg, Bytes()), **options)


def row_of(rows, index):
    return {name: column[0] for name, column in rows.rows([index]).items()}


def assert_same(first, second):
    """Compare two sequences of batches or of stored rows."""
    for a, b in itertools.zip_longest(first, second):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def concatenate(batches):
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


def row_keys(targets):
    return [tuple(row) for row in targets.tolist()]


# ---------------------------------------------------------------- sets
@pytest.mark.parametrize("packed", [True, False])
def test_set_counts_targets_and_bytes(make_config, packed):
    cfg = make_config(train=MemorySource(documents=("aé", "bcd")), pack=packed)
    rows = build(cfg)
    assert len(rows) == (1 if packed else 2)
    assert rows.num_bytes == 6
    assert rows.num_tokens == 6 + 2 == int((rows.rows(range(len(rows)))["segments"] > 0).sum())


def test_set_holds_every_document(make_config):
    rows = build(make_config(train=MemorySource(documents=DOCUMENTS), length=64))
    texts = [
        Bytes().decode(row["targets"][row["segments"] == segment])
        for row in (row_of(rows, i) for i in range(len(rows)))
        for segment in range(1, row["segments"].max() + 1)
    ]
    assert sorted(texts) == sorted(DOCUMENTS)
    assert len(rows) < len(DOCUMENTS)


def test_rows_by_index(cfg):
    rows = build(cfg)
    assert_same([{name: column[1] for name, column in rows.rows([0, 3]).items()}], [row_of(rows, 3)])
    with pytest.raises(IndexError):
        rows.rows([len(rows)])


def test_objective_and_source_must_agree(make_config):
    cfg = make_config(train=MemorySource(pairs=(("a", "b"),)))
    with pytest.raises(UserError, match=r"kind=causal needs examples with text, but data\.train has inputs and"):
        build(cfg)


def test_long_pairs_are_dropped_and_counted(make_config, caplog):
    objective = Seq2Seq(input_length=4)
    good, bad = ("abc", "x"), ("abcd", "long target")
    with caplog.at_level(logging.WARNING):
        rows = build(make_config(train=MemorySource(pairs=(good, bad, good)), objective=objective))
    message = "data.train: 1 of 3 examples are longer than data.length=8 or data.objective.input_length=4 tokens"
    assert f"{message} and are dropped; data.too_long=truncate keeps the beginning of each" in caplog.text
    assert rows.num_bytes == 2
    with pytest.raises(UserError, match=r"data\.train: no example .* all 1 are longer than data\.length=8"):
        build(make_config(train=MemorySource(pairs=(bad,)), objective=objective))


def test_paired_segments_carry_the_same_pair(pairs):
    rows, tokenizer, sources = build(pairs), Bytes(), {}
    for i in range(len(rows)):
        row = row_of(rows, i)
        for segment in range(1, row["segments"].max() + 1):
            text = tokenizer.decode(row["inputs"][row["input_segments"] == segment])
            sources[text] = tokenizer.decode(row["targets"][row["segments"] == segment])
    assert sources == {example["inputs"]: example["targets"] for example in open_source(pairs.data.train)}
    assert rows.rows(range(len(rows)))["segments"].max() > 1


# ---------------------------------------------------------------- hosts, restarts, epochs
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_global_batch_does_not_depend_on_the_number_of_hosts(cfg, train, num_hosts):
    rows = build(cfg)
    whole = loader_of(cfg, rows, train=train)
    shares = [loader_of(cfg, rows, host=i, num_hosts=num_hosts, train=train) for i in range(num_hosts)]
    for step in range(whole.num_batches + 2):
        assert_same([concatenate([share.batch(step) for share in shares])], [whole.batch(step)])


def test_hosts_must_divide_the_batch(cfg):
    with pytest.raises(UserError, match=r"data\.batch_size=4 is not a multiple of the 3 hosts"):
        loader_of(cfg, build(cfg), num_hosts=3)


def test_restart_continues_where_it_stopped(cfg):
    loader = loader_of(cfg, build(cfg))
    steps = list(loader.iterate(0, 30))
    assert_same(steps, [loader.batch(step) for step in range(30)])
    assert_same(loader.iterate(17, 30), steps[17:])
    assert list(loader.iterate(3, 3)) == []


def test_worker_processes_change_nothing(make_config, cfg):
    rows = build(cfg)
    with_workers = loader_of(make_config(**dict(cfg.data) | {"workers": 2, "prefetch": 2}), rows)
    assert_same(with_workers.iterate(5, 12), loader_of(cfg, rows).iterate(5, 12))


def test_iteration_may_stop_early(cfg):
    steps = loader_of(cfg, build(cfg)).iterate(0, 10**9)
    assert_same([next(steps)], [loader_of(cfg, build(cfg)).batch(0)])
    steps.close()


@pytest.mark.parametrize("batch_size", [1, 4, 64, 150])
def test_every_epoch_has_every_row_once_in_a_new_order(make_config, batch_size):
    cfg = make_config(train=MemorySource(documents=DOCUMENTS), batch_size=batch_size, length=16)
    rows = build(cfg)
    loader = loader_of(cfg, rows)
    steps = -(-3 * len(rows) // batch_size)
    keys = row_keys(concatenate([loader.batch(step) for step in range(steps)]).targets)
    epochs = [keys[i * len(rows) : (i + 1) * len(rows)] for i in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(row_keys(rows.rows(range(len(rows)))["targets"]))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_seed_changes_the_order(make_config, cfg):
    rows = build(cfg)
    loaders = [loader_of(make_config(seed=seed, **dict(cfg.data)), rows) for seed in (0, 1, 2**40)]
    orders = [row_keys(concatenate([loader.batch(step) for step in range(5)]).targets) for loader in loaders]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_order_is_pinned():
    """A run that resumes after an upgrade of jaxformer must see the same batches as before."""
    assert [_order(6, seed=0, epoch=epoch).tolist() for epoch in (0, 1)] == [[5, 0, 3, 2, 1, 4], [1, 0, 3, 4, 5, 2]]


def test_evaluation_reads_every_row_once_and_pads_with_empty_rows(cfg):
    rows = build(cfg)
    assert len(rows) % 4
    loader = loader_of(cfg, rows, train=False)
    whole = concatenate(list(loader.iterate(0, loader.num_batches)))
    assert len(whole.targets) == loader.num_batches * 4
    np.testing.assert_array_equal(whole.targets[: len(rows)], rows.rows(range(len(rows)))["targets"])
    assert not any(column[len(rows) :].any() for column in jax.tree.leaves(whole))
    assert whole.weights.sum() == rows.num_tokens


def test_row_multiple_adds_empty_rows_to_every_batch(cfg):
    """The empty rows allow sharding a batch of any size over the devices."""
    rows = build(cfg)
    plain, wider = loader_of(cfg, rows, train=False), loader_of(cfg, rows, train=False, row_multiple=3)
    assert wider.num_batches == plain.num_batches
    for step in range(plain.num_batches):
        batch = wider.batch(step)
        assert len(batch.targets) == 6
        assert_same([jax.tree.map(lambda a: a[:4], batch)], [plain.batch(step)])
        assert not batch.weights[4:].any()


# ---------------------------------------------------------------- corruption
class Noisy:
    """An objective that replaces every target by random ids from the row's generator."""

    def __init__(self, inner):
        self._inner = inner

    def batch(self, rows, generator):
        batch = self._inner.batch(rows, generator)
        noise = np.stack([generator(i).randint(3, 259, batch.targets.shape[1]) for i in range(len(batch.targets))])
        return batch._replace(targets=np.where(rows["segments"] > 0, noise, 0).astype(np.int32))


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_corruption_does_not_depend_on_hosts_and_changes_every_step(cfg, num_hosts):
    rows, objective = build(cfg), Noisy(make_objective(cfg, Bytes()))
    whole = make_loader(cfg, rows, objective)
    shares = [make_loader(cfg, rows, objective, host=i, num_hosts=num_hosts) for i in range(num_hosts)]
    for step in range(3):
        assert_same([concatenate([share.batch(step) for share in shares])], [whole.batch(step)])
    assert (whole.batch(0).targets != whole.batch(1).targets).any()


def test_every_evaluation_corrupts_rows_identically(cfg, make_config):
    """The corruption depends on a row's index in the set, not on the batch size."""
    rows, objective = build(cfg), Noisy(make_objective(cfg, Bytes()))
    smaller = make_config(**dict(cfg.data) | {"batch_size": 2})
    loaders = [make_loader(c, rows, objective, train=False) for c in (cfg, smaller)]
    first, second = (
        concatenate(list(loader.iterate(0, loader.num_batches))).targets[: len(rows)] for loader in loaders
    )
    np.testing.assert_array_equal(first, second)
    wanted = row_generator(cfg.seed, 0, 5).randint(3, 259, 16)
    np.testing.assert_array_equal(first[5][first[5] > 0], wanted[first[5] > 0])


def test_random_numbers_of_a_row_are_pinned():
    """A run that resumes after an upgrade of jaxformer must see the same corruption as before."""
    assert row_generator(seed=1, step=2, row=3).randint(0, 1000, 5).tolist() == [171, 56, 1, 916, 410]


# ---------------------------------------------------------------- prepared sets
def test_prepared_batches_equal_batches_from_memory(pairs, tmp_path):
    prepared = prepare(*data_arguments(pairs), tmp_path)
    for train, rows, split in ((True, prepared.train, "train"), (False, prepared.heldout, "heldout")):
        memory = build_set(*data_arguments(pairs)[:2], split)
        assert (rows.num_tokens, rows.num_bytes) == (memory.num_tokens, memory.num_bytes)
        loaders = [loader_of(pairs, packed, train=train) for packed in (rows, memory)]
        assert_same(loaders[0].iterate(0, 9), loaders[1].iterate(0, 9))
    assert load_tokenizer(tmp_path).digest == Bytes().digest
    assert not list(tmp_path.glob("*.partial"))


def test_prepared_with_workers(pairs, make_config, tmp_path):
    rows = prepare(*data_arguments(pairs), tmp_path).train
    cfg = make_config(**dict(pairs.data) | {"workers": 1})
    assert_same(loader_of(cfg, rows).iterate(0, 4), loader_of(pairs, build(pairs)).iterate(0, 4))


def test_load_sets_prefers_prepared_sets(cfg, tmp_path):
    from_memory = load_sets(*data_arguments(cfg), tmp_path)
    assert from_memory.heldout is None
    prepare(*data_arguments(cfg), tmp_path)
    opened = load_sets(*data_arguments(cfg), tmp_path)
    assert type(opened.train.records) is not type(from_memory.train.records)
    assert_same([opened.train.rows([3, 1])], [from_memory.train.rows([3, 1])])


def test_load_heldout_from_memory_and_from_disk(pairs, tmp_path):
    first = load_heldout(*data_arguments(pairs), tmp_path)
    prepare(*data_arguments(pairs), tmp_path)
    assert_same([first.rows([0, 2])], [load_heldout(*data_arguments(pairs), tmp_path).rows([0, 2])])


def test_another_heldout_set_than_the_prepared_one_is_built_in_memory(pairs, tmp_path):
    prepare(*data_arguments(pairs), tmp_path)
    other = pairs.replace(data=pairs.data.replace(heldout=MemorySource(pairs=(("source", "target"),))))
    assert load_heldout(*data_arguments(other), tmp_path).num_bytes == len("target")
    with pytest.raises(UserError, match=r"prepared with other settings(.|\n)*data\.heldout"):
        load_sets(*data_arguments(other), tmp_path)


def test_batch_size_and_seed_may_change_after_preparing(cfg, make_config, tmp_path):
    prepare(*data_arguments(cfg), tmp_path)
    open_prepared(*data_arguments(make_config(seed=9, **dict(cfg.data) | {"batch_size": 2, "prefetch": 3})), tmp_path)


def test_error_for_other_settings_names_them(cfg, make_config, tmp_path):
    prepare(*data_arguments(cfg), tmp_path)
    for change, message in (
        ({"length": 17}, r"data\.length: prepared with 16, now 17"),
        ({"pack": False}, r"data\.pack: prepared with true, now false"),
        ({"train": MemorySource(documents=("x",))}, r"data\.train: prepared with .*document 37"),
    ):
        with pytest.raises(UserError, match=message):
            load_sets(*data_arguments(make_config(**dict(cfg.data) | change)), tmp_path)


def test_another_tokenizer_raises(cfg, tmp_path):
    prepare(*data_arguments(cfg), tmp_path)
    other = train_sentencepiece(DOCUMENTS, 290, SentencePieceTokenizer(algorithm="bpe"))
    with pytest.raises(UserError, match="tokenizer: prepared with"):
        load_sets(*data_arguments(cfg, other), tmp_path)


def test_interrupted_preparation_does_not_count(cfg, tmp_path, monkeypatch):
    prepare(*data_arguments(cfg), tmp_path)
    monkeypatch.setattr("jaxformer.data.prepared.write_records", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(*data_arguments(cfg), tmp_path)
    with pytest.raises(UserError, match="holds no prepared data: run jaxformer prepare"):
        open_prepared(*data_arguments(cfg), tmp_path)


def _interrupted(*args):
    raise KeyboardInterrupt


def test_damaged_prepared_files(cfg, pairs, tmp_path):
    prepare(*data_arguments(cfg), tmp_path / "a")
    meta = tmp_path / "a" / "meta.json"
    content = json.loads(meta.read_text())
    content["sets"]["train"]["rows"] += 1
    meta.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"train\.array_record: \d+ rows, but meta\.json says"):
        open_prepared(*data_arguments(cfg), tmp_path / "a")
    meta.write_text("{")
    with pytest.raises(UserError, match=r"meta\.json: not valid JSON"):
        open_prepared(*data_arguments(cfg), tmp_path / "a")
    records = prepare(*data_arguments(cfg), tmp_path / "a").train.records
    assert len(records) > 0
    (tmp_path / "a" / "train.array_record").write_bytes(b"gone")
    with pytest.raises(UserError, match=r"train\.array_record: not a readable ArrayRecord file"):
        open_prepared(*data_arguments(cfg), tmp_path / "a")


# ---------------------------------------------------------------- real data, if available
needs_data = pytest.mark.skipif("JAXFORMER_DATA" not in os.environ, reason="JAXFORMER_DATA names no data directory")


@needs_data
def test_real_text(make_config):
    path = os.path.join(os.environ["JAXFORMER_DATA"], "wikitext-2", "wiki.valid.txt.xz")
    rows = build(make_config(train=TextSource(paths=(path,), document="paragraph"), length=512))
    assert rows.num_tokens > 1_000_000
    assert rows.num_tokens / (len(rows) * 512) > 0.98


@needs_data
@pytest.mark.parametrize(
    ("name", "vocab_size", "ids"),
    [("llama2_tokenizer.model", 32_000, (0, 1, 2)), ("t5-base.spiece.model", 32_000, (0, 0, 1))],
)
def test_real_tokenizers(name, vocab_size, ids):
    tokenizer = load_sentencepiece(os.path.join(os.environ["JAXFORMER_DATA"], "tokenizers", name))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == ids
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.decode(tokenizer.encode("Hello world.")) == "Hello world."
