"""Conversion between Hugging Face directories and jaxformer models, in both directions."""

from importlib import import_module

from jaxformer.convert.format import Format
from jaxformer.convert.sample import Sample

# The order matters: export uses the first format that can represent a model.
_MODULES = [
    import_module(f"jaxformer.convert.{name}")
    for name in (
        "gpt2",
        "llama",
        "mistral",
        "mixtral",
        "qwen",
        "gemma",
        "t5",
        "bart",
        "bert",
        "roberta",
        "distilbert",
        "modernbert",
    )
]
FORMATS: dict[str, Format] = {format.model_type: format for module in _MODULES for format in module.FORMATS}
SAMPLES: dict[str, Sample] = {name: sample for module in _MODULES for name, sample in module.SAMPLES.items()}
