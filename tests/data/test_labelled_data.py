"""Labelled sources, and names of labels to ids and numbers."""

import json
import logging

import numpy as np
import pytest

from jaxformer.config import (
    ByteTokenizer,
    CheckpointConfig,
    Classify,
    ConllSource,
    DataConfig,
    HeldoutSplit,
    JsonlSource,
    MemorySource,
    PoolerConfig,
    RunConfig,
    Tag,
    TextSource,
    TsvSource,
)
from jaxformer.data import Bytes, build_set, complete_labels, open_source, open_split
from jaxformer.data.labels import encode_label, find_labels
from jaxformer.data.sets import build_sets
from jaxformer.errors import UserError
from jaxformer.models.bert import bert
from jaxformer.models.gpt2 import gpt2
from jaxformer.objectives import make_objective

SHAPE = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "vocab_size": 300}


def write_lines(path, *objects):
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in objects))
    return path


def config_of(source, **pooler) -> RunConfig:
    objective = Tag() if pooler.get("pooling") == "none" else Classify()
    data = DataConfig(train=source, tokenizer=ByteTokenizer(), objective=objective, length=16, batch_size=2)
    return RunConfig(model=bert(**SHAPE).replace(head=None, pooler=PoolerConfig(**pooler)), data=data)


# ---------------------------------------------------------------- sources
def test_jsonl_fields_of_labelled_texts(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"sentence": "one", "second": "two", "gold": 1, "other": 3},
        {"sentence": "three", "second": "four", "gold": "x"},
    )
    source = JsonlSource(paths=str(path), text="sentence", text_pair="second", label="gold")
    assert list(open_source(source)) == [
        {"text": "one", "text_pair": "two", "label": 1},
        {"text": "three", "text_pair": "four", "label": "x"},
    ]


def test_tagged_texts_are_lists_of_words(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", {"text": ["New", "York"], "tags": ["B", "I"]}, {"text": "a b", "tags": "O O"}
    )
    assert list(open_source(JsonlSource(paths=str(path)))) == [
        {"text": ["New", "York"], "tags": ["B", "I"]},
        {"text": ["a", "b"], "tags": ["O", "O"]},
    ]


@pytest.mark.parametrize("heldout", [None, HeldoutSplit(percent=50)])
def test_other_objectives_read_tagged_words_as_a_text(tmp_path, heldout):
    path = tmp_path / "a.conll"
    path.write_text("".join(f"{word} O\nsat O\n\n" for word in "abcdefgh"))
    data = DataConfig(train=ConllSource(paths=str(path)), heldout=heldout, tokenizer=ByteTokenizer(), length=8)
    texts = open_split(data, "train")
    assert all(example["text"].endswith(" sat") for example in texts)
    assert texts.where(1).startswith(f"{path}:")
    config = RunConfig(model=gpt2(num_layers=1, embed_dim=8, num_heads=2, vocab_size=300), data=data)
    assert build_set(data, make_objective(config, Bytes()), "train").num_tokens == 6 * len(texts)
    words = open_split(data.replace(objective=Tag()), "train")
    assert [" ".join(example["text"]) for example in words] == [example["text"] for example in texts]


def test_tsv_columns_of_labelled_texts(tmp_path):
    """The columns of CoLA's public files: source, label, original judgement, sentence."""
    path = write_lines(tmp_path / "a.tsv", "gj04\t1\t\tIt is.", "gj04\t0\t*\tIs it it.")
    examples = open_source(TsvSource(paths=str(path), text=3, label=1))
    assert list(examples) == [{"text": "It is.", "label": "1"}, {"text": "Is it it.", "label": "0"}]


