"""ModernBERT's files: fused query-key-value and fused gate-and-up, and no norm before the first attention."""

from typing import Any

from jaxformer.config import ModelConfig, Rope
from jaxformer.convert.bert import heads, linear, norm, written_heads
from jaxformer.convert.fields import Fields, read_rope, written_activation, written_rope, written_special
from jaxformer.convert.format import Format, Found
from jaxformer.convert.llama import local_layers
from jaxformer.convert.tables import entry
from jaxformer.errors import UserError
from jaxformer.models.modernbert import modernbert

_HERE, _THERE = "encoder/{place}", "{base}layers.{layer}"
_QKV = tuple(f"{_HERE}/attention/{name}" for name in "qkv")
_IN = tuple(f"{_HERE}/mlp/{name}" for name in ("gate", "up"))

_STACK = (
    entry("{base}embeddings.tok_embeddings.weight", "embedding/tokens", "V D -> V D"),
    *norm("{base}embeddings.norm", "embedding/norm"),
    *norm(f"{_THERE}.attn_norm", f"{_HERE}/attention_norm"),
    entry(f"{_THERE}.attn.Wqkv.weight", tuple(f"{p}/kernel" for p in _QKV), "(P N H) D -> P D N H"),
    entry(f"{_THERE}.attn.Wqkv.bias", tuple(f"{p}/bias" for p in _QKV), "(P N H) -> P N H"),
    entry(f"{_THERE}.attn.Wo.weight", f"{_HERE}/attention/out/kernel", "D (N H) -> N H D"),
    entry(f"{_THERE}.attn.Wo.bias", f"{_HERE}/attention/out/bias", "D -> D"),
    *norm(f"{_THERE}.mlp_norm", f"{_HERE}/mlp_norm"),
    entry(f"{_THERE}.mlp.Wi.weight", tuple(f"{p}/kernel" for p in _IN), "(P F) D -> P D F"),
    entry(f"{_THERE}.mlp.Wi.bias", tuple(f"{p}/bias" for p in _IN), "(P F) -> P F"),
    *linear(f"{_THERE}.mlp.Wo", f"{_HERE}/mlp/down", "D F -> F D"),
    *norm("{base}final_norm", "encoder/final_norm"),
)


def entries(model: ModelConfig):
    """One transform serves whichever head there is."""
    head = "head" if model.head is not None else "pooler"
    return (
        *_STACK,
        *linear("head.dense", f"{head}/transform/dense", "E D -> D E"),
        *norm("head.norm", f"{head}/transform/norm"),
        entry("decoder.weight", "head/output/kernel", "V D -> D V"),
        entry("decoder.bias", "head/bias", "V -> V"),
        *linear("classifier", "pooler/classes", "C D -> D C"),
    )


def read(fields: Fields, found: Found) -> ModelConfig:
    num_layers, length = fields.take("num_hidden_layers", 22), fields.take("max_position_embeddings", 8192)
    local_attention = fields.take("local_attention", 128)
    if local_attention % 2:
        raise UserError(f"{fields.where}: local_attention = {local_attention} is odd: it counts both sides")
    every = fields.take("global_attn_every_n_layers", 3)
    bias, dropout = fields.take("attention_bias", False), fields.take("mlp_dropout", 0.0)
    fields.require("layer_norm_eps", fields.take("norm_eps", 1e-5))
    fields.require("position_embedding_type", "absolute", "sans_pos")
    fields.require("classifier_pooling", "cls", "mean")
    fields.take("embedding_dropout", 0.0)
    given = fields.take("rope_parameters", None)
    thetas = (fields.take("global_rope_theta", 160_000.0), fields.take("local_rope_theta", 10_000.0))
    kinds = ("full_attention", "sliding_attention")
    ropes = [
        Rope(theta=theta) if given is None else read_rope(fields, length, theta, kind)
        for theta, kind in zip(thetas, kinds, strict=True)
    ]
    return modernbert(
        num_layers=num_layers,
        embed_dim=fields.take("hidden_size", 768),
        num_heads=fields.take("num_attention_heads", 12),
        mlp_dim=fields.take("intermediate_size", 1152),
        vocab_size=fields.take("vocab_size", 50_368),
        rope=ropes[0],
        local_rope=ropes[1],
        window=local_attention // 2 + 1,
        local=local_layers(fields, num_layers, [i % every != 0 for i in range(num_layers)]),
        eps=fields.take("norm_eps", 1e-5),
        activation=fields.activation("hidden_activation", "gelu"),
        transform_activation=fields.activation("classifier_activation", "gelu"),
        transform_bias=fields.take("classifier_bias", False),
        bias=bias,
        mlp_bias=fields.take("mlp_bias", False),
        norm_bias=fields.take("norm_bias", False),
        head_bias=fields.take("decoder_bias", True),
        tied=fields.take("tie_word_embeddings", True),
        pooling="mean" if fields.take("classifier_pooling", "cls") == "mean" else "first",
        context_length=length,
        special=fields.special(bos=50_281, eos=50_282, pad=50_283),
        dropout=dropout,
        attention_dropout=fields.take("attention_dropout", 0.0),
        classifier_dropout=fields.take("classifier_dropout", 0.0),
        **heads(fields, found, ""),
    )


def write(model: ModelConfig) -> dict[str, Any]:
    stack, last = model.encoder, model.encoder.block(model.encoder.num_layers - 1)
    layers = [stack.block(i).attention for i in range(stack.num_layers)]
    window = next((a.window for a in layers if a.window is not None), 65)
    ropes = {}
    for attention in layers:
        kind = "full_attention" if attention.window is None else "sliding_attention"
        ropes.setdefault(kind, written_rope(attention.position) if isinstance(attention.position, Rope) else None)
    transform = (model.head or model.pooler).transform if model.head or model.pooler else None
    pooling = "cls" if model.pooler is None or model.pooler.pooling == "first" else "mean"
    return {
        "num_hidden_layers": stack.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": last.attention.num_heads,
        "intermediate_size": last.mlp.dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "hidden_activation": written_activation(last.mlp.activation),
        "norm_eps": last.norm.eps,
        "norm_bias": last.norm.bias,
        "attention_bias": last.attention.bias,
        "mlp_bias": getattr(last.mlp, "bias", None),
        "attention_dropout": last.attention.dropout,
        "mlp_dropout": last.dropout,
        "local_attention": 2 * (window - 1),
        "layer_types": ["full_attention" if a.window is None else "sliding_attention" for a in layers],
        "rope_parameters": ropes,
        "classifier_activation": "gelu" if transform is None else written_activation(transform.activation),
        "classifier_bias": transform is not None and transform.bias,
        "classifier_pooling": pooling,
        "decoder_bias": model.head is None or model.head.bias,
        "tie_word_embeddings": model.head is None or model.head.tied,
        **written_special(model.special),
        "cls_token_id": model.special.bos,
        "sep_token_id": next(iter(model.special.eos), None),
        **written_heads(model, "ModernBert"),
    }


FORMATS = (
    Format(
        model_type="modernbert",
        family="modernbert",
        architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
        read=read,
        write=write,
        shape="encoder-only",
        entries=entries,
        base="model.",
        bare="ModernBertModel",
        copies={"decoder.weight": "{base}embeddings.tok_embeddings.weight"},
        ignored=(r"head\..*", r"decoder\.bias"),
    ),
)
