"""Mistral 7B (arXiv:2310.06825): Llama whose layers all look back over a window."""

from jaxformer.config import ModelConfig
from jaxformer.models.llama import llama


def mistral(*, window: int | None = 4096, **options) -> ModelConfig:
    """A `llama` of these options; releases after v0.1 have no window."""
    return llama(window=window, **options)


PRESETS = {
    "mistral-7b": lambda: mistral(
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=14_336,
        vocab_size=32_000,
        context_length=32_768,
    ),
}
