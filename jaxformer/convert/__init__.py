"""Hugging Face directories to runs and back."""

from importlib import import_module

from jaxformer.convert.format import Format
from jaxformer.convert.sample import Sample

# One line per file of formats. Export takes the first format that can hold a model, so the order matters.
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
