"""Every family and every published size, found by themselves: valid, storable, and with the published count."""

import jax
import pytest

from jaxformer.config import ModelConfig, apply_overrides
from jaxformer.errors import UserError
from jaxformer.layers import num_params
from jaxformer.models import FAMILIES, PRESETS, preset


def vaswani_count(num_layers: int, embed_dim: int, mlp_dim: int, vocab_size: int = 37_000) -> int:
    """arXiv:1706.03762: sections 3.1 to 3.4 for the parts, section 5.1 for the shared vocabulary of about 37,000."""
    attention = 4 * embed_dim**2  # W^Q, W^K, W^V of all heads and W^O: 3.2.2, no biases
    feed_forward = 2 * embed_dim * mlp_dim + mlp_dim + embed_dim  # W_1, W_2, b_1, b_2: equation 2
    norm = 2 * embed_dim  # gain and bias after every sub-layer: 3.1
    encoder = num_layers * (attention + feed_forward + 2 * norm)
    decoder = num_layers * (2 * attention + feed_forward + 3 * norm)
    return vocab_size * embed_dim + encoder + decoder  # one table for source, target and output: 3.4


PUBLISHED = {
    # num_parameters() of the released checkpoints (huggingface.co/openai-community/gpt2, -medium, -large, -xl);
    # the paper's own 117M and 345M were corrected to 124M and 355M in github.com/openai/gpt-2.
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    # "Model size" of the safetensors files of huggingface.co/meta-llama/Llama-2-{7b,13b,70b}-hf.
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    # The same of huggingface.co/meta-llama/Meta-Llama-3-{8B,70B}.
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    # Table 3 of the paper says 65M and 213M; it does not say how they were counted.
    "vaswani-base": vaswani_count(num_layers=6, embed_dim=512, mlp_dim=2048),
    "vaswani-big": vaswani_count(num_layers=6, embed_dim=1024, mlp_dim=4096),
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_parameter_count_is_the_published_one(name):
    assert name in PUBLISHED, f"{name} has no published count yet: add it to PUBLISHED, with its source"
    assert num_params(preset(name)) == PUBLISHED[name]


def test_the_table_names_nothing_that_is_gone():
    assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize(("name", "millions"), [("vaswani-base", 65), ("vaswani-big", 213)])
def test_the_formula_agrees_with_the_paper_s_table(name, millions):
    assert PUBLISHED[name] / 1e6 == pytest.approx(millions, rel=0.035)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_presets_named_after_it(family):
    module = FAMILIES[family]
    assert module.__name__ == f"jaxformer.models.{family}"
    assert module.PRESETS
    assert all(name.startswith(family) and PRESETS[name] is build for name, build in module.PRESETS.items())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_valid_and_storable(name):
    config = preset(name)
    assert isinstance(config, ModelConfig)
    assert ModelConfig.model_validate(config.model_dump()) == config, "model_copy skips validation"
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    assert apply_overrides(config, ["vocab_size=99"]).vocab_size == 99
    assert preset(name) == config
    assert hash(preset(name)) == hash(config)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_heads_cover_the_embedding(name):
    config = preset(name)
    for stack in filter(None, (config.encoder, config.decoder)):
        for block in stack.pattern:
            assert block.attention.num_heads * block.attention.head_dim == config.embed_dim


def test_no_two_presets_share_a_name():
    assert len(PRESETS) == sum(len(module.PRESETS) for module in FAMILIES.values())


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(UserError, match=r"no preset 'gpt2-huge'; there are: .*gpt2-124m.*vaswani-base"):
        preset("gpt2-huge")


def test_counting_the_largest_allocates_nothing():
    before = len(jax.live_arrays())
    assert num_params(preset("llama3-70b")) > 7e10
    assert len(jax.live_arrays()) == before
