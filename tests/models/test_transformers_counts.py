"""Parameter counts of the presets, computed by transformers from the values of the published config.json files.

Models are built on torch's meta device, so no memory is allocated. The values are repeated here on purpose: a mistake
in a preset is found even if its parameter count was changed to match.
"""

import pytest

from jaxformer.convert.export import find_format
from jaxformer.models import FAMILIES, PRESETS, preset

CAUSAL, SEQ2SEQ, MASKED, PLAIN = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModel",
)


def decoder(model_type, layers, hidden, heads, kv_heads, mlp, vocab, tied=False, **rest):
    """A config.json of the Llama kind."""
    return CAUSAL, {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **rest,
    }


def encoder(model_type, layers, hidden, heads, mlp, vocab, auto=MASKED, **rest):
    """A config.json of the BERT kind."""
    return auto, {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        **rest,
    }


def t5(model_type, layers, hidden, heads, head_dim, mlp, vocab, projection):
    return SEQ2SEQ, {
        "model_type": model_type,
        "num_layers": layers,
        "d_model": hidden,
        "num_heads": heads,
        "d_kv": head_dim,
        "d_ff": mlp,
        "vocab_size": vocab,
        "feed_forward_proj": projection,
    }


def bart(model_type, layers, hidden, heads, mlp, vocab, positions, **rest):
    shape = {"layers": layers, "attention_heads": heads, "ffn_dim": mlp}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in shape.items()}
    lengths = {"d_model": hidden, "vocab_size": vocab, "max_position_embeddings": positions}
    return SEQ2SEQ, {"model_type": model_type, **sides, **lengths, **rest}


