"""Model families: each file has functions that build a `ModelConfig`, and presets of the published sizes."""

from importlib import import_module
from types import ModuleType

from jaxformer.config import ModelConfig
from jaxformer.errors import UserError
from jaxformer.models.presets import Preset, ZooRow as ZooRow

# One line per family file, in the order of the zoo table.
_NAMES = (
    "vaswani",
    "t5",
    "mt5",
    "bart",
    "marian",
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "gemma",
    "qwen",
    "smollm2",
    "bert",
    "roberta",
    "distilbert",
    "minilm",
    "modernbert",
    "rnn",
)
FAMILIES: dict[str, ModuleType] = {name: import_module(f"jaxformer.models.{name}") for name in _NAMES}
PRESETS: dict[str, Preset] = {
    name: preset for family in FAMILIES.values() for row in family.ZOO_ROWS for name, preset in row.presets.items()
}


def preset(name: str) -> ModelConfig:
    """The config of a published model by name, for example `gpt2-124m`."""
    if name not in PRESETS:
        raise UserError(f"no preset '{name}'; there are: {', '.join(sorted(PRESETS))}")
    return PRESETS[name].build()
