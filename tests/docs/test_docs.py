"""Runs the shell commands and Python snippets of the documentation.

A block is an indented or fenced block whose first word is a known command, or a fenced Python block. The blocks of one
file run in order, in one temporary directory with `configs`, `launch`, sample data and a tiny Hugging Face model for
every path that starts with `path/to/`. A comment right above a block changes that: `<!-- norun: reason -->` skips it
with that reason, `<!-- slow -->` runs it with the slow tests only.

To be fast, commands are not run exactly as written, unless they are marked slow: `jaxformer` runs in this process,
training gets overrides such as train.steps=2 (see `smaller_run`), and `generate` makes four tokens. `pip install` is
not run; its extras must exist. `pytest` and `ruff` are not run either. A block with placeholders, such as
`jaxformer train CONFIG`, is a synopsis: its commands and options must exist.
"""

import contextlib
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.cli import _make_parser, main
from jaxformer.config import RunConfig
from jaxformer.convert.export import export_model
from jaxformer.data import Bytes, huggingface_files
from jaxformer.layers import init_params
from jaxformer.models.llama import llama
from jaxformer.train.start import load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "BUILD.md", "configs/README.md", "jaxformer/README.md")
COMMANDS = ("jaxformer", "pip", "pytest", "python", "ruff", "launch/")
PLACEHOLDER = re.compile(r"(?<![\w.$])(CONFIG|RUN|HF_DIR|NAME|KEY|TEXT|FILE|INPUT)(?![\w.])|\.\.\.|\[key=value")


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(hash=False)
    """The comments above the block: `slow`, or `norun` with its reason."""

    @property
    def commands(self) -> list[str]:
        return [line.strip() for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]

    @property
    def is_synopsis(self) -> bool:
        return self.language == "shell" and any(PLACEHOLDER.search(_uncommented(line)) for line in self.commands)


# ---------------------------------------------------------------- blocks of a document
def find_blocks(document: str, text: str) -> list[Block]:
    blocks = []
    for line, language, content, above in _code(text.splitlines()):
        if language == "" and content.lstrip().startswith(COMMANDS):
            language = "shell"
        if language in ("sh", "bash", "shell", "python"):
            language = "python" if language == "python" else "shell"
            blocks.append(Block(document, line, language, content, _marks(above)))
    return blocks


def _code(lines: list[str]) -> Iterator[tuple[int, str, str, list[str]]]:
    """Yield line number, language, content and the lines above of every fenced or indented block."""
    i = 0
    while i < len(lines):
        start = i
        if fence := re.match(r"(`{3,})(\w*)", lines[i]):
            i += 1
            while i < len(lines) and not lines[i].startswith(fence[1]):
                i += 1
            yield start + 1, fence[2], "\n".join(lines[start + 1 : i]), lines[:start]
        elif lines[i].startswith("    ") and (i == 0 or not lines[i - 1].strip()):
            while i < len(lines) and (lines[i].startswith("    ") or not lines[i].strip()):
                i += 1
            yield start + 1, "", "\n".join(line[4:] for line in lines[start:i]).rstrip(), lines[:start]
            continue
        i += 1


def _marks(above: list[str]) -> dict[str, str]:
    """The marks in the comments directly above a block; blank lines may be between."""
    marks = {}
    for line in reversed([line.strip() for line in above if line.strip()]):
        if not (comment := re.fullmatch(r"<!--\s*(norun|slow)\s*:?\s*(.*?)\s*-->", line)):
            break
        marks[comment[1]] = comment[2]
    return marks


def _uncommented(command: str) -> str:
    return re.sub(r"\s#.*", "", command)


def existing_blocks() -> list[Block]:
    files = [name for name in DOCUMENTS if (ROOT / name).exists()]
    return [block for name in files for block in find_blocks(name, (ROOT / name).read_text(encoding="utf-8"))]


BLOCKS = existing_blocks()


def parameters() -> list:
    ids = [f"{block.document}:{block.line}" for block in BLOCKS]
    marks = [[pytest.mark.slow] if "slow" in block.marks else [] for block in BLOCKS]
    return [pytest.param(block, id=i, marks=mark) for block, i, mark in zip(BLOCKS, ids, marks, strict=True)]


