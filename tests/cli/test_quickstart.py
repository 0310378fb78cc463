"""The quickstart configs as a new user runs them. Training takes minutes, so it is marked slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.cli import main

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", "jaxformer.cli", *map(str, arguments)]
    environment = os.environ | {"XLA_FLAGS": "", "COLUMNS": "200"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT).stdout


@pytest.mark.slow
def test_language_model(tmp_path):
    workdir = tmp_path / "quickstart"
    output = run("train", "configs/quickstart.py", f"workdir={workdir}")
    assert f"jaxformer generate {workdir}" in output
    evaluation = json.loads((workdir / "evaluation.json").read_text())
    assert evaluation["heldout_bits_per_byte"] <= 2.0
    assert "is complete" in run("train", "configs/quickstart.py", f"workdir={workdir}")


@pytest.mark.slow
def test_date_conversion(tmp_path):
    workdir = tmp_path / "dates"
    run("train", "configs/quickstart_translate.py", f"workdir={workdir}")
    assert json.loads((workdir / "evaluation.json").read_text())["exact_match"] >= 0.99
    assert run("generate", workdir, "--prompt", "3rd of March 1987").strip() == "1987-03-03"


def show(config: Path, capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", str(config)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_is_shown_and_documented(config, capsys, monkeypatch):
    output = show(config, capsys, monkeypatch)
    assert "parameters" in output
    assert f"configs/{config.name}" in config.read_text().split('"""')[1]


def test_show_gives_every_parameter_its_sharding(capsys, monkeypatch):
    output = show(ROOT / "configs" / "llama3_8b.py", capsys, monkeypatch)
    assert "8,030,261,248 parameters; mesh fsdp=64" in output
    row = next(line for line in output.splitlines() if "decoder/blocks_0/attention/q/kernel" in line)
    assert "32 x 4096 x 32 x 128" in row
    assert "layers, embed, heads, head_dim" in row
    assert "(None, 'fsdp', None, None)" in row
    assert f"{32 * 4096 * 32 * 128 * 4 // 64:,}" in row
