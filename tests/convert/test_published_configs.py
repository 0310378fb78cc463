"""Published config.json files, old and new: each is read as the preset of the same name."""

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from jaxformer.config import (
    BandScaling,
    DynamicNtkScaling,
    LinearScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from jaxformer.convert import FORMATS
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import ModelFiles
from jaxformer.data.tokenizer import special_ids
from jaxformer.exchange import export_run, import_run
from jaxformer.models import preset
from jaxformer.run import load

BOOKKEEPING = {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True, "_name_or_path": "x"}


def read(values: dict, *names: str) -> ModelConfig:
    """Read the model of a config.json; `names` are the tensor names in its weight file, if they matter."""
    fields = Fields(BOOKKEEPING | {k: v for k, v in values.items() if k != "model_type"}, "config.json")
    model = FORMATS[values["model_type"]].read(fields, ModelFiles(values["architectures"][0], frozenset(names)))
    fields.finish()
    return model


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02,
    "pretraining_tp": 1, "attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None,
}  # fmt: skip
BART = {
    "architectures": ["BartForConditionalGeneration"], "model_type": "bart", "_num_labels": 3,
    "is_encoder_decoder": True, "force_bos_token_to_be_generated": False, "save_step": 9,
    "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": False,
    "attention_dropout": 0.1, "bos_token_id": 0, "classif_dropout": 0.1, "classifier_dropout": 0.0,
    "decoder_layerdrop": 0.0, "decoder_start_token_id": 2, "early_stopping": True, "encoder_layerdrop": 0.0,
    "eos_token_id": 2, "forced_eos_token_id": 2, "forced_bos_token_id": 0, "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "init_std": 0.02,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, "max_position_embeddings": 1024,
    "no_repeat_ngram_size": 3, "normalize_before": False, "num_beams": 4, "pad_token_id": 1, "scale_embedding": False,
    "task_specific_params": {"summarization": {"length_penalty": 1.0}}, "vocab_size": 50265,
    "normalize_embedding": True, "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096,
    "decoder_layers": 12, "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12,
    "num_hidden_layers": 12,
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip
T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "decoder_start_token_id": 0,
    "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06, "n_positions": 512, "output_past": True, "pad_token_id": 0,
    "relative_attention_num_buckets": 32, "d_kv": 64, "d_model": 512,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip

PUBLISHED = {
    "gpt2-124m": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama3.1-8b": LLAMA | {
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "vocab_size": 128256, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "smollm2-135m": LLAMA | {
        "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "bos_token_id": 1, "eos_token_id": 2,
        "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen2.5-0.5b": QWEN | {
        "hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        "use_mrope": False, "vocab_size": 151936,
    },
    "qwen3-0.6b": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
        "eos_token_id": 151645, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "gemma-2b": {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "attention_bias": False, "bos_token_id": 2,
        "attention_dropout": 0.0, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192,
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
    },
    "gemma2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False, "bos_token_id": 2,
        "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "t5-small": T5 | {
        "d_ff": 2048, "num_heads": 8, "num_layers": 6, "vocab_size": 32128,
        "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    },
    "t5v1.1-small": T5 | {
        "d_ff": 1024, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8,
        "tie_word_embeddings": False, "vocab_size": 32128,
    },
    "mt5-small": T5 | {
        "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "d_ff": 1024,
        "feed_forward_proj": "gated-gelu", "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8,
        "tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer", "vocab_size": 250112,
    },
    "bart-large": BART | {"extra_pos_embeddings": 2, "static_position_embeddings": False},
    "marian-opus-en-de": BART | {
        "architectures": ["MarianMTModel"], "model_type": "marian", "activation_dropout": 0.0,
        "activation_function": "swish", "attention_dropout": 0.0, "bad_words_ids": [[58100]], "d_model": 512,
        "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_start_token_id": 58100,
        "encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "encoder_layers": 6, "eos_token_id": 0,
        "extra_pos_embeddings": 58101, "forced_bos_token_id": None, "forced_eos_token_id": 0, "max_length": 512,
        "max_position_embeddings": 512, "normalize_embedding": False, "num_hidden_layers": 6, "pad_token_id": 58100,
        "scale_embedding": True, "static_position_embeddings": True, "vocab_size": 58101,
    },
    "bert-base": BERT | {
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
    },
    "roberta-base": BERT | {
        "architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "bos_token_id": 0, "eos_token_id": 2,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1,
        "vocab_size": 50265,
    },
    "distilbert-base": {
        "architectures": ["DistilBertForMaskedLM"], "model_type": "distilbert", "activation": "gelu",
        "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02,
        "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
    },
    "modernbert-base": {
        "architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False,
        "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True,
        "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
        "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
        "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False, "norm_eps": 1e-05,
        "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
        "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": True,
        "vocab_size": 50368,
    },
}  # fmt: skip
NAMES = {"t5v1.1-small": ("lm_head.weight",), "mt5-small": ("lm_head.weight",)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_equals_the_preset(name):
    values = PUBLISHED[name]
    model = read(values, *NAMES.get(name, ()))
    assert computation(model) == computation(preset(name))
    eos = values.get("eos_token_id")
    assert model.special.eos == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))
    for role in ("bos", "pad", "decoder_start"):
        assert getattr(model.special, role) == values.get(f"{role}_token_id")


# Presets define no special ids, and training settings may differ.
NOT_COMPARED = {"special", "dropout", "init", "load_balance", "router_z"}


def computation(tree):
    """Return the fields that determine the model's output."""
    if isinstance(tree, ModelConfig):
        return computation(tree.model_dump(mode="json"))
    if isinstance(tree, list):
        return [computation(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {name: computation(value) for name, value in tree.items() if name not in NOT_COMPARED}


def test_minilm_config_equals_the_preset():
    values = BERT | {"architectures": ["BertModel"], "hidden_size": 384, "intermediate_size": 1536}
    values |= {"num_hidden_layers": 6}
    model = read(values, "embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
    assert computation(model) == computation(preset("minilm-l6"))


# ---------------------------------------------------------------- defaults of num_key_value_heads
GROUPED = {
    values["model_type"]: values | {"hidden_size": 4096, "num_attention_heads": 64}
    for values in PUBLISHED.values()
    if "num_key_value_heads" in values
}


@pytest.mark.parametrize("model_type", GROUPED)
def test_default_number_of_key_value_heads(model_type):
    values = {name: value for name, value in GROUPED[model_type].items() if name != "num_key_value_heads"}
    theirs = transformers.AutoConfig.for_model(**values)
    assert read(values).decoder.pattern[0].attention.kv_heads == theirs.num_key_value_heads


@pytest.mark.parametrize("model_type", GROUPED)
def test_null_means_one_key_value_head_per_query_head(model_type):
    values = GROUPED[model_type] | {"num_key_value_heads": None}
    assert read(values).decoder.pattern[0].attention.kv_heads == 64
    if model_type in ("llama", "qwen2", "qwen3"):  # the config classes of the others reject null
        assert transformers.AutoConfig.for_model(**values).num_key_value_heads == 64


# ---------------------------------------------------------------- old and new fields
SMALL = LLAMA | {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("older", "newer", "wanted"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, Rope(theta=5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            Rope(scaling=LinearScaling(factor=4.0)),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            Rope(scaling=DynamicNtkScaling(factor=2.0, original_length=4096)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4},
            Rope(scaling=YarnScaling(factor=4.0, original_length=1024)),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "type": "llama3", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
                },
            },
            {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
            },
            Rope(
                theta=5e5, scaling=BandScaling(factor=8.0, low_factor=1.0, high_factor=4.0, original_length=512)
            ),
        ),
    ],
    ids=["plain", "linear", "dynamic", "yarn", "bands"],
)  # fmt: skip
def test_rope_in_old_and_new_fields(older, newer, wanted):
    for fields in (older, {"rope_parameters": newer}):
        assert read(SMALL | fields).decoder.pattern[0].attention.position == wanted


def test_gemma3_rope_scaling():
    """The larger published models scale RoPE in the global layers only."""
    model = read(PUBLISHED["gemma3-1b"] | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    first, sixth = (model.decoder.block(i).attention for i in (0, 5))
    assert (first.window, first.position) == (512, Rope(theta=1e4))
    assert (sixth.window, sixth.position) == (None, Rope(theta=1e6, scaling=LinearScaling(factor=8.0)))


def test_qwen_with_a_sliding_window():
    values = PUBLISHED["qwen2.5-0.5b"] | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 20}
    windows = [read(values).decoder.block(i).attention.window for i in range(24)]
    assert windows == [None] * 20 + [512] * 4


def test_special_ids():
    assert read(SMALL).special.eos == (2,)  # the default of transformers
    assert read(SMALL | {"bos_token_id": None, "eos_token_id": None}).special.model_dump() == {
        "bos": None, "eos": (), "pad": None, "decoder_start": None,
    }  # fmt: skip
    assert read(SMALL | {"eos_token_id": [5, 6], "pad_token_id": -1}).special.model_dump() == {
        "bos": 1, "eos": (5, 6), "pad": None, "decoder_start": None,
    }  # fmt: skip


def test_special_ids_outside_the_vocabulary_are_ignored_with_one_warning():
    """transformers accepts such ids, and tiny test models often keep the ids of the large model."""
    values = SMALL | {"bos_token_id": 1, "eos_token_id": [2, 50_256], "pad_token_id": 96}
    with pytest.warns(
        UserWarning, match="eos_token_id = 50256, pad_token_id = 96 outside the vocabulary of 96"
    ) as seen:
        special = read(values).special
    assert len(seen) == 1
    assert (special.bos, special.eos, special.pad) == (1, (2,), None)


def test_a_directory_with_special_ids_outside_the_vocabulary_loads(copy_sample, sample_run):
    source = copy_sample("gpt2")
    source.set(bos_token_id=50_256, eos_token_id=50_256)
    (source.path / "generation_config.json").unlink()
    with pytest.warns(UserWarning, match=r"config\.json: bos_token_id = 50256, eos_token_id = 50256 outside"):
        run = load(source.path)
    assert (run.config.model.special.bos, run.config.model.special.eos) == (None, ())
    np.testing.assert_array_equal(run.params["embedding"]["tokens"], sample_run("gpt2").params["embedding"]["tokens"])


def test_a_tokenizer_without_eos_leaves_it_to_the_model(copy_sample, tmp_path):
    """The model's eos comes from config.json or generation_config.json, also after import and export."""
    source = copy_sample("llama")
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")).save(
        str(source.path / "tokenizer.json")
    )
    assert eos_ids(source.path) == (2,)
    (source.path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load(source.path).tokenizer.eos_id is None
    assert eos_ids(source.path) == (7, 9)
    import_run(source.path, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    assert eos_ids(tmp_path / "out") == (7, 9)


def eos_ids(directory) -> tuple[int, ...]:
    run = load(directory)
    return special_ids(run.config.model, run.tokenizer).eos


def test_generation_config_overrides_config(copy_sample):
    source = copy_sample("llama")
    (source.path / "generation_config.json").write_text(
        '{"eos_token_id": [2, 7], "temperature": 0.6, "pad_token_id": 3}'
    )
    special = load(source.path).config.model.special
    assert (special.eos, special.pad, special.bos) == ((2, 7), 3, 1)


# ---------------------------------------------------------------- weight files of older releases
def test_gpt2_file_of_the_hub(copy_sample, sample_run):
    """Its tensor names have no prefix, and every layer has a causal mask."""
    source = copy_sample("gpt2")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in source.tensors().items()}
    mask = np.tril(np.ones((1, 1, 64, 64), np.float32))
    tensors |= {f"h.{i}.attn.bias": mask for i in range(3)} | {"h.0.attn.masked_bias": np.float32([-1e4])}
    source.put(tensors)
    assert_same(source.path, sample_run("gpt2"))


def test_ignored_buffers_may_have_any_dtype(copy_sample, sample_run):
    """Masks and position ids are not read."""
    source = copy_sample("gpt2")
    source.put(source.tensors() | {f"transformer.h.{i}.attn.bias": np.ones((1, 1, 4, 4), np.bool_) for i in range(3)})
    assert_same(source.path, sample_run("gpt2"))
    source = copy_sample("bert")
    source.put(source.tensors() | {"bert.embeddings.position_ids": np.arange(64)[None]})
    assert_same(source.path, sample_run("bert"))


def test_bert_file_of_google(copy_sample, sample_run):
    """It has norms with gamma and beta, a next-sentence prediction head, and copies of tied weights."""
    source = copy_sample("bert")
    tensors = {}
    for name, tensor in source.tensors().items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[old] = tensor
    tensors["cls.seq_relationship.weight"] = np.zeros((2, 32), np.float32)
    tensors["cls.seq_relationship.bias"] = np.zeros(2, np.float32)
    tensors["bert.pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    tensors["bert.pooler.dense.bias"] = np.zeros(32, np.float32)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    source.put(tensors)
    assert_same(source.path, sample_run("bert"))


def test_bert_file_read_as_a_model_without_a_head(copy_sample, sample_run):
    """The tensors of the heads in the file are ignored."""
    source = copy_sample("bert")
    source.set(architectures=["BertModel"])
    run = load(source.path)
    assert (run.config.model.head, run.config.model.pooler) == (None, None)
    np.testing.assert_array_equal(run.params["embedding"]["tokens"], sample_run("bert").params["embedding"]["tokens"])


def test_llama_file_with_rope_frequencies(copy_sample, sample_run):
    source = copy_sample("llama")
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(3)}
    source.put(source.tensors() | frequencies)
    assert_same(source.path, sample_run("llama"))


def test_t5_file_with_copies_of_the_embedding(copy_sample, sample_run):
    source = copy_sample("t5v1.1")
    tensors = source.tensors()
    shared = tensors["shared.weight"]
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {"encoder.embed_tokens.weight": shared, "decoder.embed_tokens.weight": shared}
    save_file(tensors | copies | {unused: np.zeros((8, 4), np.float32)}, source.weights)
    assert "lm_head.weight" in load_file(source.weights)
    assert_same(source.path, sample_run("t5v1.1"))
    assert not load(source.path).config.model.head.tied


def test_marian_file_with_sinusoidal_positions(copy_sample, sample_run):
    source = copy_sample("marian")
    table = np.zeros((64, 32), np.float32)
    shared = source.tensors()["model.shared.weight"]
    tables = {f"model.{side}.embed_positions.weight": table for side in ("encoder", "decoder")}
    copies = {f"model.{side}.embed_tokens.weight": shared for side in ("encoder", "decoder")}
    source.put(source.tensors() | tables | copies | {"lm_head.weight": shared})
    assert_same(source.path, sample_run("marian"))


def assert_same(directory, run) -> None:
    import jax

    again = load(directory)
    assert again.config.model == run.config.model
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
