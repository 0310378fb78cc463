"""Builders and importer agree: a published preset and the sample of its architecture are one model but for its size."""

from typing import Any

import jax
import pytest

from jaxformer.convert import FORMATS, SAMPLES
from jaxformer.layers import abstract_params
from jaxformer.models import FAMILIES, preset

PRESETS = {
    "gpt2": "gpt2-124m",
    "llama": "llama3.1-8b",
    "smollm2": "smollm2-135m",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "gemma": "gemma-2b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
    "qwen2.5": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "qwen3-moe": "qwen3-30b-a3b",
    "t5": "t5-small",
    "t5v1.1": "t5v1.1-small",
    "mt5": "mt5-small",
    "bart": "bart-base",
    "marian": "marian-opus-en-de",
    "bert": "bert-base",
    "minilm": "minilm-l6",
    "roberta": "roberta-base",
    "distilbert": "distilbert-base",
    "modernbert": "modernbert-base",
}
# Rates and first values matter to training alone; ids and lengths are the tokenizer's and the user's.
UNCOMPARED = {"init", "dropout", "special", "context_length", "num_layers", "load_balance"}


def outline(tree: Any) -> Any:
    """A config with every number replaced by the fact that it is one."""
    if isinstance(tree, dict):
        return {name: outline(value) for name, value in tree.items() if name not in UNCOMPARED}
    if isinstance(tree, list):
        return [outline(item) for item in tree]
    return "number" if isinstance(tree, int | float) and not isinstance(tree, bool) else tree


def test_every_family_with_a_format_is_compared():
    compared = {family for family, module in FAMILIES.items() if set(module.PRESETS) & set(PRESETS.values())}
    assert {format.family for format in FORMATS.values()} <= compared
    assert set(FAMILIES) - compared == {"rnn", "vaswani"}  # transformers has neither
    assert set(PRESETS) <= set(SAMPLES)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_have_the_same_names_and_axes(name, pair_of):
    (published, published_axes), (sample, sample_axes) = (
        abstract_params(model) for model in (preset(PRESETS[name]), pair_of(name).config)
    )
    assert jax.tree.structure(published) == jax.tree.structure(sample)
    assert published_axes == sample_axes
    assert jax.tree.map(lambda leaf: leaf.ndim, published) == jax.tree.map(lambda leaf: leaf.ndim, sample)


@pytest.mark.parametrize("name", PRESETS)
def test_configs_differ_in_numbers_only(name, pair_of):
    published, sample = (outline(m.model_dump(mode="json")) for m in (preset(PRESETS[name]), pair_of(name).config))
    assert published == sample
