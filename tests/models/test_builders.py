"""Options of the builders beyond the published sizes: layer patterns, heads, decoders that differ from encoders."""

import pytest
from hypothesis import given, strategies as st

from jaxformer.config import AttentionConfig, BlockConfig, LinearScaling, MlpConfig, Rope
from jaxformer.layers import num_params
from jaxformer.models import preset
from jaxformer.models.bart import bart
from jaxformer.models.bert import bert
from jaxformer.models.distilbert import distilbert
from jaxformer.models.gemma import gemma, gemma2, gemma3
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.llama import llama
from jaxformer.models.marian import marian
from jaxformer.models.modernbert import modernbert
from jaxformer.models.qwen import qwen2, qwen3_moe
from jaxformer.models.roberta import roberta
from jaxformer.models.stacks import stack
from jaxformer.models.t5 import t5

SMALL = {"num_layers": 4, "embed_dim": 16, "num_heads": 4, "mlp_dim": 24, "vocab_size": 61}
BASE = {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "mlp_dim": 3072}


# ---------------------------------------------------------------- stacks
def block(dim: int) -> BlockConfig:
    return BlockConfig(attention=AttentionConfig(num_heads=1, head_dim=2), mlp=MlpConfig(dim=dim))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12))
def test_stack_preserves_the_list_of_layers(dims):
    blocks = [block(dim) for dim in dims]
    built = stack(blocks)
    assert built.num_layers == len(blocks)
    assert [built.block(layer) for layer in range(len(blocks))] == blocks


@pytest.mark.parametrize(
    ("dims", "first", "pattern"),
    [
        ([1, 1, 1], [], [1]),
        ([1, 2, 1, 2, 1], [], [1, 2]),
        ([3, 1, 1, 1], [3], [1]),
        ([3, 1, 1, 2, 1, 1, 2], [3], [1, 1, 2]),
        ([1, 1, 2, 2, 2], [1, 1], [2]),
    ],
)
def test_stack_finds_the_shortest_first_and_pattern(dims, first, pattern):
    built = stack([block(dim) for dim in dims])
    assert [b.mlp.dim for b in built.first] == first
    assert [b.mlp.dim for b in built.pattern] == pattern


# ---------------------------------------------------------------- layers that differ
def windows(model) -> list[int | None]:
    layers = model.decoder or model.encoder
    return [layers.block(layer).attention.window for layer in range(layers.num_layers)]


def thetas(model) -> list[float]:
    layers = model.decoder or model.encoder
    return [layers.block(layer).attention.position.theta for layer in range(layers.num_layers)]


def test_gemma_2_begins_with_a_local_layer():
    model = preset("gemma2-2b")
    assert windows(model) == [4096, None] * 13
    assert model.decoder.pattern[0].attention.softcap == 50.0
    assert model.head.softcap == 30.0


def test_gemma_2_27b_scales_logits_by_embed_dim_per_head_instead_of_head_dim():
    attention = preset("gemma2-27b").decoder.pattern[0].attention
    assert attention.scale == pytest.approx(144**-0.5)
    assert attention.head_dim == 128


def test_every_sixth_layer_of_gemma_3_is_global():
    model = preset("gemma3-1b")
    assert windows(model) == [512, 512, 512, 512, 512, None] * 4 + [512, 512]
    assert thetas(model) == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6] * 4 + [1e4, 1e4]
    assert model.decoder.pattern[0].attention.qk_norm.unit_offset


def test_only_the_global_layers_of_gemma_3_have_rope_scaling():
    pattern = preset("gemma3-4b").decoder.pattern
    assert [b.attention.position.scaling for b in pattern] == [None] * 5 + [LinearScaling(factor=8.0)]


def test_every_third_layer_of_modernbert_is_global_and_the_first_has_no_norm():
    model = preset("modernbert-base")
    assert windows(model) == ([None, 65, 65] * 8)[:22]
    assert thetas(model) == ([160_000.0, 10_000.0, 10_000.0] * 8)[:22]
    norms = [model.encoder.block(layer).attention_norm for layer in range(22)]
    assert norms == [False] + [True] * 21


