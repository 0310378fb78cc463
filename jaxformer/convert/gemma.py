"""Formats of Gemma, Gemma 2 and the text part of Gemma 3: Llama's tensors; Gemma 2 and 3 have additional norms."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.config import Activation, ModelConfig, Rope
from jaxformer.convert.fields import Fields, read_rope, write_activation, write_rope
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import CLASSES, HeadKind, decoder_architectures
from jaxformer.convert.llama import (
    BLOCK,
    COPIES,
    DENSE,
    IGNORED,
    LAYER,
    MLP_NORM,
    SHARED,
    read_local_layers,
    read_shape,
    without,
    write_layer_types,
    write_shape,
)
from jaxformer.convert.sample import WIDE_HEADS, Sample, decoder_samples
from jaxformer.convert.tables import Entry, entry
from jaxformer.models.gemma import gemma, gemma2, gemma3

_GEMMA, _GEMMA2 = (decoder_architectures(stem) for stem in ("Gemma", "Gemma2"))
# transformers has no token classifier of Gemma 3.
_GEMMA3: Mapping[HeadKind, str] = {"vocabulary": "Gemma3ForCausalLM", "classes": f"Gemma3Text{CLASSES}"}

_SANDWICH_NORMS = (
    entry(f"{LAYER}.post_attention_layernorm.weight", f"{BLOCK}/attention_post_norm/scale", "D -> D"),
    entry(f"{LAYER}.pre_feedforward_layernorm.weight", f"{BLOCK}/mlp_norm/scale", "D -> D"),
    entry(f"{LAYER}.post_feedforward_layernorm.weight", f"{BLOCK}/mlp_post_norm/scale", "D -> D"),
)


def _shared(fields: Fields, files: ModelFiles, context_length: int, num_kv_heads: int) -> dict[str, Any]:
    fields.require("use_bidirectional_attention", False)
    bias = fields.take("attention_bias", False)
    shape = read_shape(fields, files, num_kv_heads)
    return shape | {
        "head_dim": fields.take("head_dim", 256),
        "mlp_dim": fields.take("intermediate_size"),
        "activation": _activation(fields),
        "eps": fields.take("rms_norm_eps", 1e-6),
        "bias": bias,
        "output_bias": bias,
        "tied": fields.take("tie_word_embeddings", True),
        "context_length": context_length,
        "special": fields.special_ids(shape["vocab_size"], bos=2, eos=1, pad=0),
    }


def _activation(fields: Fields) -> Activation:
    """Read the activation; `hidden_act: gelu` in files of the first release means the tanh approximation."""
    older = fields.activation("hidden_act", "gelu_pytorch_tanh")
    return fields.activation("hidden_activation", "gelu_pytorch_tanh" if older in ("gelu", "gelu_tanh") else older)


def _read_gemma(fields: Fields, files: ModelFiles) -> ModelConfig:
    length = fields.take("max_position_embeddings", 8192)
    return gemma(rope=read_rope(fields, length), **_shared(fields, files, length, num_kv_heads=16))


def _read_gemma2(fields: Fields, files: ModelFiles) -> ModelConfig:
    length = fields.take("max_position_embeddings", 8192)
    shared = _shared(fields, files, length, num_kv_heads=4)
    alternating = [(i + 1) % 2 != 0 for i in range(shared["num_layers"])]
    return gemma2(
        **shared,
        rope=read_rope(fields, length),
        window=fields.nullable("sliding_window", 4096),
        local=read_local_layers(fields, shared["num_layers"], alternating),
        query_scalar=fields.take("query_pre_attn_scalar", 256),
        attention_softcap=fields.nullable("attn_logit_softcapping", 50.0),
        head_softcap=fields.nullable("final_logit_softcapping", 30.0),
    )


def _read_gemma3(fields: Fields, files: ModelFiles) -> ModelConfig:
    length = fields.take("max_position_embeddings", 131_072)
    shared = _shared(fields, files, length, num_kv_heads=4)
    period = fields.take("sliding_window_pattern", fields.take("_sliding_window_pattern", 6))
    local_by_default = [(i + 1) % period != 0 for i in range(shared["num_layers"])]
    theta = fields.take("rope_local_base_freq", 10_000.0)
    rope_parameters = fields.take("rope_parameters", None)
    local_rope = Rope(theta=theta) if rope_parameters is None else read_rope(fields, length, theta, "sliding_attention")
    return gemma3(
        **shared,
        rope=read_rope(fields, length, 1e6, "full_attention"),
        local_rope=local_rope,
        window=fields.nullable("sliding_window", 4096),
        local=read_local_layers(fields, shared["num_layers"], local_by_default),
        query_scalar=fields.take("query_pre_attn_scalar", 256),
        attention_softcap=fields.take("attn_logit_softcapping", None),
        head_softcap=fields.take("final_logit_softcapping", None),
    )


def _write_gemma(model: ModelConfig) -> dict[str, Any]:
    return without(write_shape(model, _GEMMA), "sliding_window")


def _write_gemma2(model: ModelConfig) -> dict[str, Any]:
    return _write_common(model, _GEMMA2)


def _write_gemma3(model: ModelConfig) -> dict[str, Any]:
    ropes = {}
    for layer, kind in enumerate(write_layer_types(model)):
        position = model.decoder.block(layer).attention.position
        ropes.setdefault(kind, write_rope(position) if isinstance(position, Rope) else None)
    return _write_common(model, _GEMMA3) | {"rope_parameters": ropes}


def _write_common(model: ModelConfig, architectures: Mapping[HeadKind, str]) -> dict[str, Any]:
    block, head = model.decoder.pattern[0], model.head
    scale = block.attention.scale or block.attention.head_dim**-0.5
    # The scale is query_pre_attn_scalar ** -0.5; published files hold integers.
    scalar = round(scale**-2) if abs(scale**-2 - round(scale**-2)) < 1e-6 else scale**-2
    softcap = {} if head is None else {"final_logit_softcapping": head.softcap}
    return without(write_shape(model, architectures), "hidden_act") | {
        "hidden_activation": write_activation(block.mlp.activation),
        "layer_types": write_layer_types(model),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": block.attention.softcap,
        **softcap,
    }


def _format(
    model_type: str,
    architectures: Mapping[HeadKind, str],
    read: Callable[[Fields, ModelFiles], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    norms: tuple[Entry, ...],
) -> Format:
    return Format(
        model_type=model_type,
        architectures=tuple(architectures.values()),
        read=read,
        write=write,
        shape="decoder-only",
        entries=(*SHARED, *norms, *DENSE),
        copies=COPIES,
        ignored=IGNORED,
    )


FORMATS = (
    _format("gemma", _GEMMA, _read_gemma, _write_gemma, (MLP_NORM,)),
    _format("gemma2", _GEMMA2, _read_gemma2, _write_gemma2, _SANDWICH_NORMS),
    _format("gemma3_text", _GEMMA3, _read_gemma3, _write_gemma3, _SANDWICH_NORMS),
)

_GEMMA2_SHAPE = WIDE_HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 24}
_GEMMA3_SHAPE = WIDE_HEADS | {
    "num_hidden_layers": 7,  # more than one period, which has five local layers and one global layer
    "sliding_window": 8,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
SAMPLES = {
    **decoder_samples("gemma", "gemma-2b", "gemma", "Gemma", WIDE_HEADS | {"num_key_value_heads": 1}),
    **decoder_samples("gemma2", "gemma2-2b", "gemma2", "Gemma2", _GEMMA2_SHAPE),
    "gemma3": Sample("gemma3-4b", "gemma3_text", _GEMMA3["vocabulary"], "Gemma3TextConfig", _GEMMA3_SHAPE),
    "gemma3 classes": Sample(
        "gemma3-4b", "gemma3_text", _GEMMA3["classes"], "Gemma3TextConfig", _GEMMA3_SHAPE | {"num_labels": 3}
    ),
}
