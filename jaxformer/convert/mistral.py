"""Format of Mistral: Llama's tensors with a sliding window in config.json."""

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import decoder_architectures
from jaxformer.convert.llama import (
    COPIES,
    DENSE,
    IGNORED,
    MLP_NORM,
    SHARED,
    read_context,
    read_shape,
    without,
    write_shape,
)
from jaxformer.convert.sample import GROUPED_QUERY, decoder_samples
from jaxformer.models.mistral import mistral

_ARCHITECTURES = decoder_architectures("Mistral")


def _read(fields: Fields, files: ModelFiles) -> ModelConfig:
    shape = read_shape(fields, files, num_kv_heads=8)
    return mistral(
        **shape,
        **read_context(fields, 131_072),
        head_dim=fields.take("head_dim", None),
        mlp_dim=fields.take("intermediate_size"),
        window=fields.nullable("sliding_window", 4096),
        activation=fields.activation("hidden_act", "silu"),
        eps=fields.take("rms_norm_eps", 1e-6),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special_ids(shape["vocab_size"], bos=1, eos=2),
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    return without(write_shape(model, _ARCHITECTURES), "attention_bias")


FORMATS = (
    Format(
        model_type="mistral",
        architectures=tuple(_ARCHITECTURES.values()),
        read=_read,
        write=_write,
        shape="decoder-only",
        entries=(*SHARED, MLP_NORM, *DENSE),
        copies=COPIES,
        ignored=IGNORED,
    ),
)
SAMPLES = decoder_samples("mistral", "mistral-7b", "mistral", "Mistral", GROUPED_QUERY | {"sliding_window": 8})
