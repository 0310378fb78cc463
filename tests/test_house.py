"""Rules of the code base: imports point downwards, layers name no model family, files are short, no broad except."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer
from jaxformer.models import FAMILIES

PACKAGE = Path(jaxformer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Top to bottom. A module may import from lines below its own, and from its own package.
ORDER = [
    {"cli"},
    {"average", "bench", "new", "preflight", "show", "zoo"},
    {"exchange"},
    {"train"},
    {"evaluate"},
    {"decode", "word_vectors"},
    {"run"},
    {"checkpoint"},
    {"objectives"},
    {"convert"},
    {"data"},
    {"models"},
    {"layers"},
    {"ops"},
    {"sharding"},
    {"rundir"},
    {"hosts"},
    {"config"},
    {"topology"},
    {"chips"},
    {"typing"},
    {"errors"},
    {"startup"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
# Families in the zoo and related ones; a name followed by a number, such as gpt2, also counts.
FAMILY_NAMES = set(FAMILIES) | {
    "albert", "bart", "bert", "bloom", "deberta", "deepseek", "distilbert", "electra", "falcon", "gemma", "gpt", "gptj",
    "llama", "marian", "mbart", "minilm", "mistral", "mixtral", "modernbert", "mt5", "neox", "olmo", "opt", "pegasus",
    "phi", "pythia", "qwen", "roberta", "smollm", "stablelm", "t5", "vaswani",
}  # fmt: skip


def names(paths) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in paths]


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_imports_point_downwards(file):
    own = _part(file)
    if own == "__init__":
        assert not list(_imports(file)), "the package itself imports lazily"
        return
    assert own in LEVEL, f"{own} is not in ORDER: add it"
    for line, module in _imports(file):
        part = module.partition(".")[2].partition(".")[0]
        assert part in LEVEL, f"{file}:{line} imports {module}, which is not in ORDER"
        assert part == own or LEVEL[part] > LEVEL[own], f"{file}:{line} imports {module}, which is above {own} in ORDER"


def test_order_lists_every_module():
    present = {_part(file) for file in FILES} - {"__init__"}
    assert present <= set(LEVEL)
    assert {"cli", "train", "layers", "ops", "config"} <= present


def test_the_command_line_starts_without_heavy_imports():
    script = "import sys, jaxformer.cli; print([m for m in ('jax', 'pydantic', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("file", sorted((PACKAGE / "ops").rglob("*.py")), ids=lambda path: path.name)
def test_ops_do_not_import_flax(file):
    assert not list(_imports(file, "flax"))


@pytest.mark.parametrize("part", ["ops", "layers"])
def test_ops_and_layers_name_no_model_family(part):
    """They name the features of an architecture instead."""
    named = re.compile(rf"(?<![a-z])({'|'.join(sorted(FAMILY_NAMES))})(?![a-z])", re.IGNORECASE)
    for file in sorted((PACKAGE / part).rglob("*.py")):
        match = named.search(file.read_text())
        assert match is None, f"{file} names {match}"


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_files_are_short_and_named_for_what_they_hold(file):
    lines = len(file.read_text().splitlines())
    assert lines <= 600, f"{file} has {lines} lines"
    assert file.stem not in ("utils", "helpers", "common", "misc")


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_no_except_clause_catches_every_error(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            broad = re.search(r"\b(everything|Exception|BaseException)\b", caught)
            assert not broad, f"{file}:{node.lineno} catches {caught}"


def _part(file: Path) -> str:
    return Path(file.relative_to(PACKAGE).parts[0]).stem


def _imports(file: Path, package: str = "jaxformer"):
    """(line, dotted module) of every import from `package`, also inside functions; relative ones are resolved."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("jaxformer", *file.relative_to(PACKAGE).parts)[: -node.level]
                base = ".".join([*parents, base]).rstrip(".")
            # `from jaxformer import x` imports the module x.
            modules = [f"{base}.{alias.name}" for alias in node.names] if base == package else [base]
        else:
            continue
        yield from ((node.lineno, m) for m in modules if m.split(".")[0] == package)