def test_a_label_column_without_a_text_column_is_an_error():
    with pytest.raises(ValueError, match="need text, the column of the text"):
        TsvSource(paths="a.tsv", label=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": 3, "label": "a"}, "field 'text' is int, expected a string"),
        ({"text": "a", "label": None}, "field 'label' is null"),
        ({"text": "a", "label": " "}, "field 'label' is empty"),
        ({"text": "a", "label": float("nan")}, "field 'label' is nan"),
        ({"text": ["a", "b"], "tags": ["O", ""]}, "field 'tags' has an empty entry"),
        ({"text": ["a", " "], "tags": ["O", "O"]}, "field 'text' has an empty entry"),
        ({"text": ["a"], "tags": ["x", "y"]}, "1 words but 2 tags"),
        ({"text": "a", "tags": 3}, "field 'tags' is int, expected a list of strings"),
        ({"text": "a"}, "has text but the source began with text and label"),
    ],
)
def test_invalid_labelled_lines_name_file_and_line(tmp_path, line, message):
    path = write_lines(tmp_path / "a.jsonl", {"text": "ok", "label": "a"}, line)
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{message}"):
        open_source(JsonlSource(paths=str(path)))


def test_malformed_lines_are_counted_and_skipped_up_to_a_threshold(tmp_path, caplog):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, "{", {"text": "two"}, "[]", "{}", *["x"] * 4)
    with pytest.raises(UserError, match=r"a\.jsonl:2: not valid JSON") as caught:
        open_source(JsonlSource(paths=str(path), max_malformed=6))
    assert f"7 malformed lines ({path}:2, 4, 5, 6, 7, ...)" in str(caught.value)
    assert "set max_malformed=7" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        examples = open_source(JsonlSource(paths=str(path), max_malformed=7))
    assert list(examples) == [{"text": "one"}, {"text": "two"}]
    assert f"skipped 7 malformed lines ({path}:2, 4, 5, 6, 7, ...); the first: not valid JSON" in caplog.text


def test_examples_without_text_are_skipped_with_a_warning(tmp_path, caplog):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one", "label": "a"}, {"text": " ", "label": "a"})
    with caplog.at_level(logging.WARNING):
        assert len(open_source(JsonlSource(paths=str(path)))) == 1
    assert f"skipped 1 example that has no text ({path}:2)" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "tsv", "memory"])
def test_pairs_with_an_empty_side_are_skipped_with_a_warning(tmp_path, caplog, kind):
    pairs = (("a", "b"), ("c", ""), (" ", "d"), ("e", "f"))
    source = MemorySource(pairs=pairs)
    if kind == "jsonl":
        path = write_lines(tmp_path / "a.jsonl", *({"inputs": a, "targets": b} for a, b in pairs))
        source = JsonlSource(paths=str(path))
    elif kind == "tsv":
        source = TsvSource(paths=str(write_lines(tmp_path / "a.tsv", *("\t".join(pair) for pair in pairs))))
    with caplog.at_level(logging.WARNING):
        assert [example["inputs"] for example in open_source(source)] == ["a", "e"]
    places = "index 1, 2" if kind == "memory" else f"{source.paths}:2, 3"
    assert f"skipped 2 examples that have no text ({places})" in caplog.text


def test_columns_of_different_fields_differ():
    with pytest.raises(ValueError, match="text and label are both column 1"):
        TsvSource(paths="a.tsv", text=1, label=1)
    with pytest.raises(ValueError, match="inputs and targets are both column 0"):
        TsvSource(paths="a.tsv", targets=0)
    with pytest.raises(ValueError, match="word and tag are both column 0"):
        ConllSource(paths="a.conll", tag=0)


def test_sentences_as_documents(tmp_path):
    path = write_lines(tmp_path / "a.txt", "One . Two ! Three", " = Title = ", "", "Mr. X?")
    texts = [each["text"] for each in open_source(TextSource(paths=str(path), document="sentence"))]
    assert texts == ["One .", "Two !", "Three", "= Title =", "Mr.", "X?"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"label": "a"}, "no field 'text'"), ({"text": "a", "colour": "b"}, "unknown field 'colour'")],
)
def test_invalid_examples_in_the_config(fields, message):
    with pytest.raises(UserError, match=rf"examples\.0: {message}"):
        open_source(MemorySource(examples=(fields,)))


