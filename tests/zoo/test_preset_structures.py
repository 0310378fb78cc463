"""Builders and importer agree: a preset and the imported samples of its architecture differ only in sizes."""

from typing import Any

import jax
import pytest

from jaxformer.config import ModelConfig
from jaxformer.convert import SAMPLES
from jaxformer.layers import abstract_params
from jaxformer.models import FAMILIES, preset

HEADS = ("head", "pooler")
# Dropout rates and initial values only affect training; ids and lengths depend on the tokenizer and the user.
UNCOMPARED = {"init", "dropout", "special", "context_length", "num_layers", "load_balance"}
# Samples of a variant that no preset has.
VARIANTS = {"marian two vocabularies"}
ALIKE = [name for name in SAMPLES if name not in VARIANTS]


def outline(tree: Any) -> Any:
    """A config with every number replaced by the word "number"."""
    if isinstance(tree, dict):
        return {name: outline(value) for name, value in tree.items() if name not in UNCOMPARED}
    if isinstance(tree, list):
        return [outline(item) for item in tree]
    return "number" if isinstance(tree, int | float) and not isinstance(tree, bool) else tree


def test_every_family_with_a_format_is_compared():
    compared = {sample.preset for sample in SAMPLES.values()}
    families = {family for family, module in FAMILIES.items() for row in module.ZOO_ROWS if compared & set(row.presets)}
    assert set(FAMILIES) - families == {"rnn", "vaswani"}  # not in transformers


def test_every_compared_preset_has_a_sample_with_its_heads(pair_of):
    """Otherwise heads would not be compared, because some samples have another head than their preset."""
    alike = {sample.preset for name, sample in SAMPLES.items() if _has_same_heads(sample.preset, pair_of(name).config)}
    assert alike == {sample.preset for sample in SAMPLES.values()}


def _has_same_heads(name: str, config: ModelConfig) -> bool:
    return all((getattr(preset(name), head) is None) == (getattr(config, head) is None) for head in HEADS)


def _without_other_heads(tree: dict[str, Any], name: str, config: ModelConfig) -> dict[str, Any]:
    left_out = () if _has_same_heads(name, config) else HEADS
    return {key: value for key, value in tree.items() if key not in left_out}


@pytest.mark.slow  # implied by the test of configs below
@pytest.mark.parametrize("name", ALIKE)
def test_parameters_have_the_same_names_and_axes(name, pair_of):
    published, config = SAMPLES[name].preset, pair_of(name).config
    (ours, our_axes), (theirs, their_axes) = (
        [_without_other_heads(tree, published, config) for tree in abstract_params(model)]
        for model in (preset(published), config)
    )
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert our_axes == their_axes
    assert jax.tree.map(lambda leaf: leaf.ndim, ours) == jax.tree.map(lambda leaf: leaf.ndim, theirs)


@pytest.mark.parametrize("name", ALIKE)
def test_configs_differ_in_numbers_only(name, pair_of):
    published, config = SAMPLES[name].preset, pair_of(name).config
    ours, theirs = (
        _without_other_heads(outline(model.model_dump(mode="json")), published, config)
        for model in (preset(published), config)
    )
    assert ours == theirs
