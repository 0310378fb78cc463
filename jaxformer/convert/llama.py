"""Format of Llama, and the parts that the similar decoders Mistral, Mixtral, Qwen and Gemma share."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import DynamicNtkScaling, ModelConfig, Rope
from jaxformer.convert.fields import Fields, read_rope, write_activation, write_rope, write_special_ids
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import TAGS, HeadKind, decoder_architectures, head_kind, read_classes, write_head
from jaxformer.convert.sample import GROUPED_QUERY, Sample, decoder_samples
from jaxformer.convert.tables import Entry, entry
from jaxformer.models.llama import llama

BLOCK, LAYER = "decoder/{block}", "model.layers.{layer}"


def _attention() -> tuple[Entry, ...]:
    heads = (("q", "N"), ("k", "K"), ("v", "K"))
    kernels = [
        entry(f"{LAYER}.self_attn.{p}_proj.weight", f"{BLOCK}/attention/{p}/kernel", f"({n} H) D -> D {n} H")
        for p, n in heads
    ]
    biases = [
        entry(f"{LAYER}.self_attn.{p}_proj.bias", f"{BLOCK}/attention/{p}/bias", f"({n} H) -> {n} H") for p, n in heads
    ]
    norms = [entry(f"{LAYER}.self_attn.{p}_norm.weight", f"{BLOCK}/attention/{p}_norm/scale", "H -> H") for p in "qk"]
    return (
        *kernels,
        *biases,
        *norms,
        entry(f"{LAYER}.self_attn.o_proj.weight", f"{BLOCK}/attention/out/kernel", "D (N H) -> N H D"),
        entry(f"{LAYER}.self_attn.o_proj.bias", f"{BLOCK}/attention/out/bias", "D -> D"),
    )


def _mlp() -> tuple[Entry, ...]:
    rows = []
    for name in ("gate", "up", "down"):
        layout, width = ("D F -> F D", "D") if name == "down" else ("F D -> D F", "F")
        rows.append(entry(f"{LAYER}.mlp.{name}_proj.weight", f"{BLOCK}/mlp/{name}/kernel", layout))
        rows.append(entry(f"{LAYER}.mlp.{name}_proj.bias", f"{BLOCK}/mlp/{name}/bias", f"{width} -> {width}"))
    return tuple(rows)


SHARED = (
    entry("model.embed_tokens.weight", "embedding/tokens", "V D -> V D"),
    entry("model.norm.weight", "decoder/final_norm/scale", "D -> D"),
    entry("lm_head.weight", "head/output/kernel", "V D -> D V"),
    entry("score.weight", "pooler/classes/kernel", "C D -> D C"),
    entry("score.bias", "pooler/classes/bias", "C -> C"),
    entry(f"{LAYER}.input_layernorm.weight", f"{BLOCK}/attention_norm/scale", "D -> D"),
    *_attention(),
)
MLP_NORM = entry(f"{LAYER}.post_attention_layernorm.weight", f"{BLOCK}/mlp_norm/scale", "D -> D")
DENSE = _mlp()
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
IGNORED = (r".*rotary_emb\.inv_freq",)
_ARCHITECTURES = decoder_architectures("Llama")


# ---------------------------------------------------------------- config.json
def read_shape(fields: Fields, files: ModelFiles, num_kv_heads: int | None = None) -> dict[str, Any]:
    """Read the sizes and the class head that all Llama-like decoders may have.

    Args:
      num_kv_heads: the default of `num_key_value_heads`. None, like a null in the file, means one per query head.
    """
    fields.require("rope_interleaved", False)
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "embed_dim": fields.take("hidden_size"),
        "num_heads": fields.take("num_attention_heads"),
        "num_kv_heads": fields.nullable("num_key_value_heads", num_kv_heads),
        "vocab_size": fields.take("vocab_size"),
        "attention_dropout": fields.take("attention_dropout", 0.0),
        **read_class_head(fields, files),
    }


def read_class_head(fields: Fields, files: ModelFiles) -> dict[str, Any]:
    """Read the classes of a decoder; transformers has dropout before those of tokens, but not before those of texts."""
    dropout = fields.take("classifier_dropout", 0.1) if files.architecture.endswith(TAGS) else None
    return {"classifier_dropout": dropout, **read_classes(fields, files)}


def read_context(fields: Fields, default: int, theta: float = 10_000.0) -> dict[str, Any]:
    """Read RoPE and the context length, which is unlimited with dynamic NTK scaling."""
    length = fields.take("max_position_embeddings", default)
    rope = read_rope(fields, length, theta)
    return {"rope": rope, "context_length": None if isinstance(rope.scaling, DynamicNtkScaling) else length}


def read_local_layers(fields: Fields, num_layers: int, default: list[bool]) -> list[bool]:
    """Read for every layer whether it uses sliding-window attention."""
    kinds = fields.take("layer_types", None)
    if kinds is None:
        return default
    known = {"sliding_attention": True, "full_attention": False}
    if len(kinds) != num_layers or not set(kinds) <= set(known):
        fields.require("layer_types", None)  # always raises
    return [known[kind] for kind in kinds]


def _read_llama(fields: Fields, files: ModelFiles) -> ModelConfig:
    shape, bias = read_shape(fields, files), fields.take("attention_bias", False)
    return llama(
        **shape,
        **read_context(fields, 2048),
        head_dim=fields.take("head_dim", None),
        mlp_dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
        eps=fields.take("rms_norm_eps", 1e-6),
        bias=bias,
        output_bias=bias,
        mlp_bias=fields.take("mlp_bias", False),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special_ids(shape["vocab_size"], bos=1, eos=2),
    )


def write_shape(model: ModelConfig, architectures: Mapping[HeadKind, str]) -> dict[str, Any]:
    """Return the config.json fields that all Llama-like decoders have."""
    block = model.decoder.pattern[0]
    attention, rope = block.attention, block.attention.position
    window = next((b.attention.window for b in model.decoder.blocks if b.attention.window is not None), None)
    scaling = rope.scaling if isinstance(rope, Rope) else None
    length = scaling.original_length if isinstance(scaling, DynamicNtkScaling) else model.context_length
    return {
        "num_hidden_layers": model.decoder.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": block.mlp.dim,
        "hidden_act": write_activation(block.mlp.activation),
        "vocab_size": model.vocab_size,
        "rms_norm_eps": block.norm.eps,
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
        "sliding_window": window,
        "max_position_embeddings": length,
        "rope_parameters": write_rope(rope) if isinstance(rope, Rope) else None,
        **write_special_ids(model.special),
        **write_decoder_head(model, architectures),
    }


def write_decoder_head(model: ModelConfig, architectures: Mapping[HeadKind, str]) -> dict[str, Any]:
    fields = write_head(model, architectures)
    if model.head is not None:
        fields["tie_word_embeddings"] = model.head.tied
    # 0.1 is the default, which is not a field of the config classes.
    if head_kind(model) == "tags" and model.pooler.dropout != 0.1:
        fields["classifier_dropout"] = model.pooler.dropout
    return fields


def write_layer_types(model: ModelConfig) -> list[str]:
    windows = (model.decoder.block(i).attention.window for i in range(model.decoder.num_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    shape = without(write_shape(model, _ARCHITECTURES), "sliding_window")
    return shape | {"mlp_bias": getattr(model.decoder.pattern[0].mlp, "bias", False)}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


FORMATS = (
    Format(
        model_type="llama",
        architectures=tuple(_ARCHITECTURES.values()),
        read=_read_llama,
        write=_write_llama,
        shape="decoder-only",
        entries=(*SHARED, MLP_NORM, *DENSE),
        copies=COPIES,
        ignored=IGNORED,
    ),
)

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SAMPLES = {
    **decoder_samples("llama", "llama3.1-8b", "llama", "Llama", GROUPED_QUERY | {"rope_parameters": _LLAMA3_ROPE}),
    "smollm2": Sample(
        "smollm2-135m", "llama", "LlamaForCausalLM", "LlamaConfig", GROUPED_QUERY | {"tie_word_embeddings": True}
    ),
}
