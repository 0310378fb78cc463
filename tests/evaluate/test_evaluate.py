"""Evaluation: the same numbers on any number of devices, metrics when they are due, and the best checkpoint."""

import json
import os
import shutil
import subprocess
import sys

import jax
import pytest
from rich.console import Console

from jaxformer.config import (
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
from jaxformer.evaluate.loop import METRICS, Evaluation
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