# ---------------------------------------------------------------- labels
def test_labels_are_sorted_and_stored_in_the_model():
    examples = tuple({"text": "t", "label": label} for label in ("no", "yes", "maybe", "no"))
    config = complete_labels(config_of(MemorySource(examples=examples), num_classes=3))
    assert config.model.pooler.labels == ("maybe", "no", "yes")
    assert complete_labels(config) == config


def test_numbers_are_sorted_by_value():
    documents = [{"text": "t", "label": label} for label in ("10", "9", 2, "x")]
    assert find_labels(documents, "label") == ("2", "9", "10", "x")


def test_labels_of_tags_and_of_several_classes():
    tagged = MemorySource(examples=({"text": ["a", "b"], "tags": ["O", "B"]},))
    assert complete_labels(config_of(tagged, num_classes=2, pooling="none")).model.pooler.labels == ("B", "O")
    several = MemorySource(examples=({"text": "a", "label": ["x", "y"]}, {"text": "b", "label": []}))
    config = complete_labels(config_of(several, num_classes=2, problem="multi_label"))
    assert encode_label(["y"], config.model.pooler).tolist() == [0.0, 1.0]
    assert encode_label([], config.model.pooler).tolist() == [0.0, 0.0]


def test_the_number_of_classes_must_be_that_of_the_data():
    examples = tuple({"text": "t", "label": label} for label in "abc")
    with pytest.raises(UserError, match=r"data\.train has 3 labels \(a, b, c\).*set model\.pooler\.num_classes=3"):
        complete_labels(config_of(MemorySource(examples=examples), num_classes=2))


def test_numbers_as_labels_may_be_a_regression():
    examples = tuple({"text": "t", "label": value} for value in (1.5, 2.5, 4))
    with pytest.raises(UserError, match=r"or model\.pooler\.problem=regression to predict numbers"):
        complete_labels(config_of(MemorySource(examples=examples), num_classes=1))


def test_labels_that_do_not_suit_the_config_are_an_error_that_names_them():
    """Parts of speech delimit no entities, so that their metric does not report the F1 of entities."""
    tagged = MemorySource(examples=({"text": ["a", "b"], "tags": ["NOUN", "VERB"]},))
    config = config_of(tagged, num_classes=2, pooling="none").replace(checkpoint=CheckpointConfig(best="tag_f1"))
    with pytest.raises(UserError, match=r"labels of data\.train \(NOUN, VERB\): checkpoint\.best='tag_f1' is not"):
        complete_labels(config)


def test_a_source_without_labels_is_an_error():
    with pytest.raises(UserError, match=r"data\.train has text, but the objective needs label"):
        complete_labels(config_of(MemorySource(documents=("a",)), num_classes=2))


def test_unknown_labels_name_the_file_and_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one", "label": "a"}, {"text": "two", "label": "c"})
    config = config_of(JsonlSource(paths=str(path)), num_classes=2, labels=("a", "b"))
    with pytest.raises(UserError, match=r"a\.jsonl:2: label 'c' is not one of model\.pooler\.labels \(a, b\)"):
        build_set(config.data, make_objective(config, Bytes()), "train")


@pytest.mark.parametrize(
    ("pooler", "label", "message"),
    [
        ({"problem": "regression"}, "high", "label 'high' is not a number"),
        ({"problem": "regression"}, float("nan"), "must be 1 finite numbers"),
        ({"labels": ("a",)}, ["a", "a"], "has 2 names, but model.pooler.problem=single_label"),
    ],
)
def test_invalid_labels(pooler, label, message):
    with pytest.raises(UserError, match=message):
        encode_label(label, PoolerConfig(num_classes=1, **pooler))


