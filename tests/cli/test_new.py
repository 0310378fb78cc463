"""`jaxformer new`: the written configs are complete, suit the data and train."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from jaxformer.cli import main
from jaxformer.config import ByteTokenizer, HeldoutSplit, SentencePieceTokenizer, load_run_file
from jaxformer.data import open_split

FAST = ("train.steps=2", "optim.schedule.warmup_steps=1", "data.length=64", "evaluate.batches=1")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "more", "dog", "near", "that", "old", "tree")


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 9)) + f" {i}" for i in range(120)]
    Path("lines.txt").write_text("\n".join(lines))
    Path("paragraphs.txt").write_text("\n\n".join("\n".join(lines[i : i + 4]) for i in range(0, 120, 4)))
    Path("en.txt").write_text("\n".join(lines))
    Path("de.txt").write_text("\n".join(line.upper() for line in lines))
    return tmp_path


def run(*arguments: str) -> int:
    return main(list(arguments))


@pytest.mark.parametrize(("file", "document"), [("lines.txt", "line"), ("paragraphs.txt", "paragraph")])
def test_a_language_model_of_one_file(workspace, capsys, file, document):
    assert run("new", "mine", "--text", file) == 0
    assert "next: jaxformer train mine.py" in capsys.readouterr().out
    config = load_run_file("mine.py")
    assert config.model.shape == "decoder-only"
    assert config.data.train.document == document
    assert isinstance(config.data.heldout, HeldoutSplit)
    assert "    jaxformer train mine.py\n" in Path("mine.py").read_text()


def test_many_files_are_one_document_each(workspace):
    for i in range(30):
        Path(f"doc{i}.txt").write_text(f"first {i}\n\nsecond {i}\n")
    assert run("new", "mine.py", "--text", "doc*.txt") == 0
    assert load_run_file("mine.py").data.train.document == "file"
    assert run("new", "listed", "--text", *sorted(str(p) for p in Path().glob("doc*.txt"))) == 0
    assert len(load_run_file("listed.py").data.train.paths) == 30


def test_the_language_model_trains_and_evaluates(workspace, capsys):
    assert run("new", "mine", "--text", "lines.txt") == 0
    assert run("train", "mine.py", *FAST) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert json.loads(Path("runs/mine/config.json").read_text())["data"]["heldout"]["kind"] == "split"
    assert run("evaluate", "runs/mine") == 0


def test_the_translator_trains_prepares_and_evaluates(workspace, capsys):
    assert run("new", "translate", "--pairs", "en.txt", "de.txt") == 0
    config = load_run_file("translate.py")
    assert config.model.shape == "encoder-decoder"
    longest = max(len(text) for text in Path("en.txt").read_text().split("\n"))
    assert config.data.objective.input_length >= longest
    fast = (*FAST, 'evaluate.metrics=[{"kind":"perplexity"},{"kind":"exact_match","num_examples":2}]')
    assert run("prepare", "translate.py", *fast) == 0
    assert run("train", "translate.py", *fast) == 0
    assert "exact match" in capsys.readouterr().out
    Path("de.txt").write_text("one line too few")
    assert run("train", "translate.py", *fast, "workdir=runs/other") == 1
    assert "en.txt has 120 lines but de.txt has 1" in capsys.readouterr().err
    assert not Path("runs/other").exists()


def test_the_vocabulary_suits_the_amount_of_text(workspace):
    Path("repetitive.txt").write_text("\n".join(f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS[::3]) * 20)
    Path("large.txt").write_text("\n".join(f"{i:x}{a} {b}{i % 97}" for i in range(800) for a, b in pairwise(WORDS)))
    for name, file, tokenizer in (
        ("small", "lines.txt", ByteTokenizer),
        ("same", "repetitive.txt", ByteTokenizer),
        ("big", "large.txt", SentencePieceTokenizer),
    ):
        assert run("new", name, "--text", file) == 0
        assert isinstance(load_run_file(f"{name}.py").data.tokenizer, tokenizer)


def test_a_small_file_still_has_held_out_lines(workspace):
    Path("few.txt").write_text("\n".join(f"line number {i}" for i in range(12)))
    assert run("new", "few", "--text", "few.txt") == 0
    config = load_run_file("few.py")
    assert len(open_split(config.data, "heldout")) >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine", "--text", "none.txt"], "no file matches 'none.txt'"),
        (["mine", "--pairs", "en.txt", "none.txt"], "no file matches 'none.txt'"),
        (["lines.txt/mine", "--text", "lines.txt"], "is not a directory"),
        (["taken", "--text", "lines.txt"], "'taken.py' exists"),
        (["taken.py", "--pairs", "en.txt", "de.txt"], "'taken.py' exists"),
        (["mine", "--text", "one.txt"], "too few to hold some out"),
        (["", "--text", "lines.txt"], "'' is not a name"),
        ([".", "--text", "lines.txt"], "'.' is not a name"),
        (["configs/", "--text", "lines.txt"], "'configs/' is not a name"),
        (["a\nb", "--text", "lines.txt"], "is not a name"),
    ],
)
def test_mistakes_write_nothing(workspace, capsys, arguments, message):
    Path("taken.py").write_text("# mine")
    Path("one.txt").write_text("a single line")
    before = sorted(workspace.rglob("*"))
    assert run("new", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(workspace.rglob("*")) == before
    assert Path("taken.py").read_text() == "# mine"


def test_odd_names_are_quoted(workspace, capsys):
    odd = 'it\'s "my" text.txt'
    shutil.copy("lines.txt", odd)
    assert run("new", "odd name", "--text", odd, "lines.txt") == 0
    assert "next: jaxformer train 'odd name.py'" in capsys.readouterr().out
    assert "    jaxformer train 'odd name.py'" in Path("odd name.py").read_text()
    assert load_run_file("odd name.py").data.train.paths[0] == odd


def test_the_files_are_formatted(workspace):
    assert run("new", "one", "--text", "lines.txt") == 0
    assert run("new", "two", "--text", "lines.txt", "paragraphs.txt") == 0
    assert run("new", "pairs", "--pairs", "en.txt", "de.txt") == 0
    files = ["one.py", "two.py", "pairs.py"]
    check = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "120", *files]
    subprocess.run(check, check=True, capture_output=True)