# ---------------------------------------------------------------- running
class Session:
    """Runs the blocks of one document in one directory, each once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.done: dict[Block, Exception | None] = {}
        make_workspace(directory)

    def run(self, block: Block) -> None:
        """Run a block, after the earlier ones of its document, on which it may depend."""
        for earlier in BLOCKS[: BLOCKS.index(block) + 1]:
            wanted = earlier == block or "slow" not in earlier.marks
            if earlier.document == block.document and "norun" not in earlier.marks and wanted:
                self._run_once(earlier)
        if self.done[block] is not None:
            raise self.done[block]

    def _run_once(self, block: Block) -> None:
        if block in self.done:
            return
        try:
            with contextlib.chdir(self.directory):
                run_python(block.text) if block.language == "python" else run_shell(block)
            self.done[block] = None
        except Exception as error:  # reported by the test of this block, not by that of a later one
            self.done[block] = error


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return cache(lambda document: Session(tmp_path_factory.mktemp("docs")))


@pytest.mark.parametrize("block", parameters())
def test_documented_commands_run(block, session, monkeypatch):
    if "norun" in block.marks:
        assert block.marks["norun"], "name a reason: <!-- norun: reason -->"
        pytest.skip(block.marks["norun"])
    monkeypatch.setenv("COLUMNS", "200")
    session(block.document).run(block)


def run_python(text: str) -> None:
    names: dict = {"__name__": "documentation"}
    exec(compile(text, "documentation", "exec"), names)
    if "config" in names:
        assert isinstance(names["config"](), RunConfig)


def run_shell(block: Block) -> None:
    for line in block.commands:
        if block.is_synopsis:
            check_synopsis(line)
            continue
        for command in re.split(r"\s&&\s", line):
            words = [word for part in shlex.split(command, comments=True) for word in expand(part)]
            assert words[0].startswith(COMMANDS), f"'{command}': unknown command, add it to COMMANDS"
            run_command(words, as_written="slow" in block.marks)


def run_command(words: list[str], as_written: bool) -> None:
    program = words[0]
    if program == "pip":
        check_extras(words)
    elif program == "jaxformer":
        arguments = words[1:] if as_written else faster(words[1:])
        assert main(arguments) == 0, f"{shlex.join(['jaxformer', *arguments])} failed"
    elif program == "python" or program.startswith("launch/"):
        position = words.index("jaxformer") + 1 if "jaxformer" in words else len(words)
        words = words if as_written else [*words[:position], *faster(words[position:])]
        words = [sys.executable, *words[1:]] if program == "python" else words
        subprocess.run(words, check=True, env=os.environ | {"XLA_FLAGS": ""})


def faster(arguments: list[str]) -> list[str]:
    """The arguments of a `jaxformer` command with options that make it short."""
    if arguments and arguments[0] in ("train", "prepare"):
        return [*arguments, *smaller_run(load_config(arguments[1], arguments[2:]), arguments)]
    if arguments and arguments[0] == "generate" and "--max-new-tokens" not in arguments:
        return [*arguments, "--max-new-tokens", "4"]
    return arguments


def smaller_run(config: RunConfig, arguments: list[str]) -> list[str]:
    """Overrides for a short run of a config on less data; a command that sets train.steps trains one step more."""
    steps = 3 if any(argument.startswith("train.steps=") for argument in arguments) else 2
    overrides = [f"train.steps={steps}", "optim.schedule.warmup_steps=1", "train.log_every=1", "data.batch_size=8"]
    overrides += ["data.length=64", "evaluate.every=none", "evaluate.batches=1", "evaluate.max_new_tokens=4"]
    for i, metric in enumerate(config.evaluate.metrics or ()):
        if metric.kind == "exact_match":
            overrides.append(f"evaluate.metrics.{i}.num_examples=2")
    if config.data.train.kind == "dates":
        overrides += ["data.train.num_examples=100", "data.heldout.num_examples=20"]
    if config.data.train.kind == "stdlib":
        for split, file in (("train", "corpus.txt"), ("heldout", "heldout.txt")):
            overrides.append(f'data.{split}={{"kind":"text","paths":"{file}","document":"line"}}')
        overrides += ["data.tokenizer.kind=bytes"]
    return overrides


def check_synopsis(line: str) -> None:
    """Raise if a line of a synopsis names a command or an option that does not exist."""
    commands = _make_parser()._subparsers._group_actions[0].choices
    for part in re.split(r"\s{2,}", _uncommented(line)):
        words = part.split()
        if words[0] != "jaxformer":
            continue  # an explanation
        assert words[1].startswith("--") or words[1] in commands, f"'{part}': no such command"
        options = {option.strip("[],") for option in words[2:] if option.lstrip("[").startswith("--")}
        known = commands[words[1]]._option_string_actions if words[1] in commands else {}
        assert options <= set(known), f"'{part}': no such option"


def check_extras(words: list[str]) -> None:
    extras = re.findall(r"\[([\w,]+)\]", " ".join(words))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(",".join(extras).split(",")) - {""} <= set(known), f"{words}: no such extra"


def expand(word: str) -> list[str]:
    """Expand a glob as a shell does."""
    return (sorted(glob.glob(word)) or [word]) if "*" in word and "=" not in word else [word]


def make_workspace(directory: Path) -> None:
    """A directory as a reader of the documentation has it: the repository's files, and text to train on."""
    for name in ("configs", "launch"):
        shutil.copytree(ROOT / name, directory / name)
    words = ("a", "small", "dog", "runs", "over", "the", "green", "field", "and", "sees", "one", "old", "tree")
    lines = [" ".join(words[i * j % len(words)] for j in range(1, 8)) + f" {i}" for i in range(150)]
    (directory / "corpus").mkdir()
    for i in range(0, 150, 5):
        (directory / "corpus" / f"{i}.txt").write_text("\n".join(lines[i : i + 5]))
    (directory / "corpus.txt").write_text("\n".join(lines))
    (directory / "heldout.txt").write_text("\n".join(lines[:20]))
    (directory / "train.en").write_text("\n".join(lines))
    (directory / "train.de").write_text("\n".join(line.upper() for line in lines))
    for path in sorted({path for block in BLOCKS for path in re.findall(r"\bpath/to/[\w.-]+", block.text)}):
        make_model(directory / path)


