"""Format of GPT-2: `Conv1D` kernels have shape [inputs, outputs], and query, key and value are one fused tensor."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Learned, ModelConfig
from jaxformer.convert.fields import Fields, write_activation, write_special_ids
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import CLASSES, TAGS, HeadKind, head_kind
from jaxformer.convert.llama import read_class_head, write_decoder_head
from jaxformer.convert.sample import NAMED, POSITIONS, VOCAB, Sample
from jaxformer.convert.tables import Entry, entry
from jaxformer.models.gpt2 import gpt2

_BLOCK, _LAYER = "decoder/{block}", "{base}h.{layer}"
_QKV = tuple(f"{_BLOCK}/attention/{name}" for name in "qkv")

_STACK = (
    entry("{base}wte.weight", "embedding/tokens", "V D -> V D"),
    entry("{base}wpe.weight", "embedding/positions", "T D -> T D"),
    entry(f"{_LAYER}.ln_1.weight", f"{_BLOCK}/attention_norm/scale", "D -> D"),
    entry(f"{_LAYER}.ln_1.bias", f"{_BLOCK}/attention_norm/bias", "D -> D"),
    entry(f"{_LAYER}.attn.c_attn.weight", tuple(f"{p}/kernel" for p in _QKV), "D (P N H) -> P D N H"),
    entry(f"{_LAYER}.attn.c_attn.bias", tuple(f"{p}/bias" for p in _QKV), "(P N H) -> P N H"),
    entry(f"{_LAYER}.attn.c_proj.weight", f"{_BLOCK}/attention/out/kernel", "(N H) D -> N H D"),
    entry(f"{_LAYER}.attn.c_proj.bias", f"{_BLOCK}/attention/out/bias", "D -> D"),
    entry(f"{_LAYER}.ln_2.weight", f"{_BLOCK}/mlp_norm/scale", "D -> D"),
    entry(f"{_LAYER}.ln_2.bias", f"{_BLOCK}/mlp_norm/bias", "D -> D"),
    entry(f"{_LAYER}.mlp.c_fc.weight", f"{_BLOCK}/mlp/up/kernel", "D F -> D F"),
    entry(f"{_LAYER}.mlp.c_fc.bias", f"{_BLOCK}/mlp/up/bias", "F -> F"),
    entry(f"{_LAYER}.mlp.c_proj.weight", f"{_BLOCK}/mlp/down/kernel", "F D -> F D"),
    entry(f"{_LAYER}.mlp.c_proj.bias", f"{_BLOCK}/mlp/down/bias", "D -> D"),
    entry("{base}ln_f.weight", "decoder/final_norm/scale", "D -> D"),
    entry("{base}ln_f.bias", "decoder/final_norm/bias", "D -> D"),
    entry("lm_head.weight", "head/output/kernel", "V D -> D V"),
)
_ARCHITECTURES: Mapping[HeadKind, str] = {
    "vocabulary": "GPT2LMHeadModel",
    "classes": f"GPT2{CLASSES}",
    "tags": f"GPT2{TAGS}",
}


def _entries(model: ModelConfig) -> tuple[Entry, ...]:
    name = "classifier" if head_kind(model) == "tags" else "score"
    return (
        *_STACK,
        entry(f"{name}.weight", "pooler/classes/kernel", "C D -> D C"),
        entry(f"{name}.bias", "pooler/classes/bias", "C -> C"),
    )


def _read(fields: Fields, files: ModelFiles) -> ModelConfig:
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    fields.take("reorder_and_upcast_attn", False)  # only affects precision: attention logits are always float32
    embed_dim, vocab_size = fields.take("n_embd", 768), fields.take("vocab_size", 50_257)
    return gpt2(
        num_layers=fields.take("n_layer", 12),
        embed_dim=embed_dim,
        num_heads=fields.take("n_head", 12),
        mlp_dim=fields.take("n_inner", 4 * embed_dim),
        vocab_size=vocab_size,
        context_length=fields.take("n_positions", 1024),
        activation=fields.activation("activation_function", "gelu_new"),
        eps=fields.take("layer_norm_epsilon", 1e-5),
        tied=fields.take("tie_word_embeddings", True),
        special=fields.special_ids(vocab_size, bos=50_256, eos=50_256),
        dropout=fields.take("resid_pdrop", 0.1),
        embedding_dropout=fields.take("embd_pdrop", 0.1),
        attention_dropout=fields.take("attn_pdrop", 0.1),
        **read_class_head(fields, files),
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    block, position = model.decoder.pattern[0], model.embedding.position
    return {
        "n_layer": model.decoder.num_layers,
        "n_embd": model.embed_dim,
        "n_head": block.attention.num_heads,
        "n_inner": block.mlp.dim,
        "n_positions": position.max_length if isinstance(position, Learned) else None,
        "vocab_size": model.vocab_size,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(a := block.mlp.activation, write_activation(a)),
        "layer_norm_epsilon": block.norm.eps,
        "resid_pdrop": block.dropout,
        "embd_pdrop": model.embedding.dropout,
        "attn_pdrop": block.attention.dropout,
        **write_special_ids(model.special),
        **write_decoder_head(model, _ARCHITECTURES),
    }


FORMATS = (
    Format(
        model_type="gpt2",
        architectures=tuple(_ARCHITECTURES.values()),
        read=_read,
        write=_write,
        shape="decoder-only",
        entries=_entries,
        base="transformer.",
        copies={"lm_head.weight": "{base}wte.weight"},
        ignored=(r".*\.attn\.(bias|masked_bias)",),  # causal masks, which older releases saved
    ),
)

_SHAPE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SAMPLES = {
    "gpt2": Sample("gpt2-124m", "gpt2", "GPT2LMHeadModel", "GPT2Config", _SHAPE),
    "gpt2 classes": Sample(
        "gpt2-124m",
        "gpt2",
        "GPT2ForSequenceClassification",
        "GPT2Config",
        _SHAPE | {"num_labels": 3, "pad_token_id": 0},
    ),
    "gpt2 tags": Sample("gpt2-124m", "gpt2", "GPT2ForTokenClassification", "GPT2Config", _SHAPE | NAMED),
}
