"""Complete runs through the command line: train, stop, kill, resume, evaluate, generate.

Commands run in this process, except those that are killed or interrupted and those whose start is tested.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from jaxformer.cli import main

CONFIG = """
from jaxformer.config import *
from jaxformer.models.gpt2 import gpt2

def config():
    documents = tuple(f"document {i}: " + "abc " * (i % 7) for i in range(60))
    return RunConfig(
        model=gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=264, context_length=64, dropout=0.1),
        data=DataConfig(
            train=MemorySource(documents=documents), heldout=MemorySource(documents=documents[:5]),
            tokenizer=ByteTokenizer(), length=32, batch_size=8,
        ),
        optim=OptimConfig(learning_rate=1e-2, schedule=Constant(), ema_decay=0.9),
        train=TrainConfig(steps=8, log_every=1),
        checkpoint=CheckpointConfig(every=4),
        evaluate=EvaluateConfig(prompts=("doc",), max_new_tokens=4),
    )
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "tiny.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def finished(config_file, tmp_path_factory) -> Path:
    """An uninterrupted run of eight steps."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    output = jaxformer("train", config_file, f"workdir={workdir}")
    assert "held-out perplexity" in output
    assert "bits per byte" in output
    assert f"jaxformer generate {workdir} --prompt doc" in output
    return workdir


def test_a_run_directory_is_complete(finished):
    assert {"config.json", "checkpoints", "metrics.jsonl", "tensorboard", "evaluation.json"} <= set(
        os.listdir(finished)
    )
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert {"loss", "accuracy", "perplexity", "grad_norm", "param_norm", "learning_rate"} <= lines[0].keys()
    assert {"tokens_per_second", "step_seconds", "input_wait"} <= lines[0].keys()
    assert "heldout_loss" in lines[-1]
    assert any(name.startswith("events") for name in os.listdir(finished / "tensorboard"))


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_identically(config_file, finished, tmp_path):
    workdir = tmp_path / "split"
    jaxformer("train", config_file, f"workdir={workdir}", "train.steps=4")
    assert "continuing from step 4" in jaxformer("train", config_file, f"workdir={workdir}")
    assert_same_state(workdir, finished)
    assert losses(workdir) == losses(finished)


def test_a_killed_run_resumes_bit_identically(config_file, finished, tmp_path):
    """SIGKILL after the first checkpoint is on disk and more steps are logged."""
    workdir = tmp_path / "killed"
    command = [sys.executable, "-m", "jaxformer.cli", "train", str(config_file), f"workdir={workdir}"]
    process = subprocess.Popen([*command, "train.steps=100000"], stdout=subprocess.DEVNULL, env=environment())
    wait_for(lambda: (workdir / "checkpoints" / "4").exists() and len(losses(workdir)) > 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    keep_only(workdir, 4)
    jaxformer("train", config_file, f"workdir={workdir}")
    assert_same_state(workdir, finished)
    assert losses(workdir) == losses(finished)


def test_an_interrupt_leaves_a_checkpoint(config_file, tmp_path):
    workdir = tmp_path / "interrupted"
    command = [sys.executable, "-m", "jaxformer.cli", "train", str(config_file), f"workdir={workdir}"]
    process = subprocess.Popen(
        [*command, "train.steps=100000", "checkpoint.every=100000"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_for(lambda: len(losses(workdir)) > 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "stopped at step" in output
    assert len(os.listdir(workdir / "checkpoints")) == 1


def test_a_finished_run_says_so(config_file, finished):
    output = jaxformer("train", config_file, f"workdir={finished}")
    assert "is complete at step 8" in output
    assert "train.steps" in output


def test_generate_and_evaluate_need_only_the_directory(finished):
    assert jaxformer("generate", finished, "--prompt", "doc", "--max-new-tokens", "3")
    output = jaxformer("evaluate", finished)
    assert "held-out perplexity" in output
    assert json.loads((finished / "evaluation.json").read_text())["step"] == 8


def test_quantized_weights_are_measured(finished):
    output = jaxformer("evaluate", finished, "--weights", "int8")
    assert "int8 weights: held-out perplexity" in output
    assert "nats per token" in output
    metrics = json.loads((finished / "evaluation.json").read_text())
    assert metrics["int8_heldout_loss"] == pytest.approx(metrics["heldout_loss"], rel=0.01)


@pytest.mark.slow
def test_generate_from_file_to_file_survives_an_interrupt(finished, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"document {i}"}) + "\n" for i in range(3000)) + "no JSON\n")
    arguments = ["generate", finished, "--input", source, "--output", target, "--max-new-tokens", "40"]
    command = [sys.executable, "-m", "jaxformer.cli", *map(str, arguments)]
    # A shell that runs the tests in the background ignores SIGINT, and child processes inherit this.
    restore_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), preexec_fn=restore_sigint
    )
    wait_for(lambda: target.exists() and target.stat().st_size > 0, process)
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    kept = target.read_text().splitlines()
    assert 0 < len(kept) < 3001
    assert all(json.loads(line)["error"] is None for line in kept)
    jaxformer(*arguments)
    whole = target.read_text().splitlines()
    assert whole[: len(kept)] == kept
    assert [json.loads(line)["line"] for line in whole] == list(range(1, 3002))
    assert "not valid JSON" in json.loads(whole[-1])["error"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt", "a", "--output", "x"], "must be given together"),
        (["--input", "none.jsonl", "--output", "x.jsonl"], "none.jsonl: there is no such file"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p=1.5: must be in (0, 1]"),
        (["--prompt", "a", "--beams", "2", "--temperature", "1"], "num_beams=2 with temperature=1.0"),
        (["--prompt", "a", "--log-probs", "1"], "--log-probs needs --input and --output"),
    ],
)
def test_mistakes_of_generate_are_one_clear_line(finished, arguments, expected):
    message = jaxformer("generate", finished, *arguments, fails=True)
    assert expected in message
    assert "Traceback" not in message


@pytest.mark.slow
def test_the_second_start_compiles_nothing(finished, tmp_path):
    """Compiled programs are stored in the user's cache directory, unless JAXFORMER_COMPILE_CACHE is off."""
    arguments = ["generate", str(finished), "--prompt", "document", "--max-new-tokens", "5"]
    clean = {name: value for name, value in environment().items() if not name.startswith("JAX_")}
    clean |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_LOG_COMPILES": "1"}

    def start(**more: str) -> tuple[str, int]:
        command = [sys.executable, "-m", "jaxformer.cli", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, env=clean | more, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout, result.stderr.count("Persistent compilation cache hit")

    off, hits = start(JAXFORMER_COMPILE_CACHE="off")
    assert not (tmp_path / "cache").exists()
    assert hits == 0
    cold, _ = start()
    programs = sorted((tmp_path / "cache" / "jaxformer" / "compiled").glob("*-cache"))
    warm, hits = start()
    assert programs == sorted((tmp_path / "cache" / "jaxformer" / "compiled").glob("*-cache"))
    assert hits >= len(programs) > 2
    assert off == cold == warm


@pytest.mark.parametrize("jax_first", [False, True], ids=["alone", "after jax"])
def test_importing_the_library_enables_the_compilation_cache(tmp_path, jax_first):
    script = "import jax; jax.jit(lambda x: x + 1)(1)\n" if jax_first else ""
    script += "import jaxformer as jf; jf.Transformer\nimport jax; jax.jit(lambda x: x * 2)(1)"
    clean = {name: value for name, value in environment().items() if not name.startswith("JAX_")}
    clean |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=clean, check=True, timeout=120)
    assert list((tmp_path / "jaxformer" / "compiled").glob("*-cache"))