def make_model(directory: Path) -> None:
    """A tiny chat model with random weights as a Hugging Face directory."""
    directory.mkdir(parents=True)
    model = llama(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=264, context_length=512)
    export_model(directory, model, init_params(model, jax.random.key(0)), np.dtype("float32"))
    for name, content in huggingface_files(Bytes(), model.shape).items():
        (directory / name).write_bytes(content)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)


# ---------------------------------------------------------------- tests of the runner itself
SAMPLE = """
Text.

    jaxformer zoo   # a comment
    jaxformer help train

<!-- norun: needs a cloud -->

    jaxformer train gs.py

<!-- slow -->
```python
import os
```

```
pip install x
```

    not a command

```diff
+jaxformer
```

    jaxformer train CONFIG [key=value ...]   explanation
"""


def test_blocks_are_found_with_their_marks():
    blocks = find_blocks("x.md", SAMPLE)
    shown = [(block.line, block.language, block.marks, block.is_synopsis) for block in blocks]
    assert shown == [
        (4, "shell", {}, False),
        (9, "shell", {"norun": "needs a cloud"}, False),
        (12, "python", {"slow": ""}, False),
        (16, "shell", {}, False),
        (26, "shell", {}, True),
    ]
    assert blocks[0].commands == ["jaxformer zoo   # a comment", "jaxformer help train"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("jaxformer help trian", "jaxformer help trian failed"),
        ("jaxformer fly RUN", "no such command"),
        ("jaxformer generate RUN --fly", "no such option"),
        ("pip install -e '.[fly]'", "no such extra"),
    ],
)
def test_wrong_commands_fail(text, error):
    (block,) = find_blocks("x.md", f"\n    {text}\n")
    with pytest.raises(AssertionError, match=re.escape(error)):
        run_shell(block)


def test_python_blocks_fail_if_they_raise():
    with pytest.raises(ZeroDivisionError):
        run_python("1 / 0")


def test_every_document_with_commands_is_covered():
    assert {block.document for block in BLOCKS} >= {"README.md", "BUILD.md", "configs/README.md"}
