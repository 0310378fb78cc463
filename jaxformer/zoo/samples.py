"""Tiny random models of every format, made by transformers: what parity is measured on.

Random means every tensor, norms and biases too: transformers would start those at 1 and 0, where a scale that is left
out or a bias that is added twice cannot be seen. Needs torch and transformers, which only the `test` extra installs.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 96
POSITIONS = 160  # several blocks of attention


@dataclass(frozen=True)
class Sample:
    """How to make a tiny model of one Hugging Face architecture."""

    model_type: str
    architecture: str
    config: str
    """Name of transformers' config class."""
    fields: dict[str, Any] = field(default_factory=dict)
    own_output: bool = False
    """An output projection of its own, where the library ties a new model's whatever its config says."""

    def make(self, seed: int = 0) -> Any:
        """The model in evaluation mode."""
        import torch
        import transformers

        transformers.logging.disable_progress_bar()
        config = getattr(transformers, self.config)(**self.fields)
        torch.manual_seed(seed)
        model = getattr(transformers, self.architecture)(config).eval()
        if self.own_output:
            shape = model.lm_head.weight.shape
            model.lm_head.weight = torch.nn.Parameter(shape[1] ** -0.5 * torch.randn(shape))
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.requires_grad or name == "final_logits_bias":  # the rest are constants
                    tensor.add_(_spread(name, tensor) * torch.randn(tensor.shape))
        return model

    def save(self, directory: str | Path, seed: int = 0) -> Any:
        """The model, written as `save_pretrained` writes it."""
        model = self.make(seed)
        model.save_pretrained(directory)
        return model


def _spread(name: str, tensor: Any) -> float:
    """Wide enough that attention is not flat and experts differ, narrow enough that nothing saturates."""
    if tensor.ndim < 2 or "relative_attention_bias" in name:
        return 0.2
    return 0.5 * tensor.shape[-1] ** -0.5 if "embed" not in name and "wte" not in name else 0.5


_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_HEADS = _GROUPED | {"head_dim": 16}  # wider than hidden_size / heads
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": POSITIONS,
    "forced_eos_token_id": None,
}
_MARIAN = _BART | {
    "pad_token_id": VOCAB - 1,
    "decoder_start_token_id": VOCAB - 1,
    "eos_token_id": 0,
    "scale_embedding": True,
    "activation_function": "swish",
}
_ROBERTA = _SHAPE | {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "max_position_embeddings": POSITIONS + 2,
    "type_vocab_size": 1,
}
_DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": POSITIONS,
}
_MODERNBERT = _SHAPE | {"num_hidden_layers": 5, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BANDS = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LOCAL_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}

# Windows are shorter than the sequences parity is measured on.
SAMPLES: dict[str, Sample] = {
    "gpt2": Sample("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2),
    "llama": Sample("llama", "LlamaForCausalLM", "LlamaConfig", _GROUPED | {"rope_parameters": _BANDS}),
    "smollm2": Sample("llama", "LlamaForCausalLM", "LlamaConfig", _GROUPED | {"tie_word_embeddings": True}),
    "mistral": Sample("mistral", "MistralForCausalLM", "MistralConfig", _GROUPED | {"sliding_window": 8}),
    "mixtral": Sample("mixtral", "MixtralForCausalLM", "MixtralConfig", _GROUPED | {"num_local_experts": 4}),
    "gemma": Sample("gemma", "GemmaForCausalLM", "GemmaConfig", _HEADS | {"num_key_value_heads": 1}),
    "gemma2": Sample(
        "gemma2", "Gemma2ForCausalLM", "Gemma2Config", _HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 24}
    ),
    "gemma3": Sample(
        "gemma3_text",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _HEADS | {"num_hidden_layers": 7, "sliding_window": 8, "rope_parameters": _LOCAL_GLOBAL},
    ),
    "qwen2.5": Sample("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": Sample("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    "qwen3-moe": Sample(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "t5": Sample("t5", "T5ForConditionalGeneration", "T5Config", _T5),
    "t5v1.1": Sample(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        own_output=True,
    ),
    "mt5": Sample(
        "mt5", "MT5ForConditionalGeneration", "MT5Config", _T5 | {"feed_forward_proj": "gated-gelu"}, own_output=True
    ),
    "bart": Sample("bart", "BartForConditionalGeneration", "BartConfig", _BART),
    "marian": Sample("marian", "MarianMTModel", "MarianConfig", _MARIAN),
    "bert": Sample("bert", "BertForMaskedLM", "BertConfig", _SHAPE),
    "bert pooled": Sample("bert", "BertModel", "BertConfig", _SHAPE),
    "bert classes": Sample("bert", "BertForSequenceClassification", "BertConfig", _SHAPE | {"num_labels": 3}),
    "minilm": Sample("bert", "BertModel", "BertConfig", _SHAPE | {"num_attention_heads": 8}),
    "roberta": Sample("roberta", "RobertaForMaskedLM", "RobertaConfig", _ROBERTA),
    "roberta classes": Sample(
        "roberta", "RobertaForSequenceClassification", "RobertaConfig", _ROBERTA | {"num_labels": 3}
    ),
    "distilbert": Sample("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", _DISTILBERT),
    "distilbert classes": Sample(
        "distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", _DISTILBERT | {"num_labels": 3}
    ),
    "modernbert": Sample("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", _MODERNBERT),
    "modernbert classes": Sample(
        "modernbert", "ModernBertForSequenceClassification", "ModernBertConfig", _MODERNBERT | {"num_labels": 3}
    ),
}
