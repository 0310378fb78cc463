"""Families: each file holds a function that builds its `ModelConfig`, and published sizes by name."""

from jaxformer.config import ModelConfig
from jaxformer.errors import UserError
from jaxformer.models import gpt2, llama, vaswani

FAMILIES = {"gpt2": gpt2, "llama": llama, "vaswani": vaswani}
PRESETS = {name: build for family in FAMILIES.values() for name, build in family.PRESETS.items()}


def preset(name: str) -> ModelConfig:
    """A published model by name, such as `gpt2-124m`."""
    if name not in PRESETS:
        raise UserError(f"no preset '{name}'; there are: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()
