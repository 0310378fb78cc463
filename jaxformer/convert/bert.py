"""Format of BERT and of sentence encoders such as MiniLM, and the parts that other encoders share."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Learned, ModelConfig
from jaxformer.convert.fields import Fields, write_activation, write_special_ids
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import CLASSES, TAGS, read_classes, write_head
from jaxformer.convert.sample import NAMED, SHAPE, Sample
from jaxformer.convert.tables import Entry, entry
from jaxformer.models.bert import bert

_BLOCK = "encoder/{block}"


def linear(theirs: str, ours: str, layout: str) -> list[Entry]:
    """Return the rows of a PyTorch linear layer: a kernel of shape [outputs, inputs] and a bias."""
    out = layout.partition("->")[0].split(" ")[0]
    output_dims = "".join(layout.partition("->")[2].split()[1:])
    bias = {"NH": "(N H) -> N H"}.get(output_dims, f"{out} -> {out}")
    return [entry(f"{theirs}.weight", f"{ours}/kernel", layout), entry(f"{theirs}.bias", f"{ours}/bias", bias)]


def norm(theirs: str, ours: str) -> list[Entry]:
    return [entry(f"{theirs}.weight", f"{ours}/scale", "D -> D"), entry(f"{theirs}.bias", f"{ours}/bias", "D -> D")]


def layer_entries(theirs: str, names: Mapping[str, str]) -> list[Entry]:
    """Return the rows of one block; `names` are the module names below the prefix `theirs`."""
    rows: list[Entry] = []
    for part in "qkv":
        rows += linear(f"{theirs}.{names[part]}", f"{_BLOCK}/attention/{part}", "(N H) D -> D N H")
    return [
        *rows,
        entry(f"{theirs}.{names['out']}.weight", f"{_BLOCK}/attention/out/kernel", "D (N H) -> N H D"),
        entry(f"{theirs}.{names['out']}.bias", f"{_BLOCK}/attention/out/bias", "D -> D"),
        *norm(f"{theirs}.{names['attention_norm']}", f"{_BLOCK}/attention_norm"),
        *linear(f"{theirs}.{names['up']}", f"{_BLOCK}/mlp/up", "F D -> D F"),
        *linear(f"{theirs}.{names['down']}", f"{_BLOCK}/mlp/down", "D F -> F D"),
        *norm(f"{theirs}.{names['mlp_norm']}", f"{_BLOCK}/mlp_norm"),
    ]


def head_entries(dense: str, layer_norm: str, bias: str, output: str) -> list[Entry]:
    return [
        *linear(dense, "head/transform/dense", "E D -> D E"),
        *norm(layer_norm, "head/transform/norm"),
        entry(bias, "head/bias", "V -> V"),
        entry(output, "head/output/kernel", "V D -> D V"),
    ]


def pooler_entries(dense: str, classes: str) -> list[Entry]:
    return [
        *linear(dense, "pooler/transform/dense", "E D -> D E"),
        *linear(classes, "pooler/classes", "C D -> D C"),
    ]


EMBEDDINGS = (
    entry("{base}embeddings.word_embeddings.weight", "embedding/tokens", "V D -> V D"),
    entry("{base}embeddings.position_embeddings.weight", "embedding/positions", "T D -> T D"),
    entry("{base}embeddings.token_type_embeddings.weight", "embedding/types", "Y D -> Y D"),
    *norm("{base}embeddings.LayerNorm", "embedding/norm"),
)
LAYER = layer_entries(
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
_ENTRIES = (
    *EMBEDDINGS,
    *LAYER,
    *head_entries(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder.weight",
    ),
    *pooler_entries("{base}pooler.dense", "classifier"),
)
RENAMED = {".gamma": ".weight", ".beta": ".bias"}
IGNORED = (r".*embeddings\.position_ids",)


# ---------------------------------------------------------------- config.json
def architectures(stem: str) -> tuple[str, ...]:
    return (f"{stem}Model", f"{stem}ForMaskedLM", f"{stem}{CLASSES}", f"{stem}{TAGS}")


def read_heads(fields: Fields, files: ModelFiles, pooler: str = "") -> dict[str, Any]:
    """Read which heads the architecture has; a headless model has a pooler if its files hold the tensor `pooler`."""
    is_bare = files.architecture.endswith("Model")  # no supported encoder class ends in LMHeadModel
    return {
        "masked_lm": files.architecture.endswith("ForMaskedLM"),
        "pooled": is_bare and pooler in files.tensor_names,
        **read_classes(fields, files),
    }


def write_heads(model: ModelConfig, stem: str) -> dict[str, Any]:
    bare, masked_lm, classes, tags = architectures(stem)
    return write_head(model, {"none": bare, "vocabulary": masked_lm, "classes": classes, "tags": tags})


def write_classifier_dropout(model: ModelConfig) -> float | None:
    """Return the dropout rate before the classifier, or None if it is that of the layers."""
    rate = None if model.pooler is None else model.pooler.dropout
    return None if rate == model.encoder.pattern[0].dropout else rate


def read_encoder(fields: Fields, files: ModelFiles) -> dict[str, Any]:
    """Read the options that BERT and RoBERTa share."""
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
        "classifier_dropout": fields.take("classifier_dropout", None),
        **read_heads(fields, files, "pooler.dense.weight"),
    }


def write_encoder(model: ModelConfig, stem: str) -> dict[str, Any]:
    """Return the config.json fields that BERT and RoBERTa share."""
    block, position = model.encoder.pattern[0], model.embedding.position
    return {
        "num_hidden_layers": model.encoder.num_layers,
        "hidden_size": model.embed_dim,
        "num_attention_heads": block.attention.num_heads,
        "intermediate_size": block.mlp.dim,
        "hidden_act": write_activation(block.mlp.activation),
        "layer_norm_eps": block.norm.eps,
        "type_vocab_size": model.embedding.num_types or None,  # the formats require token types
        "vocab_size": model.vocab_size,
        "max_position_embeddings": position.max_length + position.offset if isinstance(position, Learned) else None,
        "tie_word_embeddings": model.head is None or model.head.tied,
        "hidden_dropout_prob": block.dropout,
        "attention_probs_dropout_prob": block.attention.dropout,
        "classifier_dropout": write_classifier_dropout(model),
        **write_special_ids(model.special),
        **write_heads(model, stem),
    }


def _read(fields: Fields, files: ModelFiles) -> ModelConfig:
    vocab_size = fields.take("vocab_size", 30_522)
    return bert(
        **read_encoder(fields, files),
        vocab_size=vocab_size,
        position=Learned(max_length=fields.take("max_position_embeddings", 512)),
        special=fields.special_ids(vocab_size, pad=0),
    )


FORMATS = (
    Format(
        model_type="bert",
        architectures=architectures("Bert"),
        read=_read,
        write=lambda model: write_encoder(model, "Bert"),
        shape="encoder-only",
        entries=_ENTRIES,
        base="bert.",
        bare="BertModel",
        copies={
            "cls.predictions.decoder.weight": "{base}embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        # Published checkpoints contain heads that the architecture in config.json does not have.
        ignored=(*IGNORED, r"cls\..*", r"(bert\.)?pooler\..*"),
        renamed=RENAMED,
    ),
)
SAMPLES = {
    "bert": Sample("bert-base", "bert", "BertForMaskedLM", "BertConfig", SHAPE),
    "bert pooled": Sample("bert-base", "bert", "BertModel", "BertConfig", SHAPE),
    "bert classes": Sample(
        "bert-base", "bert", "BertForSequenceClassification", "BertConfig", SHAPE | {"num_labels": 3}
    ),
    "bert tags": Sample("bert-base", "bert", "BertForTokenClassification", "BertConfig", SHAPE | NAMED),
    "minilm": Sample("minilm-l6", "bert", "BertModel", "BertConfig", SHAPE | {"num_attention_heads": 8}),
}
