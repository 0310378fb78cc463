"""The files of BERT, RoBERTa and DistilBERT; sentence encoders such as MiniLM are BERT's."""

from typing import Any

from jaxformer.config import Learned, ModelConfig
from jaxformer.convert.fields import Fields, written_activation, written_special
from jaxformer.convert.format import Format, Found
from jaxformer.convert.tables import Entry, entry
from jaxformer.errors import UserError
from jaxformer.models.bert import bert
from jaxformer.models.distilbert import distilbert
from jaxformer.models.roberta import roberta

_HERE = "encoder/{place}"


def linear(there: str, here: str, form: str) -> list[Entry]:
    """A kernel, stored output first, and its bias."""
    out = form.partition("->")[0].split(" ")[0]
    kept = "".join(form.partition("->")[2].split()[1:])
    bias = {"NH": "(N H) -> N H"}.get(kept, f"{out} -> {out}")
    return [entry(f"{there}.weight", f"{here}/kernel", form), entry(f"{there}.bias", f"{here}/bias", bias)]


def norm(there: str, here: str) -> list[Entry]:
    return [entry(f"{there}.weight", f"{here}/scale", "D -> D"), entry(f"{there}.bias", f"{here}/bias", "D -> D")]


def _embeddings(prefix: str) -> list[Entry]:
    return [
        entry(f"{prefix}.word_embeddings.weight", "embedding/tokens", "V D -> V D"),
        entry(f"{prefix}.position_embeddings.weight", "embedding/positions", "T D -> T D"),
        entry(f"{prefix}.token_type_embeddings.weight", "embedding/types", "Y D -> Y D"),
        *norm(f"{prefix}.LayerNorm", "embedding/norm"),
    ]


def _layer(there: str, names: dict[str, str]) -> list[Entry]:
    """One block; `names` are those of its parts below `there`."""
    rows: list[Entry] = []
    for part in "qkv":
        rows += linear(f"{there}.{names[part]}", f"{_HERE}/attention/{part}", "(N H) D -> D N H")
    return [
        *rows,
        entry(f"{there}.{names['out']}.weight", f"{_HERE}/attention/out/kernel", "D (N H) -> N H D"),
        entry(f"{there}.{names['out']}.bias", f"{_HERE}/attention/out/bias", "D -> D"),
        *norm(f"{there}.{names['attention_norm']}", f"{_HERE}/attention_norm"),
        *linear(f"{there}.{names['up']}", f"{_HERE}/mlp/up", "F D -> D F"),
        *linear(f"{there}.{names['down']}", f"{_HERE}/mlp/down", "D F -> F D"),
        *norm(f"{there}.{names['mlp_norm']}", f"{_HERE}/mlp_norm"),
    ]