def test_prepared_data_gives_the_same_run(config_file, finished, tmp_path):
    workdir = tmp_path / "prepared"
    assert "training tokens" in jaxformer("prepare", config_file, f"workdir={workdir}")
    assert (workdir / "data" / "train.array_record").exists()
    jaxformer("train", config_file, f"workdir={workdir}")
    assert losses(workdir) == losses(finished)


def test_the_workdir_of_another_config_is_refused(config_file, finished):
    message = jaxformer("train", config_file, f"workdir={finished}", "seed=1", "optim.learning_rate=0.5", fails=True)
    assert "belongs to a run with another config" in message
    assert "seed: saved 0, now 1" in message
    assert "optim.learning_rate: saved 0.01, now 0.5" in message


def test_diverging_stops_and_keeps_the_last_good_checkpoint(config_file, tmp_path):
    workdir = tmp_path / "diverged"
    message = jaxformer(
        "train", config_file, f"workdir={workdir}", "optim.learning_rate=1e30", "optim.clip_norm=none",
        "optim.algorithm.kind=sgd", "checkpoint.every=1", "optim.schedule.warmup_steps=4", fails=True,
    )  # fmt: skip
    assert "at step" in message
    assert "optim.learning_rate" in message
    kept = max(int(name) for name in os.listdir(workdir / "checkpoints"))
    assert f"training stopped, the last good checkpoint is step {kept}" in message
    assert kept == len(losses(workdir))  # a checkpoint of every step before the one that diverged


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trian.steps=3"], "did you mean train"),
        (["train.steps=many"], "valid integer"),
        (['data.train={"kind":"text","paths":["/nowhere/*.txt"]}'], "/nowhere/*.txt"),
        (["mesh.data=3"], "does not fit"),
        (["data.batch_size=3", "train.accumulate=2"], "data.batch_size=3"),
        (["mesh.data=1", "mesh.tensor=8", "data.batch_size=8"], "is not divisible by mesh"),
        (["workdir=/proc/version/run"], "workdir '/proc/version/run'"),
        (["data.tokenizer.kind=sentencepiece", "model.vocab_size=90000"], "model.vocab_size"),
    ],
)
def test_mistakes_are_one_clear_line_and_leave_nothing(config_file, tmp_path, overrides, expected):
    workdir = tmp_path / "never"
    arguments = overrides if any(o.startswith("workdir") for o in overrides) else [f"workdir={workdir}", *overrides]
    message = jaxformer("train", config_file, *arguments, fails=True)
    assert expected in message
    assert "Traceback" not in message
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "nowhere.py"], "nowhere.py"),
        (["generate", "nowhere", "--prompt", "x"], "'nowhere' does not exist"),
        (["evaluate", "nowhere"], "'nowhere' does not exist"),
    ],
)
def test_missing_files_are_named(arguments, expected):
    message = jaxformer(*arguments, fails=True)
    assert expected in message
    assert "Traceback" not in message


