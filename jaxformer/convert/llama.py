"""The files of Llama and of what varies it: Mistral, Mixtral, Qwen 2 and 3."""

from typing import Any

from jaxformer.config import DynamicNtkScaling, ModelConfig, MoeConfig, Rope
from jaxformer.convert.fields import Fields, read_rope, written_activation, written_rope, written_special
from jaxformer.convert.format import Format, Found
from jaxformer.convert.tables import Entry, entry
from jaxformer.models.llama import llama

_HERE, _THERE = "decoder/{place}", "model.layers.{layer}"


def _attention() -> tuple[Entry, ...]:
    """Names that all decoders of this kind share; others import it."""
    heads = (("q", "N"), ("k", "K"), ("v", "K"))
    kernels = [
        entry(f"{_THERE}.self_attn.{p}_proj.weight", f"{_HERE}/attention/{p}/kernel", f"({n} H) D -> D {n} H")
        for p, n in heads
    ]
    biases = [
        entry(f"{_THERE}.self_attn.{p}_proj.bias", f"{_HERE}/attention/{p}/bias", f"({n} H) -> {n} H") for p, n in heads
    ]
    norms = [entry(f"{_THERE}.self_attn.{p}_norm.weight", f"{_HERE}/attention/{p}_norm/scale", "H -> H") for p in "qk"]
    return (
        *kernels,
        *biases,
        *norms,
        entry(f"{_THERE}.self_attn.o_proj.weight", f"{_HERE}/attention/out/kernel", "D (N H) -> N H D"),
        entry(f"{_THERE}.self_attn.o_proj.bias", f"{_HERE}/attention/out/bias", "D -> D"),
    )


def _mlp() -> tuple[Entry, ...]:
    rows = []
    for name in ("gate", "up", "down"):
        form, width = ("D F -> F D", "D") if name == "down" else ("F D -> D F", "F")
        rows.append(entry(f"{_THERE}.mlp.{name}_proj.weight", f"{_HERE}/mlp/{name}/kernel", form))
        rows.append(entry(f"{_THERE}.mlp.{name}_proj.bias", f"{_HERE}/mlp/{name}/bias", f"{width} -> {width}"))
    return tuple(rows)