_BERT_LAYER = _layer(
    "{base}encoder.layer.{layer}",
    {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    },
)
_DISTILBERT_LAYER = _layer(
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


def _head(dense: str, layer_norm: str, bias: str, output: str) -> list[Entry]:
    return [
        *linear(dense, "head/transform/dense", "E D -> D E"),
        *norm(layer_norm, "head/transform/norm"),
        entry(bias, "head/bias", "V -> V"),
        entry(output, "head/output/kernel", "V D -> D V"),
    ]


def _pooler(dense: str, classes: str) -> list[Entry]:
    return [
        *linear(dense, "pooler/transform/dense", "E D -> D E"),
        *linear(classes, "pooler/classes", "C D -> D C"),
    ]


_BERT = (
    *_embeddings("{base}embeddings"),
    *_BERT_LAYER,
    *_head(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder.weight",
    ),
    *_pooler("{base}pooler.dense", "classifier"),
)
_ROBERTA_HEAD = _head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.weight")
_ROBERTA = (*_embeddings("{base}embeddings"), *_BERT_LAYER, *_ROBERTA_HEAD)
_DISTILBERT = (
    *_embeddings("{base}embeddings"),
    *_DISTILBERT_LAYER,
    *_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector.weight"),
    *_pooler("pre_classifier", "classifier"),
)


def _roberta_entries(model: ModelConfig) -> tuple[Entry, ...]:
    """The bare model's pooler is BERT's, the classifier's is elsewhere."""
    classes = model.pooler is not None and model.pooler.num_classes is not None
    dense = "classifier.dense" if classes else "{base}pooler.dense"
    return (*_ROBERTA, *_pooler(dense, "classifier.out_proj"))


# ---------------------------------------------------------------- config.json
def heads(fields: Fields, found: Found, pooler: str) -> dict[str, Any]:
    """Which of the heads an architecture has; `pooler` is the tensor that shows a bare model's."""
    classes = None
    if found.architecture.endswith("ForSequenceClassification"):
        classes = len(fields.take("id2label", None) or range(fields.take("num_labels", 2)))
    bare = found.architecture.endswith("Model")  # none of these has LMHeadModel
    return {
        "masked_lm": found.architecture.endswith("ForMaskedLM"),
        "pooled": classes is not None or (bare and pooler in found.names),
        "num_classes": classes,
    }


def written_heads(model: ModelConfig, stem: str) -> dict[str, Any]:
    if model.pooler is not None and model.pooler.num_classes is not None:
        labels = {str(i): f"LABEL_{i}" for i in range(model.pooler.num_classes)}
        ids = {label: int(i) for i, label in labels.items()}
        return {"architectures": [f"{stem}ForSequenceClassification"], "id2label": labels, "label2id": ids}
    return {"architectures": [f"{stem}Model" if model.head is None else f"{stem}ForMaskedLM"]}


def _shared(fields: Fields, found: Found) -> dict[str, Any]:
    fields.require("is_decoder", False)
    fields.require("add_cross_attention", False)
    fields.require("position_embedding_type", "absolute")
    return {
        "num_layers": fields.take("num_hidden_layers", 12),
        "embed_dim": fields.take("hidden_size", 768),
        "num_heads": fields.take("num_attention_heads", 12),
        "mlp_dim": fields.take("intermediate_size", 3072),
        "activation": fields.activation("hidden_act", "gelu"),
        "eps": fields.take("layer_norm_eps", 1e-12),
        "num_types": fields.take("type_vocab_size", 2),
        "tied": fields.take("tie_word_embeddings", True),
        "dropout": fields.take("hidden_dropout_prob", 0.1),
        "attention_dropout": fields.take("attention_probs_dropout_prob", 0.1),
        **heads(fields, found, "pooler.dense.weight"),
    }


def _read_bert(fields: Fields, found: Found) -> ModelConfig:
    return bert(
        **_shared(fields, found),
        vocab_size=fields.take("vocab_size", 30_522),
        position=Learned(max_length=fields.take("max_position_embeddings", 512)),
        special=fields.special(pad=0),
    )


def _read_roberta(fields: Fields, found: Found) -> ModelConfig:
    special = fields.special(bos=0, eos=2, pad=1)
    if special.pad is None:
        raise UserError(f"{fields.where}: field 'pad_token_id' is missing: positions begin after that of padding")
    offset = special.pad + 1
    rows = fields.take("max_position_embeddings", 512)
    return roberta(
        **_shared(fields, found),
        vocab_size=fields.take("vocab_size", 50_265),
        position=Learned(max_length=rows - offset, offset=offset),
        special=special,
    )


def _read_distilbert(fields: Fields, found: Found) -> ModelConfig:
    fields.take("sinusoidal_pos_embds", False)  # how the table was made; it is stored either way
    return distilbert(
        num_layers=fields.take("n_layers", 6),
        embed_dim=fields.take("dim", 768),
        num_heads=fields.take("n_heads", 12),
        mlp_dim=fields.take("hidden_dim", 3072),
        vocab_size=fields.take("vocab_size", 30_522),
        position=Learned(max_length=fields.take("max_position_embeddings", 512)),
        activation=fields.activation("activation", "gelu"),
        tied=fields.take("tie_word_embeddings", fields.take("tie_weights_", True)),
        special=fields.special(pad=0),
        dropout=fields.take("dropout", 0.1),
        attention_dropout=fields.take("attention_dropout", 0.1),
        classifier_dropout=fields.take("seq_classif_dropout", 0.2),
        **heads(fields, found, ""),
    )


def _written(model: ModelConfig, stem: str) -> dict[str, Any]:
    block, position = model.encoder.pattern[0], model.embedding.position
    return {
        "num_hidden_layers": model.encoder.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": block.attention.num_heads,
        "intermediate_size": block.mlp.dim,
        "hidden_act": written_activation(block.mlp.activation),
        "layer_norm_eps": block.norm.eps,
        "type_vocab_size": model.embedding.num_types or None,  # these two always have types
        "vocab_size": model.vocab_size,
        "max_position_embeddings": position.max_length + position.offset if isinstance(position, Learned) else None,
        "tie_word_embeddings": model.head is None or model.head.tied,
        "hidden_dropout_prob": block.dropout,
        "attention_probs_dropout_prob": block.attention.dropout,
        **written_special(model.special),
        **written_heads(model, stem),
    }


def _write_distilbert(model: ModelConfig) -> dict[str, Any]:
    block, position = model.encoder.pattern[0], model.embedding.position
    return {
        "n_layers": model.encoder.num_layers,
        "dim": model.embed_dim,
        "n_heads": block.attention.num_heads,
        "hidden_dim": block.mlp.dim,
        "activation": written_activation(block.mlp.activation),
        "vocab_size": model.vocab_size,
        "max_position_embeddings": position.max_length if isinstance(position, Learned) else None,
        "tie_word_embeddings": model.head is None or model.head.tied,
        "dropout": block.dropout,
        "attention_dropout": block.attention.dropout,
        **written_special(model.special),
        **written_heads(model, "DistilBert"),
    }


def _architectures(stem: str) -> tuple[str, ...]:
    return (f"{stem}Model", f"{stem}ForMaskedLM", f"{stem}ForSequenceClassification")


_RENAMED = {".gamma": ".weight", ".beta": ".bias"}
_IGNORED = (r".*embeddings\.position_ids",)

FORMATS = (
    Format(
        model_type="bert",
        family="bert",
        architectures=_architectures("Bert"),
        read=_read_bert,
        write=lambda model: _written(model, "Bert"),
        shape="encoder-only",
        entries=_BERT,
        base="bert.",
        bare="BertModel",
        copies={
            "cls.predictions.decoder.weight": "{base}embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        # Published with heads that the named architecture does not use.
        ignored=(*_IGNORED, r"cls\..*", r"(bert\.)?pooler\..*"),
        renamed=_RENAMED,
    ),
    Format(
        model_type="roberta",
        family="roberta",
        architectures=_architectures("Roberta"),
        read=_read_roberta,
        write=lambda model: _written(model, "Roberta"),
        shape="encoder-only",
        entries=_roberta_entries,
        base="roberta.",
        bare="RobertaModel",
        copies={
            "lm_head.decoder.weight": "{base}embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=(*_IGNORED, r"lm_head\..*", r"(roberta\.)?pooler\..*"),
        renamed=_RENAMED,
    ),
    Format(
        model_type="distilbert",
        family="distilbert",
        architectures=_architectures("DistilBert"),
        read=_read_distilbert,
        write=_write_distilbert,
        shape="encoder-only",
        entries=_DISTILBERT,
        base="distilbert.",
        bare="DistilBertModel",
        copies={"vocab_projector.weight": "{base}embeddings.word_embeddings.weight"},
        ignored=(*_IGNORED, r"vocab_.*"),
        renamed=_RENAMED,
    ),
)