def test_a_prompt_beyond_the_context_is_named(finished):
    message = jaxformer("generate", finished, "--prompt", "x" * 100, fails=True)
    assert "exceed the model's context of 64 tokens" in message


def test_a_truncated_checkpoint_is_named(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    for file in (copy / "checkpoints" / "8" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    message = jaxformer("generate", copy, "--prompt", "x", fails=True)
    assert "cannot be read" in message
    assert "step 4" in message
    assert "Traceback" not in message


# ---------------------------------------------------------------- helpers
@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "200"}


def jaxformer(*arguments: object, fails: bool = False) -> str:
    """Standard output of a command, or its errors if it `fails`."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main([str(argument) for argument in arguments])
    assert (code != 0) == fails, output.getvalue() + errors.getvalue()
    return errors.getvalue() if fails else output.getvalue()


def losses(workdir: Path) -> list[tuple[int, float]]:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    limit = time.time() + seconds
    while not condition():
        assert process.poll() is None, "the process ended early"
        assert time.time() < limit, "nothing happened in time"
        time.sleep(0.05)


def keep_only(workdir: Path, step: int) -> None:
    """Delete all other checkpoints of the killed run, so that it resumes from this step."""
    for path in (workdir / "checkpoints").iterdir():
        if path.name != str(step):
            shutil.rmtree(path)


def assert_same_state(one: Path, other: Path) -> None:
    """The arrays of the last checkpoints are bit-identical."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        states = [reader.restore(path / "checkpoints" / "8" / "state") for path in (one, other)]
    jax.tree.map(np.testing.assert_array_equal, *states)
