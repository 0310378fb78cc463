"""Format of ModernBERT: fused query-key-value and gate-up tensors, and no norm before the first attention."""

from typing import Any

from jaxformer.config import ModelConfig, Rope
from jaxformer.convert.bert import architectures, linear, norm, read_heads, write_heads
from jaxformer.convert.fields import Fields, read_rope, write_activation, write_rope, write_special_ids
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.llama import read_local_layers
from jaxformer.convert.sample import NAMED, SHAPE, Sample
from jaxformer.convert.tables import Entry, entry
from jaxformer.errors import UserError
from jaxformer.models.modernbert import modernbert

_BLOCK, _LAYER = "encoder/{block}", "{base}layers.{layer}"
_QKV = tuple(f"{_BLOCK}/attention/{name}" for name in "qkv")
_IN = tuple(f"{_BLOCK}/mlp/{name}" for name in ("gate", "up"))

_STACK = (
    entry("{base}embeddings.tok_embeddings.weight", "embedding/tokens", "V D -> V D"),
    *norm("{base}embeddings.norm", "embedding/norm"),
    *norm(f"{_LAYER}.attn_norm", f"{_BLOCK}/attention_norm"),
    entry(f"{_LAYER}.attn.Wqkv.weight", tuple(f"{p}/kernel" for p in _QKV), "(P N H) D -> P D N H"),
    entry(f"{_LAYER}.attn.Wqkv.bias", tuple(f"{p}/bias" for p in _QKV), "(P N H) -> P N H"),
    entry(f"{_LAYER}.attn.Wo.weight", f"{_BLOCK}/attention/out/kernel", "D (N H) -> N H D"),
    entry(f"{_LAYER}.attn.Wo.bias", f"{_BLOCK}/attention/out/bias", "D -> D"),
    *norm(f"{_LAYER}.mlp_norm", f"{_BLOCK}/mlp_norm"),
    entry(f"{_LAYER}.mlp.Wi.weight", tuple(f"{p}/kernel" for p in _IN), "(P F) D -> P D F"),
    entry(f"{_LAYER}.mlp.Wi.bias", tuple(f"{p}/bias" for p in _IN), "(P F) -> P F"),
    *linear(f"{_LAYER}.mlp.Wo", f"{_BLOCK}/mlp/down", "D F -> F D"),
    *norm("{base}final_norm", "encoder/final_norm"),
)


def _entries(model: ModelConfig) -> tuple[Entry, ...]:
    """Return the table; `head.dense` belongs to the masked-LM head, the classifier or the tagger."""
    head = "head" if model.head is not None else "pooler"
    return (
        *_STACK,
        *linear("head.dense", f"{head}/transform/dense", "E D -> D E"),
        *norm("head.norm", f"{head}/transform/norm"),
        entry("decoder.weight", "head/output/kernel", "V D -> D V"),
        entry("decoder.bias", "head/bias", "V -> V"),
        *linear("classifier", "pooler/classes", "C D -> D C"),
    )


def _read(fields: Fields, files: ModelFiles) -> ModelConfig:
    num_layers, vocab_size = fields.take("num_hidden_layers", 22), fields.take("vocab_size", 50_368)
    length = fields.take("max_position_embeddings", 8192)
    local_attention = fields.take("local_attention", 128)
    if local_attention % 2:
        raise UserError(
            f"{fields.where}: local_attention = {local_attention} is odd, but windows are symmetric: set an even number"
        )
    every = fields.take("global_attn_every_n_layers", 3)
    bias, dropout = fields.take("attention_bias", False), fields.take("mlp_dropout", 0.0)
    fields.require("layer_norm_eps", fields.take("norm_eps", 1e-5))
    fields.require("position_embedding_type", "absolute", "sans_pos")
    fields.require("classifier_pooling", "cls", "mean")
    fields.take("embedding_dropout", 0.0)
    return modernbert(
        num_layers=num_layers,
        embed_dim=fields.take("hidden_size", 768),
        num_heads=fields.take("num_attention_heads", 12),
        mlp_dim=fields.take("intermediate_size", 1152),
        vocab_size=vocab_size,
        rope=_read_rope(fields, length, "full_attention", fields.take("global_rope_theta", 160_000.0)),
        local_rope=_read_rope(fields, length, "sliding_attention", fields.take("local_rope_theta", 10_000.0)),
        window=local_attention // 2 + 1,
        local=read_local_layers(fields, num_layers, [i % every != 0 for i in range(num_layers)]),
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
        special=fields.special_ids(vocab_size, bos=50_281, eos=50_282, pad=50_283),
        dropout=dropout,
        attention_dropout=fields.take("attention_dropout", 0.0),
        classifier_dropout=fields.take("classifier_dropout", 0.0),
        **read_heads(fields, files),
    )


