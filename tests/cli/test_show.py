"""`jaxformer show` of configs, run directories and Hugging Face directories."""

import json
from pathlib import Path

import pytest

from jaxformer.cli import main
from jaxformer.convert import SAMPLES

CONFIG = """
from jaxformer.config import *
from jaxformer.models.gpt2 import gpt2

def config():
    documents = tuple(f"document {i}" for i in range(20))
    return RunConfig(
        model=gpt2(num_layers=1, embed_dim=16, num_heads=2, vocab_size=264, context_length=32),
        data=DataConfig(train=MemorySource(documents=documents), heldout=MemorySource(documents=documents[:3]),
                        tokenizer=ByteTokenizer(), length=16, batch_size=8),
        optim=OptimConfig(schedule=Constant()),
        train=TrainConfig(steps=2, log_every=1),
        checkpoint=CheckpointConfig(every=1),
    )
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds tiny.py, its run in `run`, a Hugging Face model in `hf` and its import in `imported`."""
    root = tmp_path_factory.mktemp("show")
    (root / "tiny.py").write_text(CONFIG)
    assert main(["train", str(root / "tiny.py"), f"workdir={root / 'run'}"]) == 0
    SAMPLES["gpt2"].save(root / "hf")
    assert main(["import", str(root / "hf"), str(root / "imported")]) == 0
    return root


def show(capsys, *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_run_directory(directory, capsys):
    from_config, from_run = (show(capsys, directory / name) for name in ("tiny.py", "run"))
    totals = [line for line in from_config.splitlines() if "parameters" in line or "FLOPs" in line]
    assert len(totals) == 3
    assert all(line in from_run for line in totals)
    assert "checkpoints: steps 1, 2" in from_run
    assert "tokenizer: Bytes with 259 ids" in from_run
    last = json.loads((directory / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"latest metrics: step 2, accuracy {last['accuracy']:.4g}" in from_run
    assert "evaluation at step 2: held-out perplexity" in from_run


def test_overrides_apply_to_a_run(directory, capsys):
    assert '"steps": 7' in show(capsys, directory / "run", "train.steps=7")


def test_a_run_without_checkpoints_and_metrics(directory, capsys, tmp_path):
    for name in ("config.json", "tokenizer_bytes.json"):
        (tmp_path / name).write_bytes((directory / "run" / name).read_bytes())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss"')  # still being written
    output = show(capsys, tmp_path)
    assert "checkpoints: none" in output
    assert "latest metrics" not in output


def test_a_hugging_face_directory(directory, capsys):
    output = show(capsys, directory / "hf")
    assert "Hugging Face model: GPT2LMHeadModel (gpt2), dtype float32" in output
    size = (directory / "hf" / "model.safetensors").stat().st_size
    assert f"model.safetensors  {size:,} bytes" in output
    assert "decoder/blocks_0/attention/q/kernel" in output


def test_an_imported_run_has_no_data(directory, capsys):
    output = show(capsys, directory / "imported")
    assert "checkpoints: steps 0" in output
    assert '"data": null' in output
    assert "bytes per device: parameters" in output
    assert "optimizer" not in output.split("bytes per device:")[1]
    size = next(line for line in show(capsys, directory / "hf").splitlines() if " parameters; mesh" in line)
    assert size in output


def test_missing_and_wrong_paths(directory, capsys, tmp_path):
    for path, message in ((tmp_path / "none", "does not exist"), (tmp_path, "is not a run directory")):
        assert main(["show", str(path)]) == 1
        assert message in capsys.readouterr().err
