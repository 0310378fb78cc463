"""Whole runs of objectives: training, resuming, loading and predicting."""

import json

import numpy as np
import pytest
from rich.console import Console

import jaxformer as jf
from jaxformer.config import (
    ByteTokenizer,
    CheckpointConfig,
    Classify,
    DataConfig,
    DirectoryTokenizer,
    EvaluateConfig,
    Masked,
    MemorySource,
    OptimConfig,
    PoolerConfig,
    RunConfig,
    Span,
    StartConfig,
    Tag,
    TrainConfig,
)
from jaxformer.evaluate.report import evaluate
from jaxformer.models.bert import bert
from jaxformer.models.llama import llama
from jaxformer.models.vaswani import vaswani
from jaxformer.train.loop import train

SHAPE = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "vocab_size": 400}
TEXTS = tuple(f"{word} {i}" for i in range(8) for word in ("good", "bad"))
LABELLED = tuple({"text": text, "label": text.split()[0] == "good"} for text in TEXTS)
LABELLED = tuple({"text": each["text"], "label": "yes" if each["label"] else "no"} for each in LABELLED)
TAGGED = tuple({"text": ["in", city, "now"], "tags": ["O", "B-loc", "O"]} for city in ("Rome", "Bern", "Oslo", "Riga"))


def classes(model, **pooler):
    return model.replace(head=None, pooler=PoolerConfig(num_classes=2, **pooler))


CASES = {
    "masked": (bert(**SHAPE), MemorySource(documents=TEXTS), Masked()),
    "span": (vaswani(**SHAPE), MemorySource(documents=TEXTS), Span(input_length=16)),
    "classify": (
        classes(bert(**SHAPE, dropout=0.0, attention_dropout=0.0)),
        MemorySource(examples=LABELLED),
        Classify(),
    ),
    "classify a decoder": (classes(llama(**SHAPE), pooling="last"), MemorySource(examples=LABELLED), Classify()),
    "classify an encoder-decoder": (
        classes(vaswani(**SHAPE, dropout=0.0), pooling="last"),
        MemorySource(examples=LABELLED),
        Classify(),
    ),
    "tag": (classes(bert(**SHAPE, dropout=0.0), pooling="none"), MemorySource(examples=TAGGED), Tag()),
}


def make_config(case: str, workdir, steps: int = 4, **train_options) -> RunConfig:
    model, source, objective = CASES[case]
    data = DataConfig(
        train=source, heldout=source, tokenizer=ByteTokenizer(), objective=objective, length=16, batch_size=8
    )
    return RunConfig(
        workdir=str(workdir),
        model=model,
        data=data,
        optim=OptimConfig(learning_rate=1e-2, schedule={"kind": "constant"}),
        train=TrainConfig(steps=steps, log_every=1, **train_options),
        checkpoint=CheckpointConfig(every=2),
        evaluate=EvaluateConfig(every=50),
    )


def run(config: RunConfig) -> jf.Run:
    return train(config, Console(quiet=True))


def losses(workdir) -> list[float]:
    return [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", ["masked", "span", "classify"])
def test_resumed_runs_are_bit_identical(case, tmp_path):
    run(make_config(case, tmp_path / "whole"))
    run(make_config(case, tmp_path / "parts", steps=2))
    run(make_config(case, tmp_path / "parts"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("case", ["classify", "classify a decoder", "classify an encoder-decoder"])
def test_classifiers_learn_and_keep_their_labels(case, tmp_path):
    run(make_config(case, tmp_path, steps=40))
    loaded = jf.load(tmp_path)
    assert loaded.config.model.pooler.labels == ("no", "yes")
    results = jf.classify(loaded, ["good 3", "bad 5"])
    assert [result[0].label for result in results] == ["yes", "no"]
    assert all(result[0].score > 0.8 for result in results)
    assert evaluate(tmp_path)["class_accuracy"] == 1.0


def test_taggers_learn(tmp_path):
    run(make_config("tag", tmp_path, steps=40))
    (result,) = jf.tag(jf.load(tmp_path), ["in Bern now"])
    assert [word.tag for word in result] == ["O", "B-loc", "O"]
    assert evaluate(tmp_path)["tag_f1"] == 1.0


def test_a_pretrained_encoder_becomes_a_classifier(tmp_path):
    """With both heads in one model, the weights of masked-LM pre-training start the training of a classifier."""
    both = bert(**SHAPE).replace(pooler=PoolerConfig(num_classes=2, labels=("no", "yes")))
    first = make_config("masked", tmp_path / "first")
    first = first.replace(model=both)
    before = run(first)
    second = make_config("classify", tmp_path / "second", steps=1, start=StartConfig(path=str(tmp_path / "first")))
    tokenizer = DirectoryTokenizer(path=str(tmp_path / "first"))
    second = second.replace(
        model=both, data=second.data.replace(tokenizer=tokenizer), optim=OptimConfig(learning_rate=1e-9)
    )
    after = run(second)
    assert after.tokenizer.mask_id == before.tokenizer.mask_id
    np.testing.assert_allclose(
        after.params["embedding"]["tokens"], before.params["embedding"]["tokens"], rtol=0, atol=1e-6
    )
