"""Held-out splits: disjoint, complete, and independent of the order of the examples."""

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from jaxformer.config import DataConfig, HeldoutSplit, MemorySource, SentencePieceTokenizer, Seq2Seq, TextSource
from jaxformer.data import Bytes, build_set, load_heldout, open_prepared, open_split, prepare
from jaxformer.data.sources.split import is_heldout, split_documents
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective
from jaxformer.train.workdir import find_or_make_tokenizer

PAIRS = tuple((f"source {i}", f"target {i}") for i in range(200))


def sides(documents, percent: int) -> tuple[list, list]:
    return tuple(list(split_documents(documents, percent, heldout=heldout)) for heldout in (False, True))


@given(st.permutations([f"text {i}" for i in range(40)]))
def test_a_split_is_complete_disjoint_and_independent_of_order(texts):
    train, heldout = sides([{"text": text} for text in texts], 30)
    both = sorted(example["text"] for example in (*train, *heldout))
    assert both == sorted(texts)
    in_order = sides([{"text": text} for text in sorted(texts)], 30)[1]
    assert sorted(e["text"] for e in heldout) == sorted(e["text"] for e in in_order)


def test_examples_stay_on_their_side_when_data_is_added_and_the_percentage_is_approximate():
    small, large = ([{"text": f"text {i}"} for i in range(n)] for n in (500, 5000))
    kept = {e["text"] for e in sides(small, 10)[1]}
    grown = {e["text"] for e in sides(large, 10)[1]}
    assert kept == grown & {e["text"] for e in small}
    assert 0.08 < len(grown) / 5000 < 0.12


def test_pairs_with_the_same_source_are_on_the_same_side():
    documents = [{"inputs": f"source {i}", "targets": f"target {j}"} for i in range(60) for j in range(3)]
    train, heldout = sides(documents, 20)
    assert not {e["inputs"] for e in train} & {e["inputs"] for e in heldout}


def test_training_heldout_and_tokenizer_use_their_own_side(make_config):
    data = {"train": MemorySource(pairs=PAIRS), "heldout": HeldoutSplit(percent=20)}
    cfg = make_config(**data, objective=Seq2Seq(input_length=16), length=16)
    train, heldout = (open_split(cfg.data, split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == len(PAIRS)
    objective = make_objective(cfg, Bytes())
    for split, documents in (("train", train), ("heldout", heldout)):
        packed = build_set(cfg.data, objective, split)
        assert packed.num_bytes == sum(len(e["targets"].encode()) for e in documents)


def test_the_tokenizer_is_not_trained_on_heldout_text(make_config):
    """One text has a letter that no other text has: it becomes a piece only if that text is trained on."""
    probe = next(text for text in (f"Ж{i}" for i in range(99)) if is_heldout(text, 20))
    documents = (*(f"number {i} of the numbers" for i in range(80)), probe)
    data = {"train": MemorySource(documents=documents), "tokenizer": SentencePieceTokenizer(byte_fallback=False)}
    for heldout, known in ((None, True), (HeldoutSplit(percent=20), False)):
        tokenizer = find_or_make_tokenizer(make_config(vocab_size=30, **data, heldout=heldout), resumes=False)
        assert (tokenizer.decode(tokenizer.encode("Ж")) == "Ж") == known


def test_prepared_sets_hold_the_same_split(make_config, tmp_path):
    documents = tuple(f"document {i}" for i in range(50))
    cfg = make_config(train=MemorySource(documents=documents), heldout=HeldoutSplit(percent=20), length=16)
    arguments = (cfg.data, make_objective(cfg, Bytes()), Bytes())
    memory = build_set(*arguments[:2], "heldout")
    prepared = prepare(*arguments, tmp_path)
    assert prepared.heldout.num_bytes == memory.num_bytes
    assert prepared.train.num_bytes + memory.num_bytes == sum(map(len, documents))
    assert load_heldout(*arguments, tmp_path).num_bytes == memory.num_bytes
    other = cfg.data.replace(heldout=HeldoutSplit(percent=30))
    with pytest.raises(UserError, match=r"data.heldout: prepared with .*20.*now .*30"):
        open_prepared(other, *arguments[1:], tmp_path)


def test_one_document_cannot_be_split(tmp_path):
    (tmp_path / "book.txt").write_text("a\n\nb\n\nc\n")
    cfg = DataConfig(train=TextSource(paths=str(tmp_path / "book.txt")), heldout=HeldoutSplit(percent=10))
    with pytest.raises(
        UserError, match=r"percent=10: data.train has 1 example, of which none is .*document=paragraph or line"
    ):
        open_split(cfg, "train")


def test_a_split_is_not_a_training_source():
    with pytest.raises(ValidationError, match="split"):
        DataConfig(train={"kind": "split"})
