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


def recurrent_count(dim: int, num_gates: int, vocab_size: int = 10_000) -> int:
    """arXiv:1409.2329: two layers and embeddings of one width (section 4.1), equations of section 3.1, untied."""
    layer = num_gates * (2 * dim * dim + dim)  # an affine map of the state before and of the input
    return vocab_size * dim + 2 * layer + dim * vocab_size + vocab_size


def gemma3_text(total: int, embed_dim: int) -> int:
    """Without the parts that see: SigLIP at 896 pixels (arXiv:2303.15343) and the norm and projection after it."""
    return total - 416_866_032 - (1152 + 1152 * embed_dim)


# Tied weights count once, what is not trained (sinusoids, rotary tables, position ids) not at all. Beside each is where
# we read the number; "the hub" is `safetensors.total` of a model of huggingface.co, "Keras" the `params` of the presets
# in github.com/keras-team/keras-hub. All of them are counted again by transformers in test_transformers_counts.py.
PUBLISHED = {
    # num_parameters() of facebook/bart-{base,large}, and the bias on the logits, which is a buffer there.
    "bart-base": 139_420_416 + 50_265,
    "bart-large": 406_291_456 + 50_265,
    # The hub for google-bert/bert-base-uncased, and the tensors of -large, less the pooler and the next-sentence head.
    "bert-base": 110_106_428 - (768 * 768 + 768) - (768 * 2 + 2),
    "bert-large": 336_226_108 - (1024 * 1024 + 1024) - (1024 * 2 + 2),
    # num_parameters() of distilbert-base-uncased with its masked head.
    "distilbert-base": 66_985_530,
    # Keras, for gemma3-27b its MedGemma of the same shape; the hub for google/gemma-3-{1b,4b,12b}-it.
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": gemma3_text(4_300_079_472, embed_dim=2560),
    "gemma3-12b": gemma3_text(12_187_325_040, embed_dim=3840),
    "gemma3-27b": gemma3_text(27_432_406_640, embed_dim=5376),
    # num_parameters() of the released checkpoints (huggingface.co/openai-community/gpt2, -medium, -large, -xl);
    # the paper's own 117M and 345M were corrected to 124M and 355M in github.com/openai/gpt-2.
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    # The hub for meta-llama/Llama-2-{7b,13b,70b}-hf, less the 64 rotary frequencies saved with every layer.
    "llama2-7b": 6_738_417_664 - 32 * 64,
    "llama2-13b": 13_015_866_880 - 40 * 64,
    "llama2-70b": 68_976_653_312 - 80 * 64,
    # The hub for meta-llama/Llama-3.1-{8B,70B,405B}, 3.2-{1B,3B}; 3.0 has the shapes of 3.1.
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    # No count was found: that of transformers for the published config.json, and the bias on the logits.
    "marian-opus-en-de": 73_886_208 + 58_101,
    # The hub for sentence-transformers/all-MiniLM-{L6,L12}-v2, less the 512 position ids saved with them.
    "minilm-l6": 22_713_728 - 512,
    "minilm-l12": 33_360_512 - 512,
    # general.parameter_count of GGUF files of mistralai/Mistral-7B-v0.1; the paper has no exact count.
    "mistral-7b": 7_241_732_096,
    # The hub for mistralai/Mixtral-8x7B-Instruct-v0.1, and for mistral-community/Mixtral-8x22B-v0.1.
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    # The tensors of answerdotai/ModernBERT-{base,large}, which have the masked head.
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    # num_parameters() of google/mt5-{small,base}. For the others no exact count was found: that of transformers for the
    # published config.json; table 1 of the paper says 1.2B, 3.7B and 13B.
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    # The hub for Qwen/Qwen2.5-{0.5B,1.5B,3B,7B,32B}-Instruct, n_params of GGUF files for 14B, Keras for 72B.
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    # The hub, where 0.6B and 1.7B hold their tied output twice; Keras for 14B, general.parameter_count for 30B-A3B.
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "rnn-elman-small": recurrent_count(200, num_gates=1),
    "rnn-lstm-small": recurrent_count(200, num_gates=4),
    "rnn-lstm-medium": recurrent_count(650, num_gates=4),
    "rnn-lstm-large": recurrent_count(1500, num_gates=4),
    # The float32 numbers in roberta-{base,large}, in the table of Hugging Face's page on parsing safetensors metadata.
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    # The hub for HuggingFaceTB/SmolLM2-{135M,360M,1.7B}-Instruct.
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    # num_parameters() of google-t5/t5-*, and Keras for all but 11B. Their files hold 32 * num_heads more: a bias by
    # distance for the decoder's cross-attention that nothing reads.
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    # Keras for base, xl and xxl, training logs of T5X for small and large; Flan-T5's xl has the same count on the hub.
    "t5v1.1-small": 76_961_152,
    "t5v1.1-base": 247_577_856,
    "t5v1.1-large": 783_150_080,
    "t5v1.1-xl": 2_849_757_184,
    "t5v1.1-xxl": 11_135_332_352,
    # Table 3 of the paper says 65M and 213M; it does not say how they were counted.
    "vaswani-base": vaswani_count(num_layers=6, embed_dim=512, mlp_dim=2048),
    "vaswani-big": vaswani_count(num_layers=6, embed_dim=1024, mlp_dim=4096),
}

# What all heads are wide together, where it is not embed_dim.
HEADS_WIDTH = {
    "gemma-7b": 4096,
    "gemma2-2b": 2048,
    "gemma2-9b": 4096,
    "gemma2-27b": 4096,
    "gemma3-270m": 1024,
    "gemma3-1b": 1024,
    "gemma3-4b": 2048,
    "gemma3-12b": 4096,
    "gemma3-27b": 4096,
    "mt5-small": 384,
    "qwen3-0.6b": 2048,
    "qwen3-4b": 4096,
    "qwen3-32b": 8192,
    "qwen3-30b-a3b": 4096,
    "qwen3-235b-a22b": 8192,
    "t5-3b": 4096,
    "t5-11b": 16_384,
    "t5v1.1-small": 384,
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
    # Not smaller: special ids may stand at the end of the vocabulary.
    assert apply_overrides(config, ["vocab_size=300000"]).vocab_size == 300_000
    assert preset(name) == config
    assert hash(preset(name)) == hash(config)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_heads_cover_the_embedding_or_say_what_they_do(name):
    config = preset(name)
    assert HEADS_WIDTH.get(name) != config.embed_dim
    for stack in (config.encoder, config.decoder):
        for block in getattr(stack, "blocks", ()):  # a recurrent stack has none
            attentions = filter(None, (block.attention, block.cross_attention))
            width = HEADS_WIDTH.get(name, config.embed_dim)
            assert all(attention.num_heads * attention.head_dim == width for attention in attentions)


def test_no_two_presets_share_a_name():
    assert len(PRESETS) == sum(len(module.PRESETS) for module in FAMILIES.values())


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(UserError, match=r"no preset 'gpt2-huge'; there are: .*gpt2-124m.*vaswani-base"):
        preset("gpt2-huge")


def test_counting_the_largest_allocates_nothing():
    before = len(jax.live_arrays())
    assert num_params(preset("llama3-70b")) > 7e10
    assert len(jax.live_arrays()) == before