CONFIGS = {
    "bart-base": bart("bart", 6, 768, 12, 3072, 50265, 1024),
    "bart-large": bart("bart", 12, 1024, 16, 4096, 50265, 1024),
    "bert-base": encoder("bert", 12, 768, 12, 3072, 30522),
    "bert-large": encoder("bert", 24, 1024, 16, 4096, 30522),
    "distilbert-base": (
        MASKED,
        {"model_type": "distilbert", "n_layers": 6, "dim": 768, "n_heads": 12, "hidden_dim": 3072, "vocab_size": 30522},
    ),
    "gemma-2b": decoder("gemma", 18, 2048, 8, 1, 16384, 256000, tied=True, head_dim=256),
    "gemma-7b": decoder("gemma", 28, 3072, 16, 16, 24576, 256000, tied=True, head_dim=256),
    "gemma2-2b": decoder("gemma2", 26, 2304, 8, 4, 9216, 256000, tied=True, head_dim=256),
    "gemma2-9b": decoder("gemma2", 42, 3584, 16, 8, 14336, 256000, tied=True, head_dim=256),
    "gemma2-27b": decoder("gemma2", 46, 4608, 32, 16, 36864, 256000, tied=True, head_dim=128),
    "gemma3-270m": decoder("gemma3_text", 18, 640, 4, 1, 2048, 262144, tied=True, head_dim=256),
    "gemma3-1b": decoder("gemma3_text", 26, 1152, 4, 1, 6912, 262144, tied=True, head_dim=256),
    "gemma3-4b": decoder("gemma3_text", 34, 2560, 8, 4, 10240, 262208, tied=True, head_dim=256),
    "gemma3-12b": decoder("gemma3_text", 48, 3840, 16, 8, 15360, 262208, tied=True, head_dim=256),
    "gemma3-27b": decoder("gemma3_text", 62, 5376, 32, 16, 21504, 262208, tied=True, head_dim=128),
    "gpt2-124m": (CAUSAL, {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}),
    "gpt2-355m": (CAUSAL, {"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "gpt2-774m": (CAUSAL, {"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20}),
    "gpt2-1.5b": (CAUSAL, {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "llama2-7b": decoder("llama", 32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": decoder("llama", 40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": decoder("llama", 80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": decoder("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": decoder("llama", 80, 8192, 64, 8, 28672, 128256),
    "llama3.1-8b": decoder("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama3.1-70b": decoder("llama", 80, 8192, 64, 8, 28672, 128256),
    "llama3.1-405b": decoder("llama", 126, 16384, 128, 8, 53248, 128256),
    "llama3.2-1b": decoder("llama", 16, 2048, 32, 8, 8192, 128256, tied=True, head_dim=64),
    "llama3.2-3b": decoder("llama", 28, 3072, 24, 8, 8192, 128256, tied=True, head_dim=128),
    "marian-opus-en-de": bart("marian", 6, 512, 8, 2048, 58101, 512, activation_function="swish"),
    "minilm-l6": encoder("bert", 6, 384, 12, 1536, 30522, auto=PLAIN),
    "minilm-l12": encoder("bert", 12, 384, 12, 1536, 30522, auto=PLAIN),
    "mistral-7b": decoder("mistral", 32, 4096, 32, 8, 14336, 32000),
    "mixtral-8x7b": decoder("mixtral", 32, 4096, 32, 8, 14336, 32000),
    "mixtral-8x22b": decoder("mixtral", 56, 6144, 48, 8, 16384, 32000),
    "modernbert-base": encoder("modernbert", 22, 768, 12, 1152, 50368),
    "modernbert-large": encoder("modernbert", 28, 1024, 16, 2624, 50368),
    "mt5-small": t5("mt5", 8, 512, 6, 64, 1024, 250112, "gated-gelu"),
    "mt5-base": t5("mt5", 12, 768, 12, 64, 2048, 250112, "gated-gelu"),
    "mt5-large": t5("mt5", 24, 1024, 16, 64, 2816, 250112, "gated-gelu"),
    "mt5-xl": t5("mt5", 24, 2048, 32, 64, 5120, 250112, "gated-gelu"),
    "mt5-xxl": t5("mt5", 24, 4096, 64, 64, 10240, 250112, "gated-gelu"),
    "qwen2.5-0.5b": decoder("qwen2", 24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": decoder("qwen2", 28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": decoder("qwen2", 36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": decoder("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": decoder("qwen2", 48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": decoder("qwen2", 64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": decoder("qwen2", 80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": decoder("qwen3", 28, 1024, 16, 8, 3072, 151936, tied=True, head_dim=128),
    "qwen3-1.7b": decoder("qwen3", 28, 2048, 16, 8, 6144, 151936, tied=True, head_dim=128),
    "qwen3-4b": decoder("qwen3", 36, 2560, 32, 8, 9728, 151936, tied=True, head_dim=128),
    "qwen3-8b": decoder("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": decoder("qwen3", 40, 5120, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": decoder("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b-a3b": decoder(
        "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128
    ),
    "qwen3-235b-a22b": decoder(
        "qwen3_moe", 94, 4096, 64, 4, 12288, 151936, head_dim=128, moe_intermediate_size=1536, num_experts=128
    ),
    "roberta-base": encoder("roberta", 12, 768, 12, 3072, 50265, max_position_embeddings=514, type_vocab_size=1),
    "roberta-large": encoder("roberta", 24, 1024, 16, 4096, 50265, max_position_embeddings=514, type_vocab_size=1),
    "smollm2-135m": decoder("llama", 30, 576, 9, 3, 1536, 49152, tied=True),
    "smollm2-360m": decoder("llama", 32, 960, 15, 5, 2560, 49152, tied=True),
    "smollm2-1.7b": decoder("llama", 24, 2048, 32, 32, 8192, 49152, tied=True),
    "t5-small": t5("t5", 6, 512, 8, 64, 2048, 32128, "relu"),
    "t5-base": t5("t5", 12, 768, 12, 64, 3072, 32128, "relu"),
    "t5-large": t5("t5", 24, 1024, 16, 64, 4096, 32128, "relu"),
    "t5-3b": t5("t5", 24, 1024, 32, 128, 16384, 32128, "relu"),
    "t5-11b": t5("t5", 24, 1024, 128, 128, 65536, 32128, "relu"),
    "t5v1.1-small": t5("t5", 8, 512, 6, 64, 1024, 32128, "gated-gelu"),
    "t5v1.1-base": t5("t5", 12, 768, 12, 64, 2048, 32128, "gated-gelu"),
    "t5v1.1-large": t5("t5", 24, 1024, 16, 64, 2816, 32128, "gated-gelu"),
    "t5v1.1-xl": t5("t5", 24, 2048, 32, 64, 5120, 32128, "gated-gelu"),
    "t5v1.1-xxl": t5("t5", 24, 4096, 64, 64, 10240, 32128, "gated-gelu"),
}


def count(auto: str, values: dict) -> int:
    """The number of parameters of the model that this auto class builds from a config.json."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    # In transformers, sinusoids are frozen parameters, and the bias on BART's logits is a buffer that is saved.
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return trained + sum(buffer.numel() for name, buffer in model.named_buffers() if name == "final_logits_bias")


PRESET_FAMILIES = {
    name: family for family, module in FAMILIES.items() for row in module.ZOO_ROWS for name in row.presets
}
# One preset of each row of the zoo table; the others are slow tests, because counts rarely change.
ALWAYS = {list(row.presets)[-1] for family in FAMILIES.values() for row in family.ZOO_ROWS}
COUNTED = [name for name, family in PRESET_FAMILIES.items() if family not in ("vaswani", "rnn")]


def test_every_listed_config_belongs_to_a_preset():
    assert set(CONFIGS) <= set(PRESETS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in COUNTED]
)
def test_count_of_transformers_is_the_same(name):
    auto, values = CONFIGS.get(name) or exported_config(name)
    untied = 0
    if values.get("feed_forward_proj") == "gated-gelu":
        # transformers 5 ties the output of every T5 until weights are loaded; the output of v1.1 is not tied.
        untied = values["vocab_size"] * values["d_model"]
    assert count(auto, values) + untied == PRESETS[name].num_params


def exported_config(name: str) -> tuple[str, dict]:
    """The config.json that export writes, for a preset whose published config.json is not listed above."""
    _, fields = find_format(preset(name))
    auto = {"decoder-only": CAUSAL, "encoder-decoder": SEQ2SEQ, "encoder-only": MASKED}[preset(name).shape]
    return PLAIN if preset(name).head is None else auto, fields


def test_exported_configs_have_the_same_count():
    """A new preset is checked this way until its published config.json is listed above."""
    auto, values = exported_config("qwen3-0.6b")
    assert count(auto, values) == PRESETS["qwen3-0.6b"].num_params