def _experts(there: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    each = f"{_THERE}.{there}.experts.{{expert}}"
    return (
        entry(f"{_THERE}.{there}.gate.weight", f"{_HERE}/mlp/router/kernel", "E D -> D E"),
        entry(f"{each}.{gate}.weight", f"{_HERE}/mlp/gate", "F D -> D F"),
        entry(f"{each}.{up}.weight", f"{_HERE}/mlp/up", "F D -> D F"),
        entry(f"{each}.{down}.weight", f"{_HERE}/mlp/down", "D F -> F D"),
    )


SHARED = (
    entry("model.embed_tokens.weight", "embedding/tokens", "V D -> V D"),
    entry("model.norm.weight", "decoder/final_norm/scale", "D -> D"),
    entry("lm_head.weight", "head/output/kernel", "V D -> D V"),
    entry(f"{_THERE}.input_layernorm.weight", f"{_HERE}/attention_norm/scale", "D -> D"),
    *_attention(),
)
_NORM = entry(f"{_THERE}.post_attention_layernorm.weight", f"{_HERE}/mlp_norm/scale", "D -> D")
DENSE = _mlp()
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
IGNORED = (r".*rotary_emb\.inv_freq",)


# ---------------------------------------------------------------- config.json
def read_shape(fields: Fields, num_kv_heads: int | None = None) -> dict[str, Any]:
    """The numbers that all of them have.

    Args:
      num_kv_heads: what absence means; none, as a null in the file, means as many as there are heads.
    """
    fields.require("rope_interleaved", False)
    return {
        "num_layers": fields.take("num_hidden_layers"),
        "embed_dim": fields.take("hidden_size"),
        "num_heads": fields.take("num_attention_heads"),
        "num_kv_heads": fields.nullable("num_key_value_heads", num_kv_heads),
        "vocab_size": fields.take("vocab_size"),
        "attention_dropout": fields.take("attention_dropout", 0.0),
    }


def _context(fields: Fields, default: int, theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary positions and how far they reach; those that stretch by themselves reach any length."""
    length = fields.take("max_position_embeddings", default)
    rope = read_rope(fields, length, theta)
    return {"rope": rope, "context_length": None if isinstance(rope.scaling, DynamicNtkScaling) else length}


def local_layers(fields: Fields, num_layers: int, default: list[bool]) -> list[bool]:
    """Which layers see a window only."""
    kinds = fields.take("layer_types", None)
    if kinds is None:
        return default
    known = {"sliding_attention": True, "full_attention": False}
    if len(kinds) != num_layers or not set(kinds) <= set(known):
        fields.require("layer_types", None)
    return [known[kind] for kind in kinds]


def _read_llama(fields: Fields, found: Found) -> ModelConfig:
    bias = fields.take("attention_bias", False)
    return llama(
        **read_shape(fields),
        **_context(fields, 2048),
        head_dim=fields.take("head_dim", None),
        mlp_dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
        eps=fields.take("rms_norm_eps", 1e-6),
        bias=bias,
        output_bias=bias,
        mlp_bias=fields.take("mlp_bias", False),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special(bos=1, eos=2),
    )


def _read_mistral(fields: Fields, found: Found) -> ModelConfig:
    return llama(
        **read_shape(fields, num_kv_heads=8),
        **_context(fields, 131_072),
        head_dim=fields.take("head_dim", None),
        mlp_dim=fields.take("intermediate_size"),
        window=fields.nullable("sliding_window", 4096),
        activation=fields.activation("hidden_act", "silu"),
        eps=fields.take("rms_norm_eps", 1e-6),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special(bos=1, eos=2),
    )


def _read_mixtral(fields: Fields, found: Found) -> ModelConfig:
    fields.require("router_jitter_noise", 0.0)
    experts = MoeConfig(
        num_experts=fields.take("num_local_experts", 8),
        top_k=fields.take("num_experts_per_tok", 2),
        dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
        load_balance=fields.take("router_aux_loss_coef", 0.001),
    )
    return llama(
        **read_shape(fields, num_kv_heads=8),
        **_context(fields, 131_072, 1e6),
        head_dim=fields.take("head_dim", None),
        moe=experts,
        window=fields.take("sliding_window", None),
        eps=fields.take("rms_norm_eps", 1e-5),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special(bos=1, eos=2),
    )


def _windows(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Qwen's: none unless it is switched on, and then from some layer up."""
    start = fields.take("max_window_layers", 28)
    window = fields.take("sliding_window", 4096) if fields.take("use_sliding_window", False) else None
    fields.take("sliding_window", None)
    local = local_layers(fields, num_layers, [window is not None and i >= start for i in range(num_layers)])
    return {"window": window, "local": local}


def _read_qwen2(fields: Fields, found: Found) -> ModelConfig:
    fields.require("use_mrope", False)
    shape = read_shape(fields, num_kv_heads=32)
    return llama(
        **shape,
        **_context(fields, 32_768),
        **_windows(fields, shape["num_layers"]),
        mlp_dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
        eps=fields.take("rms_norm_eps", 1e-6),
        bias=True,
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special(),
    )


def _qwen3(fields: Fields, num_kv_heads: int, **options: Any) -> ModelConfig:
    shape, bias = read_shape(fields, num_kv_heads), fields.take("attention_bias", False)
    return llama(
        **shape,
        **_context(fields, 32_768),
        **_windows(fields, shape["num_layers"]),
        **options,
        qk_norm=True,
        bias=bias,
        output_bias=bias,
        eps=fields.take("rms_norm_eps", 1e-6),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special(),
    )


def _read_qwen3(fields: Fields, found: Found) -> ModelConfig:
    return _qwen3(
        fields,
        num_kv_heads=32,
        head_dim=fields.take("head_dim", 128),
        mlp_dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
    )


def _read_qwen3_moe(fields: Fields, found: Found) -> ModelConfig:
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [])
    fields.take("intermediate_size", None)  # of dense layers, and there are none
    experts = MoeConfig(
        num_experts=fields.take("num_experts", fields.take("num_local_experts", 128)),
        top_k=fields.take("num_experts_per_tok", 8),
        dim=fields.take("moe_intermediate_size", 768),
        activation=fields.activation("hidden_act", "silu"),
        renormalize=fields.take("norm_topk_prob", False),
        load_balance=fields.take("router_aux_loss_coef", 0.001),
    )
    return _qwen3(fields, num_kv_heads=4, head_dim=fields.take("head_dim", None), moe=experts)


def write_shape(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """What `read_shape` and the readers above have in common."""
    block = model.decoder.pattern[0]
    attention, rope = block.attention, block.attention.position
    window = next((b.attention.window for b in model.decoder.blocks if b.attention.window is not None), None)
    scaling = rope.scaling if isinstance(rope, Rope) else None
    length = scaling.original_length if isinstance(scaling, DynamicNtkScaling) else model.context_length
    return {
        "architectures": [architecture],
        "num_hidden_layers": model.decoder.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": block.mlp.dim,
        "hidden_act": written_activation(block.mlp.activation),
        "vocab_size": model.vocab_size,
        "rms_norm_eps": block.norm.eps,
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
        "sliding_window": window,
        "max_position_embeddings": length,
        "rope_parameters": written_rope(rope) if isinstance(rope, Rope) else None,
        "tie_word_embeddings": model.head.tied,
        **written_special(model.special),
    }


def layer_types(model: ModelConfig) -> list[str]:
    windows = (model.decoder.block(i).attention.window for i in range(model.decoder.num_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    shape = without(write_shape(model, "LlamaForCausalLM"), "sliding_window")
    return shape | {"mlp_bias": getattr(model.decoder.pattern[0].mlp, "bias", False)}


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return without(write_shape(model, "MistralForCausalLM"), "attention_bias")


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    return without(write_shape(model, "MixtralForCausalLM"), "attention_bias") | _written_experts(model)


def _write_qwen2(model: ModelConfig) -> dict[str, Any]:
    shape = without(write_shape(model, "Qwen2ForCausalLM"), "attention_bias", "head_dim")
    return shape | _written_windows(model)


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    return write_shape(model, "Qwen3ForCausalLM") | _written_windows(model)


def _write_qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    mlp = model.decoder.pattern[0].mlp
    shape = write_shape(model, "Qwen3MoeForCausalLM") | _written_windows(model) | _written_experts(model)
    renormalize = getattr(mlp, "renormalize", None)
    return without(shape, "layer_types") | {"moe_intermediate_size": mlp.dim, "norm_topk_prob": renormalize}


def _written_windows(model: ModelConfig) -> dict[str, Any]:
    kinds = layer_types(model)
    # Where the first local layer stands, for readers that know no layer_types.
    start = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
    return {"layer_types": kinds, "use_sliding_window": start < len(kinds), "max_window_layers": start}


def _written_experts(model: ModelConfig) -> dict[str, Any]:
    mlp = model.decoder.pattern[0].mlp
    if not isinstance(mlp, MoeConfig):
        return {}
    return {
        "num_local_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.top_k,
        "router_aux_loss_coef": mlp.load_balance,
    }


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _format(model_type: str, family: str, architecture: str, read, write, *mlp: Entry, **options: Any) -> Format:
    entries = (*SHARED, _NORM, *mlp)
    options |= {"copies": COPIES, "ignored": IGNORED}
    return Format(model_type, family, (architecture,), read, write, "decoder-only", entries, **options)


_MIXTRAL = _experts("block_sparse_moe", "w1", "w3", "w2")
_QWEN_MOE = _experts("mlp", "gate_proj", "up_proj", "down_proj")

FORMATS = (
    _format("llama", "llama", "LlamaForCausalLM", _read_llama, _write_llama, *DENSE),
    _format("mistral", "mistral", "MistralForCausalLM", _read_mistral, _write_mistral, *DENSE),
    _format("mixtral", "mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, *_MIXTRAL),
    _format("qwen2", "qwen", "Qwen2ForCausalLM", _read_qwen2, _write_qwen2, *DENSE, tokenizer_class="Qwen2Tokenizer"),
    _format("qwen3", "qwen", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3, *DENSE),
    _format("qwen3_moe", "qwen", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe, *_QWEN_MOE),
)
