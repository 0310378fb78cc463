"""Families: each file holds functions that build its `ModelConfig`s, and published sizes by name."""

from jaxformer.config import ModelConfig
from jaxformer.errors import UserError
from jaxformer.models import (
    bart,
    bert,
    distilbert,
    gemma,
    gpt2,
    llama,
    marian,
    minilm,
    mistral,
    mixtral,
    modernbert,
    mt5,
    qwen,
    rnn,
    roberta,
    smollm2,
    t5,
    vaswani,
)

FAMILIES = {
    "bart": bart,
    "bert": bert,
    "distilbert": distilbert,
    "gemma": gemma,
    "gpt2": gpt2,
    "llama": llama,
    "marian": marian,
    "minilm": minilm,
    "mistral": mistral,
    "mixtral": mixtral,
    "modernbert": modernbert,
    "mt5": mt5,
    "qwen": qwen,
    "rnn": rnn,
    "roberta": roberta,
    "smollm2": smollm2,
    "t5": t5,
    "vaswani": vaswani,
}
PRESETS = {name: build for family in FAMILIES.values() for name, build in family.PRESETS.items()}


def preset(name: str) -> ModelConfig:
    """A published model by name, such as `gpt2-124m`."""
    if name not in PRESETS:
        raise UserError(f"no preset '{name}'; there are: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()
