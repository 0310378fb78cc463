"""Formats of Qwen 2.5, Qwen 3 and Qwen 3 MoE: Llama's tensors with an optional sliding window."""

from collections.abc import Callable
from typing import Any

from jaxformer.config import ModelConfig, MoeConfig
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import decoder_architectures
from jaxformer.convert.llama import (
    COPIES,
    DENSE,
    IGNORED,
    MLP_NORM,
    SHARED,
    read_context,
    read_local_layers,
    read_shape,
    without,
    write_layer_types,
    write_shape,
)
from jaxformer.convert.mixtral import expert_entries, write_experts
from jaxformer.convert.sample import GROUPED_QUERY, WIDE_HEADS, decoder_samples
from jaxformer.convert.tables import Entry
from jaxformer.models.llama import llama


def _read_windows(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Read the sliding window; if `use_sliding_window` is true, it applies from layer `max_window_layers` on."""
    start = fields.take("max_window_layers", 28)
    window = fields.take("sliding_window", 4096) if fields.take("use_sliding_window", False) else None
    fields.take("sliding_window", None)
    default = [window is not None and i >= start for i in range(num_layers)]
    return {"window": window, "local": read_local_layers(fields, num_layers, default)}


def _read_qwen2(fields: Fields, files: ModelFiles) -> ModelConfig:
    fields.require("use_mrope", False)
    shape = read_shape(fields, files, num_kv_heads=32)
    return llama(
        **shape,
        **read_context(fields, 32_768),
        **_read_windows(fields, shape["num_layers"]),
        mlp_dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
        eps=fields.take("rms_norm_eps", 1e-6),
        bias=True,
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special_ids(shape["vocab_size"]),
    )


def _build_qwen3(fields: Fields, files: ModelFiles, num_kv_heads: int, **options: Any) -> ModelConfig:
    shape, bias = read_shape(fields, files, num_kv_heads), fields.take("attention_bias", False)
    return llama(
        **shape,
        **read_context(fields, 32_768),
        **_read_windows(fields, shape["num_layers"]),
        **options,
        qk_norm=True,
        bias=bias,
        output_bias=bias,
        eps=fields.take("rms_norm_eps", 1e-6),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special_ids(shape["vocab_size"]),
    )


def _read_qwen3(fields: Fields, files: ModelFiles) -> ModelConfig:
    return _build_qwen3(
        fields,
        files,
        num_kv_heads=32,
        head_dim=fields.take("head_dim", 128),
        mlp_dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
    )


def _read_qwen3_moe(fields: Fields, files: ModelFiles) -> ModelConfig:
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [])
    fields.take("intermediate_size", None)  # the MLP size of dense layers; all layers have experts
    experts = MoeConfig(
        num_experts=fields.take("num_experts", fields.take("num_local_experts", 128)),
        top_k=fields.take("num_experts_per_tok", 8),
        dim=fields.take("moe_intermediate_size", 768),
        activation=fields.activation("hidden_act", "silu"),
        renormalize=fields.take("norm_topk_prob", False),
        load_balance=fields.take("router_aux_loss_coef", 0.001),
    )
    return _build_qwen3(fields, files, num_kv_heads=4, head_dim=fields.take("head_dim", None), moe=experts)


def _write_qwen2(model: ModelConfig) -> dict[str, Any]:
    shape = without(write_shape(model, decoder_architectures("Qwen2")), "attention_bias", "head_dim")
    return shape | _write_windows(model)


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    return write_shape(model, decoder_architectures("Qwen3")) | _write_windows(model)


def _write_qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    mlp = model.decoder.pattern[0].mlp
    shape = write_shape(model, decoder_architectures("Qwen3Moe")) | _write_windows(model) | write_experts(model)
    renormalize = getattr(mlp, "renormalize", None)
    return without(shape, "layer_types") | {"moe_intermediate_size": mlp.dim, "norm_topk_prob": renormalize}


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    kinds = write_layer_types(model)
    # Readers that do not know `layer_types` use `max_window_layers`, the index of the first local layer.
    start = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
    return {"layer_types": kinds, "use_sliding_window": start < len(kinds), "max_window_layers": start}


def _format(
    model_type: str,
    stem: str,
    read: Callable[[Fields, ModelFiles], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    mlp: tuple[Entry, ...] = DENSE,
    tokenizer_class: str | None = None,
) -> Format:
    return Format(
        model_type=model_type,
        architectures=tuple(decoder_architectures(stem).values()),
        read=read,
        write=write,
        shape="decoder-only",
        entries=(*SHARED, MLP_NORM, *mlp),
        copies=COPIES,
        ignored=IGNORED,
        tokenizer_class=tokenizer_class,
    )


_EXPERTS = expert_entries("mlp", "gate_proj", "up_proj", "down_proj")

FORMATS = (
    _format("qwen2", "Qwen2", _read_qwen2, _write_qwen2, tokenizer_class="Qwen2Tokenizer"),
    _format("qwen3", "Qwen3", _read_qwen3, _write_qwen3),
    _format("qwen3_moe", "Qwen3Moe", _read_qwen3_moe, _write_qwen3_moe, _EXPERTS),
)
SAMPLES = {
    **decoder_samples("qwen2.5", "qwen2.5-7b", "qwen2", "Qwen2", GROUPED_QUERY),
    **decoder_samples("qwen3", "qwen3-8b", "qwen3", "Qwen3", WIDE_HEADS),
    **decoder_samples(
        "qwen3-moe",
        "qwen3-30b-a3b",
        "qwen3_moe",
        "Qwen3Moe",
        WIDE_HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}
