"""Format of Mixtral: Llama's tensors with experts in place of the MLPs."""

from typing import Any

from jaxformer.config import ModelConfig, MoeConfig
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import decoder_architectures
from jaxformer.convert.llama import (
    BLOCK,
    COPIES,
    IGNORED,
    LAYER,
    MLP_NORM,
    SHARED,
    read_context,
    read_shape,
    without,
    write_shape,
)
from jaxformer.convert.sample import GROUPED_QUERY, decoder_samples
from jaxformer.convert.tables import Entry, entry
from jaxformer.models.llama import llama

_ARCHITECTURES = decoder_architectures("Mixtral")


def expert_entries(module: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Return the table rows of the router and the experts; the arguments are the module names in the files."""
    expert = f"{LAYER}.{module}.experts.{{expert}}"
    return (
        entry(f"{LAYER}.{module}.gate.weight", f"{BLOCK}/mlp/router/kernel", "E D -> D E"),
        entry(f"{expert}.{gate}.weight", f"{BLOCK}/mlp/gate", "F D -> D F"),
        entry(f"{expert}.{up}.weight", f"{BLOCK}/mlp/up", "F D -> D F"),
        entry(f"{expert}.{down}.weight", f"{BLOCK}/mlp/down", "D F -> F D"),
    )


def _read(fields: Fields, files: ModelFiles) -> ModelConfig:
    fields.require("router_jitter_noise", 0.0)
    experts = MoeConfig(
        num_experts=fields.take("num_local_experts", 8),
        top_k=fields.take("num_experts_per_tok", 2),
        dim=fields.take("intermediate_size"),
        activation=fields.activation("hidden_act", "silu"),
        load_balance=fields.take("router_aux_loss_coef", 0.001),
    )
    shape = read_shape(fields, files, num_kv_heads=8)
    return llama(
        **shape,
        **read_context(fields, 131_072, 1e6),
        head_dim=fields.take("head_dim", None),
        moe=experts,
        window=fields.take("sliding_window", None),
        eps=fields.take("rms_norm_eps", 1e-5),
        tied=fields.take("tie_word_embeddings", False),
        special=fields.special_ids(shape["vocab_size"], bos=1, eos=2),
    )


def _write(model: ModelConfig) -> dict[str, Any]:
    return without(write_shape(model, _ARCHITECTURES), "attention_bias") | write_experts(model)


def write_experts(model: ModelConfig) -> dict[str, Any]:
    mlp = model.decoder.pattern[0].mlp
    if not isinstance(mlp, MoeConfig):
        return {}
    return {
        "num_local_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.top_k,
        "router_aux_loss_coef": mlp.load_balance,
    }


FORMATS = (
    Format(
        model_type="mixtral",
        architectures=tuple(_ARCHITECTURES.values()),
        read=_read,
        write=_write,
        shape="decoder-only",
        entries=(*SHARED, MLP_NORM, *expert_entries("block_sparse_moe", "w1", "w3", "w2")),
        copies=COPIES,
        ignored=IGNORED,
    ),
)
SAMPLES = decoder_samples("mixtral", "mixtral-8x7b", "mixtral", "Mixtral", GROUPED_QUERY | {"num_local_experts": 4})