def test_local_selects_the_layers_with_a_window():
    model = qwen2(**SMALL, window=8, local=[False, False, True, True])
    assert windows(model) == [None, None, 8, 8]
    assert windows(llama(**SMALL, window=8)) == [8] * 4
    assert windows(gemma3(**SMALL, head_dim=4, window=8, local=[True, False] * 2)) == [8, None] * 2
    assert windows(gemma2(**SMALL, head_dim=4, window=8, local=[False] * 4)) == [None] * 4
    assert windows(modernbert(**SMALL, window=8, local=[True] * 4)) == [8] * 4


@pytest.mark.parametrize("build", [llama, gemma, gemma2, gemma3, modernbert])
def test_local_of_another_length_than_num_layers_is_rejected(build):
    with pytest.raises(ValueError, match="local has 3 entries but num_layers=4"):
        build(**SMALL, local=[True] * 3)


def test_mlps_and_experts_exclude_each_other():
    shape = {name: value for name, value in SMALL.items() if name != "mlp_dim"}
    with pytest.raises(ValueError, match="mlp_dim=None and moe=None"):
        llama(**shape)
    experts = qwen3_moe(**SMALL, num_experts=4, top_k=2).decoder.pattern[0].mlp
    with pytest.raises(ValueError, match="set exactly one of them"):
        llama(**SMALL, moe=experts)


# ---------------------------------------------------------------- heads of encoders
def test_bert_with_both_heads_has_the_published_count():
    assert (
        num_params(bert(**BASE, masked_lm=True, num_classes=2)) == 110_106_428
    )  # the hub for google-bert/bert-base-uncased


def test_options_select_the_heads_of_an_encoder():
    assert bert(**SMALL).pooler is None
    assert bert(**SMALL, masked_lm=False).head is None
    assert bert(**SMALL, pooled=True).pooler.num_classes is None
    assert bert(**SMALL, num_classes=3).pooler.num_classes == 3
    assert bert(**SMALL, num_classes=3).head is None
    assert bert(**SMALL, num_classes=3, masked_lm=True).head == bert(**SMALL).head
    assert bert(**SMALL, num_classes=3, pooling="mean").pooler.pooling == "mean"
    assert distilbert(**SMALL, num_classes=3).pooler.transform.activation == "relu"
    assert modernbert(**SMALL, num_classes=3, pooling="mean").pooler.pooling == "mean"


@pytest.mark.parametrize(
    ("build", "auto", "values"),
    [
        (bert, "AutoModel", {"model_type": "bert"}),
        (bert, "AutoModelForSequenceClassification", {"model_type": "bert"}),
        (roberta, "AutoModelForSequenceClassification", {"model_type": "roberta", "max_position_embeddings": 514}),
        (distilbert, "AutoModelForSequenceClassification", {"model_type": "distilbert"}),
        (modernbert, "AutoModelForSequenceClassification", {"model_type": "modernbert"}),
        (bert, "AutoModelForTokenClassification", {"model_type": "bert"}),
        (roberta, "AutoModelForTokenClassification", {"model_type": "roberta", "max_position_embeddings": 514}),
        (distilbert, "AutoModelForTokenClassification", {"model_type": "distilbert"}),
        (modernbert, "AutoModelForTokenClassification", {"model_type": "modernbert"}),
    ],
)
def test_counts_of_poolers_and_classifiers_equal_transformers(build, auto, values):
    names = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    if values["model_type"] == "distilbert":
        names["hidden_dim"] = names.pop("intermediate_size")
    classes = {
        "AutoModel": {"pooled": True, "masked_lm": False},
        "AutoModelForSequenceClassification": {"num_classes": 5},
        "AutoModelForTokenClassification": {"num_tags": 5},
    }[auto]
    types = {"num_types": 2} if build is roberta else {}
    ours = build(**BASE, **types, **classes)
    assert num_params(ours) == transformers_count(auto, **values, **names, vocab_size=ours.vocab_size, num_labels=5)