def _read_rope(fields: Fields, length: int, layers: str, theta: float) -> Rope:
    """Read RoPE of the local or the global layers, from `rope_parameters` or from the older fields `*_rope_theta`."""
    if fields.take("rope_parameters", None) is None:
        return Rope(theta=theta)
    return read_rope(fields, length, theta, layers)


def _write(model: ModelConfig) -> dict[str, Any]:
    stack, last = model.encoder, model.encoder.block(model.encoder.num_layers - 1)
    layers = [stack.block(i).attention for i in range(stack.num_layers)]
    window = next((a.window for a in layers if a.window is not None), 65)  # default: local_attention = 128
    ropes = {}
    for attention in layers:
        kind = "full_attention" if attention.window is None else "sliding_attention"
        ropes.setdefault(kind, write_rope(attention.position) if isinstance(attention.position, Rope) else None)
    transform = (model.head or model.pooler).transform if model.head or model.pooler else None
    pooling = "mean" if model.pooler is not None and model.pooler.pooling == "mean" else "cls"
    return {
        "num_hidden_layers": stack.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": last.attention.num_heads,
        "intermediate_size": last.mlp.dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "hidden_activation": write_activation(last.mlp.activation),
        "norm_eps": last.norm.eps,
        "norm_bias": last.norm.bias,
        "attention_bias": last.attention.bias,
        "mlp_bias": getattr(last.mlp, "bias", None),
        "attention_dropout": last.attention.dropout,
        "mlp_dropout": last.dropout,
        "local_attention": 2 * (window - 1),
        "layer_types": ["full_attention" if a.window is None else "sliding_attention" for a in layers],
        "rope_parameters": ropes,
        "classifier_activation": "gelu" if transform is None else write_activation(transform.activation),
        "classifier_bias": transform is not None and transform.bias,
        "classifier_pooling": pooling,
        "classifier_dropout": 0.0 if model.pooler is None else model.pooler.dropout,
        "decoder_bias": model.head is None or model.head.bias,
        "tie_word_embeddings": model.head is None or model.head.tied,
        **write_special_ids(model.special),
        "cls_token_id": model.special.bos,
        "sep_token_id": next(iter(model.special.eos), None),
        **write_heads(model, "ModernBert"),
    }


FORMATS = (
    Format(
        model_type="modernbert",
        architectures=architectures("ModernBert"),
        read=_read,
        write=_write,
        shape="encoder-only",
        entries=_entries,
        base="model.",
        bare="ModernBertModel",
        copies={"decoder.weight": "{base}embeddings.tok_embeddings.weight"},
        ignored=(r"head\..*", r"decoder\.bias"),
    ),
)

_SHAPE = SHAPE | {"num_hidden_layers": 5, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
SAMPLES = {
    "modernbert": Sample("modernbert-base", "modernbert", "ModernBertForMaskedLM", "ModernBertConfig", _SHAPE),
    "modernbert classes": Sample(
        "modernbert-base",
        "modernbert",
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        _SHAPE | {"num_labels": 3, "classifier_pooling": "mean"},
    ),
    "modernbert tags": Sample(
        "modernbert-base", "modernbert", "ModernBertForTokenClassification", "ModernBertConfig", _SHAPE | NAMED
    ),
}
