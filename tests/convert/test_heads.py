"""Class heads in config.json: label names, kinds of classification, dropout, and exported classifiers."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    ByteTokenizer,
    Classify,
    DataConfig,
    Masked,
    MemorySource,
    ModelConfig,
    OptimConfig,
    PoolerConfig,
    RunConfig,
    TrainConfig,
)
from jaxformer.convert import FORMATS, SAMPLES
from jaxformer.convert.export import find_format
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import ModelFiles
from jaxformer.data.tokenizer import Bytes
from jaxformer.errors import UserError
from jaxformer.exchange import export_run, import_run
from jaxformer.layers import abstract_params
from jaxformer.models.bert import bert
from jaxformer.models.distilbert import distilbert
from jaxformer.models.llama import llama
from jaxformer.models.marian import marian
from jaxformer.models.modernbert import modernbert
from jaxformer.run import load
from jaxformer.rundir import RunDir
from jaxformer.train.loop import train
from jaxformer.typing import tokens_from_ids

SMALL = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 24, "vocab_size": 264, "context_length": 64}
LABELS = ("negative", "positive", "unclear")


def read(architecture: str, model_type: str = "distilbert", **fields) -> ModelConfig:
    values = Fields(fields, "config.json")
    model = FORMATS[model_type].read(values, ModelFiles(architecture, frozenset()))
    values.finish()
    return model


def write(model: ModelConfig, model_type: str | None = None) -> dict:
    return json.loads(json.dumps(find_format(model, model_type)[1]))


# ---------------------------------------------------------------- published config.json
SST2 = {
    "activation": "gelu", "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "finetuning_task": "sst-2",
    "hidden_dim": 3072, "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "initializer_range": 0.02,
    "label2id": {"NEGATIVE": 0, "POSITIVE": 1}, "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6,
    "output_past": True, "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
}  # fmt: skip
MNLI = {
    "_num_labels": 3, "activation_dropout": 0.0, "activation_function": "gelu", "add_final_layer_norm": False,
    "attention_dropout": 0.0, "bos_token_id": 0, "classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 1024,
    "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0, "decoder_layers": 12,
    "decoder_start_token_id": 2, "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
    "encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2, "forced_eos_token_id": 2,
    "gradient_checkpointing": False, "id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"},
    "init_std": 0.02, "is_encoder_decoder": True, "label2id": {"contradiction": 0, "entailment": 2, "neutral": 1},
    "max_position_embeddings": 1024, "normalize_before": False, "num_hidden_layers": 12, "output_past": False,
    "pad_token_id": 1, "scale_embedding": False, "use_cache": True, "vocab_size": 50265,
}  # fmt: skip


def test_a_published_classifier_of_distilbert():
    model = read("DistilBertForSequenceClassification", **SST2)
    assert model.head is None
    assert (model.pooler.num_classes, model.pooler.labels) == (2, ("NEGATIVE", "POSITIVE"))
    assert (model.pooler.problem, model.pooler.dropout) == ("single_label", 0.2)
    again = write(model)
    assert {key: again[key] for key in ("id2label", "label2id")} == {key: SST2[key] for key in ("id2label", "label2id")}


def test_a_published_classifier_of_bart():
    model = read("BartForSequenceClassification", "bart", **MNLI)
    assert model.pooler.labels == ("contradiction", "neutral", "entailment")
    assert (model.pooler.pooling, model.head) == ("last", None)
    assert write(model)["architectures"] == ["BartForSequenceClassification"]


# ---------------------------------------------------------------- labels
@pytest.mark.parametrize(
    ("fields", "num_classes", "labels"),
    [
        ({}, 2, ()),
        ({"num_labels": 5}, 5, ()),
        ({"_num_labels": 5}, 5, ()),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, 3, ()),
        ({"id2label": {"1": "b", "0": "a"}, "num_labels": 2}, 2, ("a", "b")),
        ({"id2label": {"0": 1, "1": 2}}, 2, ("1", "2")),
    ],
)
@pytest.mark.parametrize("task", ["Sequence", "Token"])
def test_labels(fields, num_classes, labels, task):
    pooler = read(f"DistilBertFor{task}Classification", **fields).pooler
    assert (pooler.num_classes, pooler.labels) == (num_classes, labels)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0": "a", "2": "b"}, "must map the ids 0, 1, 2"),
        ({"x": "a"}, "must map the ids 0, 1, 2"),
        ({}, "must map the ids 0, 1, 2"),
        (["a", "b"], "must map the ids 0, 1, 2"),
        ({"0": "same", "1": "same"}, "has a name twice"),
    ],
)
def test_invalid_labels(names, message, copy_sample, tmp_path):
    source = copy_sample("distilbert tags")
    source.set(id2label=names, label2id=...)
    with pytest.raises(UserError, match=message) as error:
        import_run(source.path, tmp_path / "run")
    assert str(source.path / "config.json") in str(error.value)


def test_default_names_are_written_for_classes_without_names():
    fields = write(distilbert(**SMALL, num_classes=2))
    assert fields["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    assert fields["label2id"] == {"LABEL_0": 0, "LABEL_1": 1}
    # Classes that have these names on purpose can be exported too.
    assert write(distilbert(**SMALL, num_classes=2, labels=("LABEL_0", "LABEL_1"))) == fields


# ---------------------------------------------------------------- kinds of classification
@pytest.mark.parametrize(
    ("problem_type", "num_labels", "problem"),
    [
        (None, 1, "regression"),
        (None, 2, "single_label"),
        ("regression", 1, "regression"),
        ("regression", 3, "regression"),
        ("single_label_classification", 3, "single_label"),
        ("multi_label_classification", 1, "multi_label"),
        ("multi_label_classification", 3, "multi_label"),
    ],
)
def test_problems_both_ways(problem_type, num_labels, problem):
    model = read("DistilBertForSequenceClassification", problem_type=problem_type, num_labels=num_labels)
    assert model.pooler.problem == problem
    written = write(model)
    # transformers decides by the number of labels if the field is null.
    theirs = transformers.DistilBertConfig(**written)
    default = "regression" if num_labels == 1 else "single_label"
    assert theirs.problem_type == (None if problem == default else problem_type)
    again = {key: value for key, value in written.items() if key not in ("architectures", "model_type")}
    assert read("DistilBertForSequenceClassification", **again).pooler == model.pooler


def test_a_tagger_has_no_problem_type():
    pooler = read("DistilBertForTokenClassification", num_labels=1).pooler
    assert (pooler.num_classes, pooler.problem) == (1, "single_label")


def test_an_unknown_problem_type():
    with pytest.raises(UserError, match="problem_type = 'ranking' is not supported; supported: single_label_class"):
        read("DistilBertForSequenceClassification", problem_type="ranking")


def test_a_single_class_cannot_be_exported_as_a_single_label():
    """transformers rejects `problem_type` = single_label_classification with one label."""
    with pytest.raises(UserError, match=r"transformers regards a single class as a regression: set pooler\.problem"):
        find_format(distilbert(**SMALL, num_classes=1), "distilbert")


# ---------------------------------------------------------------- pooling
def test_modernbert_pools_the_first_token_unless_the_mean_is_set(tmp_path):
    """`cls` is the default of transformers; the samples of the zoo pool the mean."""
    sample = SAMPLES["modernbert classes"]
    theirs = replace(sample, fields=sample.fields | {"classifier_pooling": "cls"}).save(tmp_path / "theirs")
    run = load(tmp_path / "theirs")
    assert run.config.model.pooler.pooling == "first"
    ids = list(range(5, 25))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(logits(run, "pool", ids), expected, atol=1e-5)
    import_run(tmp_path / "theirs", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    exported = their_logits(tmp_path / "out", "AutoModelForSequenceClassification", ids)
    np.testing.assert_allclose(exported, expected, atol=1e-6)


# ---------------------------------------------------------------- dropout
@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (bert(**SMALL, num_classes=3, dropout=0.2, classifier_dropout=0.3), "classifier_dropout", 0.3),
        (bert(**SMALL, num_tags=3, dropout=0.2), "classifier_dropout", None),
        (distilbert(**SMALL, num_classes=3, classifier_dropout=0.3), "seq_classif_dropout", 0.3),
        (modernbert(**SMALL, num_tags=3, classifier_dropout=0.3), "classifier_dropout", 0.3),
        (llama(**SMALL, num_tags=3, classifier_dropout=0.3), "classifier_dropout", 0.3),
        (llama(**SMALL, num_tags=3, classifier_dropout=0.0), "classifier_dropout", 0.0),
    ],
)
def test_dropout_of_the_classifier_both_ways(model, field, value):
    fields = write(model)
    assert fields[field] == value
    rest = {key: value for key, value in fields.items() if key not in ("architectures", "model_type")}
    assert read(fields["architectures"][0], fields["model_type"], **rest).pooler == model.pooler


# ---------------------------------------------------------------- models that cannot be exported
@pytest.mark.parametrize(
    ("model", "model_type", "message"),
    [
        (marian(**SMALL, num_classes=2), "marian", "marian: .*it has no model with classes of texts"),
        (llama(**SMALL, num_tags=2), "gemma3_text", "gemma3_text: .*it has no model with classes of tokens"),
        (bert(**SMALL, num_classes=2, pooling="mean"), "bert", "its pooler.pooling would be 'first', not 'mean'"),
        (llama(**SMALL, num_classes=2), "llama", None),
    ],
)
def test_heads_that_a_format_does_not_have(model, model_type, message):
    if message is None:
        assert find_format(model, model_type)[0].model_type == model_type
        return
    with pytest.raises(UserError, match=message):
        find_format(model, model_type)


def test_a_head_that_no_format_has_names_what_differs_in_each():
    plain = PoolerConfig(num_classes=3)  # without the dense layer of published classifiers
    with pytest.raises(UserError, match=r"no Hugging Face format can hold this model:\n  bert: .*pooler") as error:
        find_format(bert(**SMALL).replace(head=None, pooler=plain))
    encoders = {format.model_type for format in FORMATS.values() if format.shape == "encoder-only"}
    assert {line.strip().partition(":")[0] for line in str(error.value).splitlines()[1:]} == encoders


# ---------------------------------------------------------------- exported runs
def data(objective) -> DataConfig:
    documents = MemorySource(documents=("unused",))
    return DataConfig(train=documents, tokenizer=ByteTokenizer(), objective=objective, length=32, batch_size=2)


def save_run(directory: Path, model: ModelConfig, objective) -> Path:
    """Write a run directory like training does, with random parameters."""
    config, rng = RunConfig(model=model, data=data(objective), workdir=str(directory)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.5 * rng.standard_normal(x.shape, np.float32), abstract_params(model)[0])
    with Checkpoints(RunDir(directory), config) as checkpoints:
        checkpoints.save(5, {"params": params}, config, {"step": 5})
    Bytes().save(directory)
    RunDir(directory).write_config(config)
    return directory


def logits(run, method: str, ids: list[int]) -> np.ndarray:
    tokens = tokens_from_ids(np.array([ids]), np.ones((1, len(ids)), int))
    return np.asarray(run.model.apply({"params": run.params}, tokens, method=method))


def their_logits(directory: Path, auto: str, ids: list[int]) -> np.ndarray:
    model, report = getattr(transformers, auto).from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits.numpy()


@pytest.mark.parametrize(
    ("objective", "left_out", "auto", "method"),
    [
        (Classify(), "head", "AutoModelForSequenceClassification", "pool"),
        (Masked(), "pooler", "AutoModelForMaskedLM", "__call__"),
    ],
)
def test_export_keeps_the_head_that_was_trained(objective, left_out, auto, method, tmp_path):
    model = bert(**SMALL, masked_lm=True, num_classes=3, labels=LABELS)
    run = save_run(tmp_path / "run", model, objective)
    message = export_run(run, tmp_path / "out")
    assert message.endswith(f"to {tmp_path / 'out'}, without model.{left_out}, which the objective did not train")
    [typed] = Bytes().encode_sequence(["a short text"])
    theirs = their_logits(tmp_path / "out", auto, typed.ids)
    np.testing.assert_allclose(logits(load(run), method, typed.ids), theirs, atol=1e-4)


@pytest.mark.parametrize("build", [bert, llama])
def test_a_trained_classifier_has_its_label_names_in_transformers(build, tmp_path):
    """Trained here, exported, and classified by the pipeline of transformers: the same label with the same score."""
    examples = tuple(
        {"text": f"{word} number {i}", "label": label}
        for i in range(6)
        for word, label in (("good", "positive"), ("bad", "negative"))
    )
    config = RunConfig(
        workdir=str(tmp_path / "run"),
        model=build(**SMALL, num_classes=2),
        data=DataConfig(
            train=MemorySource(examples=examples),
            tokenizer=ByteTokenizer(),
            objective=Classify(),
            length=32,
            batch_size=8,
        ),
        optim=OptimConfig(learning_rate=1e-2, schedule={"kind": "constant"}),
        train=TrainConfig(steps=2, log_every=1),
    )
    train(config, Console(quiet=True))
    export_run(tmp_path / "run", tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["id2label"] == {"0": "negative", "1": "positive"}

    run = load(tmp_path / "run")
    assert run.config.model.pooler.labels == ("negative", "positive")
    [typed] = run.tokenizer.encode_sequence(["good number 7"])
    probabilities = jax.nn.softmax(logits(run, "pool", typed.ids))[0]
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "out"), top_k=None)
    [results] = classify(["good number 7"])
    assert len(results) == 2
    for result in results:
        expected = probabilities[run.config.model.pooler.labels.index(result["label"])]
        assert result["score"] == pytest.approx(float(expected), abs=1e-5)