# ---------------------------------------------------------------- options that a config.json may set
HF_LLAMA = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
HF_BART = {"d_model": 16, "vocab_size": 61, "encoder_layers": 4, "encoder_ffn_dim": 24, "encoder_attention_heads": 4}
HF_BART |= {"decoder_layers": 2, "decoder_ffn_dim": 40, "decoder_attention_heads": 2, "pad_token_id": 1}
HF_EQUAL_STACKS = {"decoder_layers": 4, "decoder_ffn_dim": 24, "decoder_attention_heads": 4}
HF_GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 4, "n_inner": 24}
DECODER_SIDE = {"num_decoder_layers": 2, "num_decoder_heads": 2, "decoder_mlp_dim": 40}
VARIED = {
    "llama": (
        lambda: llama(**SMALL, num_kv_heads=2, head_dim=6, bias=True, output_bias=True, mlp_bias=True, tied=True),
        ("AutoModelForCausalLM", {"model_type": "llama", **HF_LLAMA, "num_key_value_heads": 2, "head_dim": 6}),
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "gemma2": (
        lambda: gemma2(**SMALL, num_kv_heads=2, head_dim=6, bias=True, output_bias=True),
        ("AutoModelForCausalLM", {"model_type": "gemma2", **HF_LLAMA, "num_key_value_heads": 2, "head_dim": 6}),
        {"attention_bias": True},
    ),
    "modernbert": (
        lambda: modernbert(**SMALL, bias=True, mlp_bias=True, norm_bias=True, transform_bias=True, head_bias=False),
        ("AutoModelForMaskedLM", {"model_type": "modernbert", **HF_LLAMA, "pad_token_id": 0}),
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "decoder_bias": False},
    ),
    "t5": (
        lambda: t5(**SMALL, head_dim=6, num_decoder_layers=2, activation="silu", gated=True),
        ("AutoModelForSeq2SeqLM", {"model_type": "t5", "num_layers": 4, "num_decoder_layers": 2, "d_model": 16}),
        {"num_heads": 4, "d_kv": 6, "d_ff": 24, "feed_forward_proj": "gated-silu"},
    ),
    "bart": (
        lambda: bart(**SMALL, **DECODER_SIDE),
        ("AutoModelForSeq2SeqLM", {"model_type": "bart", **HF_BART}),
        {},
    ),
    "marian": (
        lambda: marian(**SMALL, **DECODER_SIDE),
        ("AutoModelForSeq2SeqLM", {"model_type": "marian", **HF_BART}),
        {},
    ),
}


@pytest.mark.parametrize(
    ("build", "values", "task"),
    [
        (llama, {"model_type": "llama", **HF_LLAMA}, "SequenceClassification"),
        (llama, {"model_type": "llama", **HF_LLAMA}, "TokenClassification"),
        (gpt2, HF_GPT2, "SequenceClassification"),
        (gpt2, HF_GPT2, "TokenClassification"),
        (bart, {"model_type": "bart", **HF_BART, **HF_EQUAL_STACKS}, "SequenceClassification"),
    ],
)
def test_counts_of_decoders_with_classes_equal_transformers(build, values, task):
    classes = {"num_classes": 5} if task == "SequenceClassification" else {"num_tags": 5}
    theirs = transformers_count(f"AutoModelFor{task}", **values | {"vocab_size": 61, "num_labels": 5})
    assert num_params(build(**SMALL, **classes)) == theirs


@pytest.mark.parametrize("name", VARIED)
def test_counts_of_models_with_options_equal_transformers(name):
    build, (auto, shape), varied = VARIED[name]
    assert num_params(build()) == transformers_count(auto, **shape | {"vocab_size": 61} | varied)


def test_rope_can_be_passed_to_the_builder():
    rope = Rope(theta=5e5, scaling=LinearScaling(factor=2.0))
    assert llama(**SMALL, rope=rope).decoder.pattern[0].attention.position == rope


def test_default_special_ids_of_marian_depend_on_the_vocabulary():
    special = marian(**SMALL).special
    assert (special.pad, special.decoder_start, special.eos) == (60, 60, (0,))
    assert marian(**SMALL, source_vocab_size=50).special.pad == 49
    assert marian(**SMALL, source_vocab_size=70).special.pad == 60


def transformers_count(auto: str, **values) -> int:
    from test_transformers_counts import count

    return count(auto, values)