def test_training_and_heldout_texts_are_both_pairs_or_neither():
    pair, single = {"text": "a", "text_pair": "b", "label": "x"}, {"text": "a", "label": "x"}
    config = config_of(MemorySource(examples=(pair,)), num_classes=1, labels=("x",))
    config = config.replace(data=config.data.replace(heldout=MemorySource(examples=(single,))))
    with pytest.raises(UserError, match=r"data\.train has pairs of texts, but data\.heldout has no text_pair"):
        build_sets(config.data, make_objective(config, Bytes()))


# ---------------------------------------------------------------- batches
def test_regression_targets_survive_storage():
    examples = tuple({"text": "t", "label": value} for value in (0.1, -3.5, 2))
    config = config_of(MemorySource(examples=examples), num_classes=1, problem="regression")
    objective = make_objective(config, Bytes())
    batch = objective.batch(build_set(config.data, objective, "train").rows([0, 1, 2], size=4), None)
    np.testing.assert_array_equal(batch.labels[:3, 0], np.float32([0.1, -3.5, 2]))
    np.testing.assert_array_equal(batch.weights, [1, 1, 1, 0])


def test_long_texts_are_dropped_or_truncated(caplog):
    examples = ({"text": "a" * 30, "text_pair": "b" * 5, "label": "x"}, {"text": "a", "text_pair": "b", "label": "y"})
    config = config_of(MemorySource(examples=examples), num_classes=2, labels=("x", "y"))
    with caplog.at_level(logging.WARNING):
        packed = build_set(config.data, make_objective(config, Bytes()), "train")
    assert len(packed) == 1
    assert "1 of 2 examples are longer than data.length=16 tokens and are dropped" in caplog.text
    data = config.data.replace(too_long="truncate")
    with caplog.at_level(logging.WARNING):
        packed = build_set(data, make_objective(config.replace(data=data), Bytes()), "train")
    assert "are truncated" in caplog.text
    row = packed.rows([0])
    a, b = Bytes().encode("a")[0], Bytes().encode("b")[0]
    assert row["tokens"][0].tolist() == [1, *[a] * 8, 2, *[b] * 5, 2]
    assert row["types"][0].tolist() == [0] * 10 + [1] * 6


def test_sentences_whose_first_word_is_too_long_are_dropped(caplog):
    examples = ({"text": ["a" * 30, "b"], "tags": ["X", "O"]}, {"text": ["a", "b" * 30], "tags": ["X", "O"]})
    config = config_of(MemorySource(examples=examples), num_classes=2, labels=("O", "X"), pooling="none")
    data = config.data.replace(too_long="truncate")
    with caplog.at_level(logging.WARNING):
        packed = build_set(data, make_objective(config.replace(data=data), Bytes()), "train")
    assert packed.num_tokens == 3
    assert "1 of 2 examples are longer than data.length=16 tokens and are dropped" in caplog.text
    assert "1 of 2 examples are longer than data.length=16 tokens and are truncated" in caplog.text


def test_rows_without_space_for_text_are_an_error():
    config = config_of(MemorySource(examples=({"text": "a", "label": "x"},)), num_classes=1, labels=("x",))
    data = config.data.replace(length=2, too_long="truncate")
    with pytest.raises(UserError, match=r"data\.length=2: classify needs .* set 3 or more"):
        make_objective(config.replace(data=data), Bytes())


def test_tags_belong_to_the_first_token_of_each_word():
    examples = ({"text": ["ab", "c"], "tags": ["X", "O"]},)
    config = config_of(MemorySource(examples=examples), num_classes=2, labels=("O", "X"), pooling="none")
    objective = make_objective(config, Bytes())
    batch = objective.batch(build_set(config.data, objective, "train").rows([0]), None)
    assert Bytes().decode(batch.tokens.ids[0]) == "ab c"
    assert batch.weights[0].tolist()[:6] == [0, 1, 0, 1, 0, 0]
    assert batch.targets[0, [1, 3]].tolist() == [1, 0]
