"""Format of RoBERTa: BERT's encoder with different heads, and positions that start at the padding id plus one."""

from jaxformer.config import Learned, ModelConfig
from jaxformer.convert.bert import (
    EMBEDDINGS,
    IGNORED,
    LAYER,
    RENAMED,
    architectures,
    head_entries,
    pooler_entries,
    read_encoder,
    write_encoder,
)
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import head_kind
from jaxformer.convert.sample import NAMED, POSITIONS, SHAPE, Sample
from jaxformer.convert.tables import Entry
from jaxformer.errors import UserError
from jaxformer.models.roberta import roberta

_ENTRIES = (
    *EMBEDDINGS,
    *LAYER,
    *head_entries("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.weight"),
)


def _entries(model: ModelConfig) -> tuple[Entry, ...]:
    """Return the table; a classifier has its own dense layer instead of the pooler's, and a tagger has none."""
    is_classifier = head_kind(model) == "classes"
    dense = "classifier.dense" if is_classifier else "{base}pooler.dense"
    return (*_ENTRIES, *pooler_entries(dense, "classifier.out_proj" if is_classifier else "classifier"))


def _read(fields: Fields, files: ModelFiles) -> ModelConfig:
    vocab_size = fields.take("vocab_size", 50_265)
    special = fields.special_ids(vocab_size, bos=0, eos=2, pad=1)
    if special.pad is None:
        raise UserError(f"{fields.where}: field 'pad_token_id' is missing: positions start at the padding id plus one")
    offset = special.pad + 1
    rows = fields.take("max_position_embeddings", 512)
    return roberta(
        **read_encoder(fields, files),
        vocab_size=vocab_size,
        position=Learned(max_length=rows - offset, offset=offset),
        special=special,
    )


FORMATS = (
    Format(
        model_type="roberta",
        architectures=architectures("Roberta"),
        read=_read,
        write=lambda model: write_encoder(model, "Roberta"),
        shape="encoder-only",
        entries=_entries,
        base="roberta.",
        bare="RobertaModel",
        copies={
            "lm_head.decoder.weight": "{base}embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=(*IGNORED, r"lm_head\..*", r"(roberta\.)?pooler\..*"),
        renamed=RENAMED,
    ),
)

_SHAPE = SHAPE | {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "max_position_embeddings": POSITIONS + 2,
    "type_vocab_size": 1,
}
SAMPLES = {
    "roberta": Sample("roberta-base", "roberta", "RobertaForMaskedLM", "RobertaConfig", _SHAPE),
    "roberta classes": Sample(
        "roberta-base",
        "roberta",
        "RobertaForSequenceClassification",
        "RobertaConfig",
        _SHAPE | NAMED | {"problem_type": "multi_label_classification"},
    ),
    "roberta tags": Sample("roberta-base", "roberta", "RobertaForTokenClassification", "RobertaConfig", _SHAPE),
}
