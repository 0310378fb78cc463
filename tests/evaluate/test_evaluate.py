"""Evaluation: the same numbers on any number of devices, metrics when they are due, and the best checkpoint."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import pytest
from rich.console import Console

from jaxformer.config import (
    Bleu,
    ByteTokenizer,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    ExactMatch,
    MemorySource,
    MeshConfig,
    OptimConfig,
    Perplexity,
    RunConfig,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.config.metrics import METRIC_CONFIGS
from jaxformer.data import Bytes
from jaxformer.decode.api import generate
from jaxformer.errors import UserError
from jaxformer.evaluate.decoding import check_lengths, decode_pairs
from jaxformer.evaluate.loop import METRICS, Evaluation
from jaxformer.evaluate.perplexity import exp
from jaxformer.evaluate.report import evaluate, format_metrics
from jaxformer.models.vaswani import vaswani
from jaxformer.run import load
from jaxformer.train.loop import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunConfig:
    """A trained encoder-decoder with a metric that decodes. Its 6 rows per batch do not divide over 4 or 8 devices."""
    pairs = MemorySource(pairs=tuple((f"{i}", f"{i % 3}") for i in range(30)))
    config = RunConfig(
        workdir=str(tmp_path_factory.mktemp("runs") / "pairs"),
        model=vaswani(num_layers=1, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=264, dropout=0.0),
        data=DataConfig(
            train=pairs,
            heldout=pairs,
            tokenizer=ByteTokenizer(),
            objective=Seq2Seq(input_length=8),
            length=8,
            batch_size=6,
        ),
        optim=OptimConfig(learning_rate=3e-2),
        train=TrainConfig(steps=6, log_every=1),
        mesh=MeshConfig(data=2, fsdp=1, tensor=4),
        checkpoint=CheckpointConfig(every=2, keep_last=1, best="exact_match"),
        evaluate=EvaluateConfig(metrics=(Perplexity(every=3), ExactMatch(every=2, num_examples=30))),
    )
    train(config, Console(quiet=True))
    return config


def logged(config: RunConfig) -> dict[int, dict[str, float]]:
    with open(os.path.join(config.workdir, "metrics.jsonl")) as file:
        return {line["step"]: line for line in map(json.loads, file)}


def test_every_metric_is_measured_when_it_is_due(finished):
    lines = logged(finished)
    assert [step for step, line in lines.items() if "heldout_loss" in line] == [3, 6]
    assert [step for step, line in lines.items() if "exact_match" in line] == [2, 4, 6]


def test_the_named_metric_selects_the_best_checkpoint(finished):
    values = {step: line["exact_match"] for step, line in logged(finished).items() if "exact_match" in line}
    best = max(values, key=lambda step: (values[step], step))
    kept = {int(name) for name in os.listdir(os.path.join(finished.workdir, "checkpoints"))}
    assert kept <= {best, 6} | {step for step in values if values[step] == values[best]}
    assert 6 in kept


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 4},
        pytest.param({"data": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 4, "fsdp": 1, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_evaluation_gives_the_same_numbers_on_every_mesh(finished, sizes):
    overrides = [f"mesh.{axis}={sizes.get(axis, 1)}" for axis in ("data", "fsdp", "tensor")]
    expected = evaluate(finished.workdir)
    actual = evaluate(finished.workdir, overrides)
    assert actual.keys() == expected.keys() >= {"heldout_loss", "exact_match"}
    for name in actual:
        assert actual[name] == pytest.approx(expected[name], rel=1e-5), name


def test_evaluate_on_several_devices_from_the_command_line(finished):
    """Parameters must be on all devices of the mesh; they used to be on one device only."""
    overrides = ["mesh.data=-1", "mesh.tensor=1"]
    count = "--xla_force_host_platform_device_count"
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace(f"{count}=8", f"{count}=4")}
    command = [sys.executable, "-m", "jaxformer.cli", "evaluate", finished.workdir, *overrides]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    eight_devices = format_metrics(evaluate(finished.workdir, overrides))
    assert result.stdout.strip() == eight_devices.strip()
    assert "held-out perplexity" in eight_devices


def test_metrics_do_not_use_generation_config(finished, tmp_path, monkeypatch):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "generation_config.json").write_text('{"repetition_penalty": 2.0}')
    assert load(workdir).generation.settings == {"repetition_penalty": 2.0}
    monkeypatch.setitem(METRICS, "exact_match", lambda config, run, heldout: {"ignored": run.generation is None})
    assert evaluate(workdir)["ignored"]


def test_any_metrics_can_be_evaluated_whatever_ranked_the_checkpoints(finished):
    """The run ranks checkpoints by exact match, which need not be evaluated again."""
    assert finished.checkpoint.best == "exact_match"
    values = evaluate(finished.workdir, ['evaluate.metrics=[{"kind": "perplexity"}]'])
    assert "heldout_loss" in values
    assert "exact_match" not in values
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate(finished.workdir, ["evaluate.metrics=[]"])


def test_overrides_cannot_change_the_model_of_a_run(finished):
    with pytest.raises(UserError, match="overrides cannot change a trained model"):
        evaluate(finished.workdir, ["model.vocab_size=300"])


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Bleu(), "bleu decodes all inputs, but 1 of 31 inputs of data.heldout exceed the model's context of 8 tokens"),
        (ExactMatch(), "exact_match decodes all inputs, but 1 of 31"),
        (ExactMatch(num_examples=30), None),
        (Bleu(num_examples=30, max_new_tokens=7), None),
        (Bleu(num_examples=30, max_new_tokens=8), "bleu.max_new_tokens=8 does not fit .* set at most 7"),
    ],
)
def test_texts_that_are_too_long_to_decode_are_named_before_training(finished, metric, message):
    best = CheckpointConfig(best="heldout_loss")
    config = with_long_input(finished, checkpoint=best, evaluate=EvaluateConfig(metrics=(Perplexity(), metric)))
    if message is None:
        check_lengths(metric, config, Bytes())
    else:
        with pytest.raises(UserError, match=message):
            train(config, Console(quiet=True))
        assert not os.path.exists(config.workdir)


def test_inputs_that_are_too_long_to_decode_are_truncated(finished, caplog):
    config = with_long_input(finished)
    config = config.replace(data=config.data.replace(too_long="truncate"))
    with caplog.at_level("WARNING"):
        check_lengths(ExactMatch(), config, Bytes())
    assert "1 of 31 inputs of data.heldout exceed the model's context of 8 tokens and are truncated" in caplog.text
    run = replace(load(finished.workdir), config=config)
    inputs = [{"inputs": text} for text in ("1", "123456789", "1234567")]
    first, second, third = decode_pairs(run, inputs, max_new_tokens=3)
    assert second == third
    assert [first, third] == generate(run, ["1", "1234567"], max_new_tokens=3)


def with_long_input(config: RunConfig, **fields) -> RunConfig:
    """The config of a new run whose model is limited to 8 tokens, with a longer input in the held-out data."""
    heldout = MemorySource(pairs=(*config.data.train.pairs, ("123456789", "1")))
    data, model = config.data.replace(heldout=heldout), config.model.replace(context_length=8)
    return config.replace(workdir=f"{config.workdir}_long", data=data, model=model, **fields)


def test_without_held_out_data_nothing_is_due(finished):
    evaluation = Evaluation(finished, None, None, None)
    assert evaluation.due(6) == []


def test_every_metric_of_the_config_has_a_file():
    assert set(METRICS) == {config.model_fields["kind"].default for config in METRIC_CONFIGS}
    for kind, metric in METRICS.items():
        assert metric.__module__ == f"jaxformer.evaluate.{kind}"


def test_values_without_a_label_are_shown_by_name():
    assert format_metrics({"heldout_loss": 1.0, "heldout_perplexity": 2.718, "novelty": 3.0}) == (
        "held-out perplexity 2.72   novelty 3"
    )
    assert jax.device_count() == 8


def test_the_perplexity_of_an_undefined_loss_is_undefined():
    assert math.isnan(exp(math.nan))
    assert exp(1000.0) == math.inf
    assert exp(0.0) == 1.0
