"""Formats of T5, T5 v1.1 and mT5: sub-layers are numbered, and the first layer of a stack holds its relative bias."""

from collections.abc import Callable
from typing import Any

from jaxformer.config import BucketBias, ModelConfig
from jaxformer.convert.bert import linear
from jaxformer.convert.fields import ACTIVATIONS, Fields, write_activation, write_special_ids
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import CLASSES, HeadKind, read_classes, write_head
from jaxformer.convert.sample import NAMED, VOCAB, Sample
from jaxformer.convert.tables import Entry, entry
from jaxformer.errors import UserError
from jaxformer.models.t5 import t5


def _stack(side: str, mlp: int) -> list[Entry]:
    """Return the rows of one stack; `mlp` is the number of the MLP sub-layer: 1 in the encoder, 2 in the decoder."""
    ours, theirs = f"{side}/{{block}}", f"{{base}}{side}.block.{{layer}}.layer"
    rows = _attention(f"{theirs}.0.SelfAttention", f"{ours}/attention")
    rows.append(entry(f"{theirs}.0.layer_norm.weight", f"{ours}/attention_norm/scale", "D -> D"))
    if side == "decoder":
        rows += _attention(f"{theirs}.1.EncDecAttention", f"{ours}/cross_attention")
        rows.append(entry(f"{theirs}.1.layer_norm.weight", f"{ours}/cross_attention_norm/scale", "D -> D"))
    dense = f"{theirs}.{mlp}.DenseReluDense"
    return [
        *rows,
        entry(f"{theirs}.{mlp}.layer_norm.weight", f"{ours}/mlp_norm/scale", "D -> D"),
        entry(f"{dense}.wo.weight", f"{ours}/mlp/down/kernel", "D F -> F D"),
        entry(f"{{base}}{side}.final_layer_norm.weight", f"{side}/final_norm/scale", "D -> D"),
        entry(
            f"{{base}}{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{side}/relative_bias",
            "R N -> R N",
        ),
    ]


def _attention(theirs: str, ours: str) -> list[Entry]:
    rows = [entry(f"{theirs}.{p}.weight", f"{ours}/{p}/kernel", "(N H) D -> D N H") for p in "qkv"]
    return [*rows, entry(f"{theirs}.o.weight", f"{ours}/out/kernel", "D (N H) -> N H D")]


def _up(names: dict[str, str]) -> list[Entry]:
    """Return the rows of the MLP input projections, whose names depend on whether the MLP is gated."""
    sides = (("encoder", 1), ("decoder", 2))
    return [
        entry(
            f"{{base}}{side}.block.{{layer}}.layer.{index}.DenseReluDense.{theirs}.weight",
            f"{side}/{{block}}/mlp/{ours}/kernel",
            "F D -> D F",
        )
        for side, index in sides
        for ours, theirs in names.items()
    ]


_SHARED = (
    entry("{base}shared.weight", "embedding/tokens", "V D -> V D"),
    entry("lm_head.weight", "head/output/kernel", "V D -> D V"),
    *linear("classification_head.dense", "pooler/transform/dense", "E D -> D E"),
    *linear("classification_head.out_proj", "pooler/classes", "C D -> D C"),
    *_stack("encoder", 1),
    *_stack("decoder", 2),
)
_PLAIN = (*_SHARED, *_up({"up": "wi"}))
_GATED = (*_SHARED, *_up({"gate": "wi_0", "up": "wi_1"}))
_BASE = "transformer."  # of classifiers; the names of other models have no prefix
_COPIES = {
    f"{base}{side}.embed_tokens.weight": "{base}shared.weight"
    for base in ("", _BASE)
    for side in ("encoder", "decoder")
}
# Saved by older releases, but unused.
_IGNORED = (r"(transformer\.)?decoder\..*EncDecAttention\.relative_attention_bias\.weight",)


def _read_t5(fields: Fields, files: ModelFiles) -> ModelConfig:
    # In T5, `tie_word_embeddings` only says whether the output is scaled; tied models have no `lm_head.weight`.
    scaled = fields.take("scale_decoder_outputs", fields.take("tie_word_embeddings", True))
    return _read_common(fields, files, "relu", scaled)


def _read_mt5(fields: Fields, files: ModelFiles) -> ModelConfig:
    fields.take("tie_word_embeddings", True)
    return _read_common(fields, files, "gated-gelu", False)


