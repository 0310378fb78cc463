"""Format of DistilBERT: BERT without token types, with different tensor names."""

from typing import Any

from jaxformer.config import Learned, ModelConfig
from jaxformer.convert.bert import (
    EMBEDDINGS,
    IGNORED,
    RENAMED,
    architectures,
    head_entries,
    layer_entries,
    pooler_entries,
    read_heads,
    write_heads,
)
from jaxformer.convert.fields import Fields, write_activation, write_special_ids
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import TAGS, head_kind
from jaxformer.convert.sample import POSITIONS, VOCAB, Sample
from jaxformer.models.distilbert import distilbert

_LAYER = layer_entries(
    "{base}transformer.layer.{layer}",
    {
        "q": "attention.q_lin",
        "k": "attention.k_lin",
        "v": "attention.v_lin",
        "out": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    },
)
_ENTRIES = (
    *EMBEDDINGS,
    *_LAYER,
    *head_entries("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector.weight"),
    *pooler_entries("pre_classifier", "classifier"),
)


def _read(fields: Fields, files: ModelFiles) -> ModelConfig:
    vocab_size, classifier_dropout = fields.take("vocab_size", 30_522), fields.take("seq_classif_dropout", 0.2)
    fields.take("sinusoidal_pos_embds", False)  # only affects initialisation: the embeddings are always stored
    return distilbert(
        num_layers=fields.take("n_layers", 6),
        embed_dim=fields.take("dim", 768),
        num_heads=fields.take("n_heads", 12),
        mlp_dim=fields.take("hidden_dim", 3072),
        vocab_size=vocab_size,
        position=Learned(max_length=fields.take("max_position_embeddings", 512)),
        activation=fields.activation("activation", "gelu"),
        tied=fields.take("tie_word_embeddings", fields.take("tie_weights_", True)),
        special=fields.special_ids(vocab_size, pad=0),
        dropout=fields.take("dropout", 0.1),
        attention_dropout=fields.take("attention_dropout", 0.1),
        classifier_dropout=None if files.architecture.endswith(TAGS) else classifier_dropout,
        **read_heads(fields, files),
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    block, position = model.encoder.pattern[0], model.embedding.position
    return {
        "n_layers": model.encoder.num_layers,
        "dim": model.embed_dim,
        "n_heads": block.attention.num_heads,
        "hidden_dim": block.mlp.dim,
        "activation": write_activation(block.mlp.activation),
        "vocab_size": model.vocab_size,
        "max_position_embeddings": position.max_length if isinstance(position, Learned) else None,
        "tie_word_embeddings": model.head is None or model.head.tied,
        "dropout": block.dropout,
        "attention_dropout": block.attention.dropout,
        "seq_classif_dropout": model.pooler.dropout if head_kind(model) == "classes" else 0.2,
        **write_special_ids(model.special),
        **write_heads(model, "DistilBert"),
    }


FORMATS = (
    Format(
        model_type="distilbert",
        architectures=architectures("DistilBert"),
        read=_read,
        write=_write,
        shape="encoder-only",
        entries=_ENTRIES,
        base="distilbert.",
        bare="DistilBertModel",
        copies={"vocab_projector.weight": "{base}embeddings.word_embeddings.weight"},
        ignored=(*IGNORED, r"vocab_.*"),
        renamed=RENAMED,
    ),
)

_SHAPE = {
    "vocab_size": VOCAB,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": POSITIONS,
}
SAMPLES = {
    "distilbert": Sample("distilbert-base", "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", _SHAPE),
    "distilbert classes": Sample(
        "distilbert-base",
        "distilbert",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        _SHAPE | {"num_labels": 1, "seq_classif_dropout": 0.3},  # a regression
    ),
    "distilbert tags": Sample(
        "distilbert-base", "distilbert", "DistilBertForTokenClassification", "DistilBertConfig", _SHAPE
    ),
}
