"""Formats of BART and of the Marian translation models, which differ in their embeddings."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Learned, ModelConfig, Sinusoidal
from jaxformer.convert.bert import linear
from jaxformer.convert.fields import Fields, write_activation, write_special_ids
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import CLASSES, HeadKind, read_classes, write_head
from jaxformer.convert.sample import NAMED, POSITIONS, VOCAB, Sample
from jaxformer.convert.tables import Entry, entry
from jaxformer.models.bart import bart
from jaxformer.models.marian import marian


def _stack(side: str) -> list[Entry]:
    ours, theirs = f"{side}/{{block}}", f"model.{side}.layers.{{layer}}"
    prefix = "source_" if side == "encoder" else ""
    rows = [
        *_attention(f"{theirs}.self_attn", f"{ours}/attention"),
        *_norm(f"{theirs}.self_attn_layer_norm", f"{ours}/attention_norm"),
    ]
    if side == "decoder":
        rows += _attention(f"{theirs}.encoder_attn", f"{ours}/cross_attention")
        rows += _norm(f"{theirs}.encoder_attn_layer_norm", f"{ours}/cross_attention_norm")
    return [
        *rows,
        entry(f"{theirs}.fc1.weight", f"{ours}/mlp/up/kernel", "F D -> D F"),
        entry(f"{theirs}.fc1.bias", f"{ours}/mlp/up/bias", "F -> F"),
        entry(f"{theirs}.fc2.weight", f"{ours}/mlp/down/kernel", "D F -> F D"),
        entry(f"{theirs}.fc2.bias", f"{ours}/mlp/down/bias", "D -> D"),
        *_norm(f"{theirs}.final_layer_norm", f"{ours}/mlp_norm"),
        entry(f"model.{side}.embed_positions.weight", f"embedding/{prefix}positions", "T D -> T D"),
        *_norm(f"model.{side}.layernorm_embedding", f"embedding/{prefix}norm"),
    ]


def _attention(theirs: str, ours: str) -> list[Entry]:
    rows = []
    for p in "qkv":
        rows.append(entry(f"{theirs}.{p}_proj.weight", f"{ours}/{p}/kernel", "(N H) D -> D N H"))
        rows.append(entry(f"{theirs}.{p}_proj.bias", f"{ours}/{p}/bias", "(N H) -> N H"))
    rows.append(entry(f"{theirs}.out_proj.weight", f"{ours}/out/kernel", "D (N H) -> N H D"))
    return [*rows, entry(f"{theirs}.out_proj.bias", f"{ours}/out/bias", "D -> D")]


def _norm(theirs: str, ours: str) -> list[Entry]:
    return [
        entry(f"{theirs}.weight", f"{ours}/scale", "D -> D"),
        entry(f"{theirs}.bias", f"{ours}/bias", "D -> D"),
    ]


_SHARED = "model.shared.weight"
_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_ENTRIES = (
    entry(_SHARED, "embedding/tokens", "V D -> V D"),
    entry("lm_head.weight", "head/output/kernel", "V D -> D V"),
    entry("final_logits_bias", "head/bias", "1 V -> V"),
    *linear("classification_head.dense", "pooler/transform/dense", "E D -> D E"),
    *linear("classification_head.out_proj", "pooler/classes", "C D -> D C"),
    *_stack("encoder"),
    *_stack("decoder"),
)
_BART: Mapping[HeadKind, str] = {"vocabulary": "BartForConditionalGeneration", "classes": f"Bart{CLASSES}"}
_MARIAN: Mapping[HeadKind, str] = {"vocabulary": "MarianMTModel"}
_COPIES = dict.fromkeys(("lm_head.weight", _SOURCE, _TARGET), _SHARED)


def _marian_entries(model: ModelConfig) -> tuple[Entry, ...]:
    if model.source_vocab_size is None:
        return _ENTRIES
    source = entry(_SOURCE, "embedding/source_tokens", "V D -> V D")
    return source, entry(_TARGET, "embedding/tokens", "V D -> V D"), *_ENTRIES[1:]


def _marian_copies(model: ModelConfig) -> dict[str, str]:
    return _COPIES if model.source_vocab_size is None else {"lm_head.weight": _TARGET}


def _read_bart(fields: Fields, files: ModelFiles) -> ModelConfig:
    fields.require("normalize_embedding", True)
    fields.require("static_position_embeddings", False)
    shared, length = _read_common(fields), fields.take("max_position_embeddings", 1024)
    return bart(
        **shared,
        position=Learned(max_length=length, offset=2),
        activation=fields.activation("activation_function", "gelu"),
        special=fields.special_ids(shared["vocab_size"], bos=0, eos=2, pad=1, decoder_start=2),
        classifier_dropout=fields.take("classifier_dropout", 0.0),
        **read_classes(fields, files, num_labels=3),
    )


def _read_marian(fields: Fields, files: ModelFiles) -> ModelConfig:
    fields.require("normalize_embedding", False)
    fields.require("static_position_embeddings", True)
    shared = _read_common(fields)
    source_size = shared["vocab_size"]
    if fields.take("share_encoder_decoder_embeddings", True):
        fields.require("decoder_vocab_size", source_size)
    else:
        shared |= {"vocab_size": fields.take("decoder_vocab_size", source_size), "source_vocab_size": source_size}
    return marian(
        **shared,
        context_length=fields.take("max_position_embeddings", 1024),
        activation=fields.activation("activation_function", "gelu"),
        special=fields.special_ids(shared["vocab_size"], eos=0, pad=58_100, decoder_start=58_100),
    )


def _read_common(fields: Fields) -> dict[str, Any]:
    for name in ("normalize_before", "add_final_layer_norm", "add_bias_logits"):
        fields.require(name, False)
    fields.require("is_encoder_decoder", True)
    fields.require("is_decoder", False)
    fields.require("do_blenderbot_90_layernorm", False)
    # num_hidden_layers repeats encoder_layers. extra_pos_embeddings is unused; files of OPUS-MT store the vocabulary
    # size in it.
    for name in ("num_hidden_layers", "extra_pos_embeddings"):
        fields.take(name, None)
    for name in ("encoder_layerdrop", "decoder_layerdrop", "activation_dropout"):  # only used in training
        fields.take(name, None)
    return {
        "num_layers": fields.take("encoder_layers", 12),
        "num_decoder_layers": fields.take("decoder_layers", 12),
        "embed_dim": fields.take("d_model", 1024),
        "num_heads": fields.take("encoder_attention_heads", 16),
        "num_decoder_heads": fields.take("decoder_attention_heads", 16),
        "mlp_dim": fields.take("encoder_ffn_dim", 4096),
        "decoder_mlp_dim": fields.take("decoder_ffn_dim", 4096),
        "vocab_size": fields.take("vocab_size"),
        "scale_embedding": fields.take("scale_embedding", False),
        "tied": fields.take("tie_word_embeddings", True),
        "dropout": fields.take("dropout", 0.1),
        "attention_dropout": fields.take("attention_dropout", 0.0),
    }


def _write_bart(model: ModelConfig) -> dict[str, Any]:
    dropout = 0.0 if model.pooler is None else model.pooler.dropout
    return _write_common(model, _BART) | {"classifier_dropout": dropout}


def _write_marian(model: ModelConfig) -> dict[str, Any]:
    pad, source_size = model.special.pad, model.encoder_vocab_size
    if pad is not None and pad >= source_size:
        raise ValueError(f"its padding id must be in both vocabularies, but special.pad={pad} >= {source_size}")
    return _write_common(model, _MARIAN) | {
        "vocab_size": model.encoder_vocab_size,
        "decoder_vocab_size": model.vocab_size,
        "share_encoder_decoder_embeddings": model.source_vocab_size is None,
    }


def _write_common(model: ModelConfig, architectures: Mapping[HeadKind, str]) -> dict[str, Any]:
    encoder, decoder, position = model.encoder.pattern[0], model.decoder.pattern[0], model.embedding.position
    return {
        "is_encoder_decoder": True,
        "encoder_layers": model.encoder.num_layers,
        "decoder_layers": model.decoder.num_layers,
        "d_model": model.embed_dim,
        "encoder_attention_heads": encoder.attention.num_heads,
        "decoder_attention_heads": decoder.attention.num_heads,
        "encoder_ffn_dim": encoder.mlp.dim,
        "decoder_ffn_dim": decoder.mlp.dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": position.max_length if isinstance(position, Learned | Sinusoidal) else None,
        "activation_function": write_activation(encoder.mlp.activation),
        "scale_embedding": model.embedding.scale,
        "tie_word_embeddings": model.head is None or model.head.tied,
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention.dropout,
        "forced_eos_token_id": None,
        **write_special_ids(model.special),
        "decoder_start_token_id": model.special.decoder_start,
        **write_head(model, architectures),
    }


FORMATS = (
    Format(
        model_type="bart",
        architectures=tuple(_BART.values()),
        read=_read_bart,
        write=_write_bart,
        shape="encoder-decoder",
        entries=_ENTRIES,
        copies=_COPIES,
    ),
    Format(
        model_type="marian",
        architectures=tuple(_MARIAN.values()),
        read=_read_marian,
        write=_write_marian,
        shape="encoder-decoder",
        entries=_marian_entries,
        copies=_marian_copies,
        ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),  # sinusoidal positions, which are computed
    ),
)

_SHAPE = {
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
_MARIAN_SHAPE = _SHAPE | {
    "pad_token_id": VOCAB - 1,
    "decoder_start_token_id": VOCAB - 1,
    "eos_token_id": 0,
    "scale_embedding": True,
    "activation_function": "swish",
}
# More source ids than target ids, so that a wrong table or size is an error.
_TWO_VOCABULARIES = {
    "vocab_size": VOCAB + 16,
    "decoder_vocab_size": VOCAB,
    "share_encoder_decoder_embeddings": False,
}
SAMPLES = {
    "bart": Sample("bart-base", "bart", "BartForConditionalGeneration", "BartConfig", _SHAPE),
    "bart classes": Sample("bart-base", "bart", _BART["classes"], "BartConfig", _SHAPE | NAMED),
    "marian": Sample("marian-opus-en-de", "marian", "MarianMTModel", "MarianConfig", _MARIAN_SHAPE),
    "marian two vocabularies": Sample(
        "marian-opus-en-de", "marian", "MarianMTModel", "MarianConfig", _MARIAN_SHAPE | _TWO_VOCABULARIES
    ),
}