def _read_common(fields: Fields, files: ModelFiles, default_mlp: str, scaled: bool) -> ModelConfig:
    fields.require("is_encoder_decoder", True)
    fields.require("is_decoder", False)
    # The first two are derived from feed_forward_proj; n_positions is unused.
    for name in ("dense_act_fn", "is_gated_act", "n_positions"):
        fields.take(name, None)
    gate, _, activation = fields.take("feed_forward_proj", default_mlp).rpartition("-")
    if gate not in ("", "gated") or activation not in ACTIVATIONS:
        raise UserError(f"{fields.where}: feed_forward_proj = '{gate}-{activation}' is not supported")
    vocab_size = fields.take("vocab_size")
    # In transformers, gated-gelu is the tanh approximation.
    tanh = gate == "gated" and activation == "gelu"
    return t5(
        num_layers=fields.take("num_layers"),
        num_decoder_layers=fields.take("num_decoder_layers", None),
        embed_dim=fields.take("d_model"),
        num_heads=fields.take("num_heads"),
        head_dim=fields.take("d_kv", 64),
        mlp_dim=fields.take("d_ff"),
        vocab_size=vocab_size,
        relative_bias=BucketBias(
            num_buckets=fields.take("relative_attention_num_buckets", 32),
            max_distance=fields.take("relative_attention_max_distance", 128),
        ),
        activation="gelu_tanh" if tanh else ACTIVATIONS[activation],
        gated=gate == "gated",
        tied="lm_head.weight" not in files.tensor_names,
        head_scale=scaled,
        eps=fields.take("layer_norm_epsilon", 1e-6),
        special=fields.special_ids(vocab_size, eos=1, pad=0, decoder_start=0),
        dropout=fields.take("dropout_rate", 0.1),
        classifier_dropout=fields.take("classifier_dropout", 0.0),
        **read_classes(fields, files),
    )


def _write_t5(model: ModelConfig) -> dict[str, Any]:
    return _write_common(model, "T5") | ({} if model.head is None else {"tie_word_embeddings": model.head.scale})


def _write_mt5(model: ModelConfig) -> dict[str, Any]:
    return _write_common(model, "MT5") | ({} if model.head is None else {"tie_word_embeddings": model.head.tied})


def _write_common(model: ModelConfig, stem: str) -> dict[str, Any]:
    block = model.encoder.pattern[0]
    activation, bias = block.mlp.activation, model.encoder.relative_bias
    name = "gelu" if block.mlp.gated and activation == "gelu_tanh" else write_activation(activation)
    return {
        "is_encoder_decoder": True,
        "num_layers": model.encoder.num_layers,
        "num_decoder_layers": model.decoder.num_layers,
        "d_model": model.embed_dim,
        "num_heads": block.attention.num_heads,
        "d_kv": block.attention.head_dim,
        "d_ff": block.mlp.dim,
        "vocab_size": model.vocab_size,
        "relative_attention_num_buckets": bias and bias.num_buckets,
        "relative_attention_max_distance": bias and bias.max_distance,
        "feed_forward_proj": f"gated-{name}" if block.mlp.gated else name,
        "layer_norm_epsilon": block.norm.eps,
        "dropout_rate": block.dropout,
        "classifier_dropout": 0.0 if model.pooler is None else model.pooler.dropout,
        **write_special_ids(model.special),
        "decoder_start_token_id": model.special.decoder_start,
        **write_head(model, _architectures(stem)),
    }


def _architectures(stem: str) -> dict[HeadKind, str]:
    return {"vocabulary": f"{stem}ForConditionalGeneration", "classes": f"{stem}{CLASSES}"}


def _entries(model: ModelConfig) -> tuple[Entry, ...]:
    return _GATED if model.encoder.pattern[0].mlp.gated else _PLAIN


def _format(
    model_type: str,
    stem: str,
    read: Callable[[Fields, ModelFiles], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
) -> Format:
    return Format(
        model_type=model_type,
        architectures=tuple(_architectures(stem).values()),
        read=read,
        write=write,
        shape="encoder-decoder",
        entries=_entries,
        base=_BASE,
        bare=f"{stem}ForConditionalGeneration",
        copies=_COPIES,
        ignored=_IGNORED,
    )


FORMATS = (
    _format("t5", "T5", _read_t5, _write_t5),
    _format("mt5", "MT5", _read_mt5, _write_mt5),
)

_SHAPE = {
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
_GATED_SHAPE = _SHAPE | {"feed_forward_proj": "gated-gelu"}
SAMPLES = {
    "t5": Sample("t5-small", "t5", "T5ForConditionalGeneration", "T5Config", _SHAPE),
    "t5 classes": Sample("t5-small", "t5", "T5ForSequenceClassification", "T5Config", _SHAPE | {"num_labels": 3}),
    "t5v1.1": Sample(
        "t5v1.1-small",
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        _GATED_SHAPE | {"tie_word_embeddings": False},
        untied_output=True,
    ),
    "mt5": Sample("mt5-small", "mt5", "MT5ForConditionalGeneration", "MT5Config", _GATED_SHAPE, untied_output=True),
    "mt5 classes": Sample("mt5-small", "mt5", "MT5ForSequenceClassification", "MT5Config", _GATED_SHAPE | NAMED),
}
