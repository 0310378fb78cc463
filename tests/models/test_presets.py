"""Every preset in the registry is valid, can be stored, and has the published parameter count."""

import jax
import pytest

from jaxformer.config import ModelConfig, apply_overrides
from jaxformer.errors import UserError
from jaxformer.layers import num_params
from jaxformer.models import FAMILIES, PRESETS, preset

# The smallest and the largest preset of each row of the zoo table.
ENDS = {list(row.presets)[i] for family in FAMILIES.values() for row in family.ZOO_ROWS for i in (0, -1)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ENDS else pytest.mark.slow) for name in sorted(PRESETS)]
)
def test_the_parameter_count_is_the_published_one(name):
    assert num_params(preset(name)) == PRESETS[name].num_params


@pytest.mark.parametrize(("name", "millions"), [("vaswani-base", 65), ("vaswani-big", 213)])
def test_our_count_agrees_with_the_table_of_the_paper(name, millions):
    assert PRESETS[name].num_params / 1e6 == pytest.approx(millions, rel=0.035)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_presets_named_after_it(family):
    module = FAMILIES[family]
    assert module.__name__ == f"jaxformer.models.{family}"
    names = [name for row in module.ZOO_ROWS for name in row.presets]
    assert names
    assert all(row.title and row.presets for row in module.ZOO_ROWS)
    assert all(name.startswith(family) for name in names)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_and_storable(name):
    config = preset(name)
    assert isinstance(config, ModelConfig)
    assert ModelConfig.model_validate(config.model_dump()) == config, "model_copy does not validate"
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    # A larger size, because special ids may be at the end of the vocabulary.
    assert apply_overrides(config, ["vocab_size=300000"]).vocab_size == 300_000
    assert preset(name) == config
    assert hash(preset(name)) == hash(config)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_all_layers_of_a_preset_have_the_same_heads(name):
    """The parameter count depends on the total width of the heads, but not on how many heads there are."""
    config = preset(name)
    blocks = [block for stack in (config.encoder, config.decoder) for block in getattr(stack, "blocks", ())]
    attentions = [a for block in blocks for a in (block.attention, block.cross_attention) if a is not None]
    assert len({(attention.num_heads, attention.head_dim) for attention in attentions}) <= 1


def test_no_two_presets_share_a_name():
    rows = [row for module in FAMILIES.values() for row in module.ZOO_ROWS]
    assert len(PRESETS) == sum(len(row.presets) for row in rows)


def test_the_error_of_an_unknown_preset_lists_all():
    with pytest.raises(UserError, match=r"no preset 'gpt2-huge'; there are: .*gpt2-124m.*vaswani-base"):
        preset("gpt2-huge")


def test_counting_parameters_allocates_no_arrays():
    before = len(jax.live_arrays())
    assert num_params(preset("llama3-70b")) > 7e10
    assert len(jax.live_arrays()) == before
