"""Adding a model takes two new files and one line in each of two registries; the zoo and the tests discover it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer
from jaxformer.config import OBJECTIVE_CONFIGS

TESTS = Path(__file__).parents[1]
MODEL = '''
"""A made-up sibling of Llama."""

from jaxformer.config import ModelConfig
from jaxformer.models.builders import builder
from jaxformer.models.llama import llama
from jaxformer.models.presets import Preset, ZooRow


@builder(extends=llama)
def sibling(**options) -> ModelConfig:
    """Build a `llama`."""
    return llama(**options)


_SHAPE = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 24, "vocab_size": 50}
_PRESETS = {"sibling-tiny": Preset(6_032, lambda: sibling(**_SHAPE, context_length=64))}

ZOO_ROWS = (ZooRow("The sibling", _PRESETS),)
'''
FORMAT = '''
"""The format of Llama under another name."""

from dataclasses import replace

from jaxformer.convert import llama
from jaxformer.convert.sample import GROUPED_QUERY, Sample

FORMATS = (replace(llama.FORMATS[0], model_type="sibling"),)
SAMPLES = {"sibling": Sample("sibling-tiny", "sibling", "LlamaForCausalLM", "LlamaConfig", GROUPED_QUERY)}
'''
REPORT = """
import json
from jaxformer.convert import FORMATS, SAMPLES
from jaxformer.layers import num_params
from jaxformer.models import FAMILIES, PRESETS, preset
from jaxformer.zoo import table

[row] = [line for line in table.markdown().splitlines() if "The sibling" in line]
report = {"row": row, "format": "sibling" in FORMATS, "sample": "sibling" in SAMPLES, "family": "sibling" in FAMILIES}
print(json.dumps(report | {"counts": [num_params(preset("sibling-tiny")), PRESETS["sibling-tiny"].num_params]}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A directory with a copy of the package to which the sibling model is added."""
    root = tmp_path_factory.mktemp("package")
    package = shutil.copytree(
        Path(jaxformer.__file__).parent, root / "jaxformer", ignore=shutil.ignore_patterns("__pycache__")
    )
    for part, source, line in (("models", MODEL, '    "vaswani",\n'), ("convert", FORMAT, '        "llama",\n')):
        (package / part / "sibling.py").write_text(source.lstrip())
        registry = package / part / "__init__.py"
        text = registry.read_text()
        assert text.count(line) == 1
        registry.write_text(text.replace(line, line + line.replace(line.strip(' ",\n'), "sibling")))
    return root


def run(package: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=package, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_zoo_presets_and_samples_include_the_new_model(package):
    report = json.loads(run(package, "-c", REPORT))
    assert report["family"]
    assert report["format"]
    assert report["sample"]
    assert report["counts"][0] == report["counts"][1]
    # No parity is recorded for the new model.
    assert report["row"] == (
        "| The sibling | decoder-only | sibling-tiny | 0.00603M | - | - | sibling | "
        + ", ".join(OBJECTIVES_OF_DECODERS)
        + " |"
    )


OBJECTIVES_OF_DECODERS = [
    config.model_fields["kind"].default
    for config in OBJECTIVE_CONFIGS
    if "decoder-only" in config.shapes  # the sibling is a Llama, which has all heads
]
DISCOVERED = {
    "models/test_presets.py": {
        "test_the_parameter_count_is_the_published_one[sibling-tiny]",
        "test_every_preset_is_valid_and_storable[sibling-tiny]",
    },
    "models/test_builder_parameters.py": {
        "test_signature_lists_all_parameters_by_their_common_names[sibling]",
        "test_heads_that_do_not_divide_the_width_are_rejected[sibling]",
    },
    "zoo/test_preset_structures.py": {"test_configs_differ_in_numbers_only[sibling]"},
    "zoo/test_parity.py": {"test_right_padded_rows[sibling]", "test_left_padded_rows[sibling]"},
    "zoo/test_cached.py": {"test_cached_logits_equal_the_full_forward_in_every_layout[sibling]"},
    "convert/test_formats.py": {
        "test_import_then_export_is_byte_identical[sibling]",
        "test_transformers_loads_exported_models[sibling]",
        "test_every_preset_round_trips_through_its_format[sibling-tiny]",
    },
}


@pytest.mark.slow  # imports torch and transformers in another process
def test_contract_tests_include_the_new_model(package):
    """The tests of what every family must do need no change."""
    options = ("-q", "-n", "0", "--collect-only", "-k", "sibling", "-p", "no:cacheprovider")
    paths = [str(TESTS / file) for file in DISCOVERED]
    output = run(package, "-m", "pytest", *options, "-c", str(TESTS.parent / "pyproject.toml"), *paths)
    collected = {line.rpartition("::")[2] for line in output.splitlines() if "::" in line}
    assert set().union(*DISCOVERED.values()) <= collected
