"""The files of T5, T5 v1.1 and mT5: numbered sub-layers, and one table of biases in each stack's first layer."""

from typing import Any

from jaxformer.config import BucketBias, ModelConfig
from jaxformer.convert.fields import ACTIVATIONS, Fields, written_activation, written_special
from jaxformer.convert.format import Format, Found
from jaxformer.convert.tables import Entry, entry
from jaxformer.errors import UserError
from jaxformer.models.t5 import t5


def _stack(side: str, mlp: int) -> list[Entry]:
    """Sub-layer `mlp` is the feed-forward one; a decoder has cross-attention before it."""
    here, there = f"{side}/{{place}}", f"{side}.block.{{layer}}.layer"
    rows = _attention(f"{there}.0.SelfAttention", f"{here}/attention")
    rows.append(entry(f"{there}.0.layer_norm.weight", f"{here}/attention_norm/scale", "D -> D"))
    if side == "decoder":
        rows += _attention(f"{there}.1.EncDecAttention", f"{here}/cross_attention")
        rows.append(entry(f"{there}.1.layer_norm.weight", f"{here}/cross_attention_norm/scale", "D -> D"))
    dense = f"{there}.{mlp}.DenseReluDense"
    return [
        *rows,
        entry(f"{there}.{mlp}.layer_norm.weight", f"{here}/mlp_norm/scale", "D -> D"),
        entry(f"{dense}.wo.weight", f"{here}/mlp/down/kernel", "D F -> F D"),
        entry(f"{side}.final_layer_norm.weight", f"{side}/final_norm/scale", "D -> D"),
        entry(
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{side}/relative_bias",
            "R N -> R N",
        ),
    ]


def _attention(there: str, here: str) -> list[Entry]:
    rows = [entry(f"{there}.{p}.weight", f"{here}/{p}/kernel", "(N H) D -> D N H") for p in "qkv"]
    return [*rows, entry(f"{there}.o.weight", f"{here}/out/kernel", "D (N H) -> N H D")]


def _up(names: dict[str, str]) -> list[Entry]:
    """The layers into the MLP's width, whose names depend on whether it is gated."""
    sides = (("encoder", 1), ("decoder", 2))
    return [
        entry(
            f"{side}.block.{{layer}}.layer.{index}.DenseReluDense.{theirs}.weight",
            f"{side}/{{place}}/mlp/{ours}/kernel",
            "F D -> D F",
        )
        for side, index in sides
        for ours, theirs in names.items()
    ]


_SHARED = (
    entry("shared.weight", "embedding/tokens", "V D -> V D"),
    entry("lm_head.weight", "head/output/kernel", "V D -> D V"),
    *_stack("encoder", 1),
    *_stack("decoder", 2),
)
_PLAIN = (*_SHARED, *_up({"up": "wi"}))
_GATED = (*_SHARED, *_up({"gate": "wi_0", "up": "wi_1"}))
_COPIES = {f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")}
_IGNORED = (r"decoder\..*EncDecAttention\.relative_attention_bias\.weight",)  # of older releases, unused


def _read_t5(fields: Fields, found: Found) -> ModelConfig:
    # What the name says decides about scaling; whether the output is tied shows in the tensors.
    scaled = fields.take("scale_decoder_outputs", fields.take("tie_word_embeddings", True))
    return _read(fields, found, "relu", scaled)


def _read_mt5(fields: Fields, found: Found) -> ModelConfig:
    fields.take("tie_word_embeddings", True)
    return _read(fields, found, "gated-gelu", False)


def _read(fields: Fields, found: Found, default_mlp: str, scaled: bool) -> ModelConfig:
    fields.require("is_encoder_decoder", True)
    fields.require("is_decoder", False)
    for derived in ("dense_act_fn", "is_gated_act", "n_positions"):  # the first two follow from feed_forward_proj
        fields.take(derived, None)
    gate, _, activation = fields.take("feed_forward_proj", default_mlp).rpartition("-")
    if gate not in ("", "gated") or activation not in ACTIVATIONS:
        raise UserError(f"{fields.where}: feed_forward_proj = '{gate}-{activation}' is not supported")
    # The library reads gated-gelu as its tanh form.
    tanh = gate == "gated" and activation == "gelu"
    return t5(
        num_layers=fields.take("num_layers"),
        num_decoder_layers=fields.take("num_decoder_layers", None),
        embed_dim=fields.take("d_model"),
        num_heads=fields.take("num_heads"),
        head_dim=fields.take("d_kv", 64),
        mlp_dim=fields.take("d_ff"),
        vocab_size=fields.take("vocab_size"),
        relative_bias=BucketBias(
            num_buckets=fields.take("relative_attention_num_buckets", 32),
            max_distance=fields.take("relative_attention_max_distance", 128),
        ),
        activation="gelu_tanh" if tanh else ACTIVATIONS[activation],
        gated=gate == "gated",
        tied="lm_head.weight" not in found.names,
        head_scale=scaled,
        eps=fields.take("layer_norm_epsilon", 1e-6),
        special=fields.special(eos=1, pad=0, decoder_start=0),
        dropout=fields.take("dropout_rate", 0.1),
    )


def _write_t5(model: ModelConfig) -> dict[str, Any]:
    return _written(model, "T5ForConditionalGeneration") | {"tie_word_embeddings": model.head.scale}


def _write_mt5(model: ModelConfig) -> dict[str, Any]:
    return _written(model, "MT5ForConditionalGeneration") | {"tie_word_embeddings": model.head.tied}


def _written(model: ModelConfig, architecture: str) -> dict[str, Any]:
    block = model.encoder.pattern[0]
    activation, bias = block.mlp.activation, model.encoder.relative_bias
    name = "gelu" if block.mlp.gated and activation == "gelu_tanh" else written_activation(activation)
    return {
        "architectures": [architecture],
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
        **written_special(model.special),
        "decoder_start_token_id": model.special.decoder_start,
    }


def entries(model: ModelConfig) -> tuple[Entry, ...]:
    return _GATED if model.encoder.pattern[0].mlp.gated else _PLAIN


def _format(name: str, architecture: str, read, write) -> Format:
    return Format(
        name, name, (architecture,), read, write, "encoder-decoder", entries, copies=_COPIES, ignored=_IGNORED
    )


FORMATS = (
    _format("t5", "T5ForConditionalGeneration", _read_t5, _write_t5),
    _format("mt5", "MT5ForConditionalGeneration", _read_mt5, _write_mt5),
)
