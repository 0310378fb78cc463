"""Mistral 7B (arXiv:2310.06825): Llama with sliding-window attention in every layer."""

from jaxformer.config import ModelConfig
from jaxformer.models.builders import builder
from jaxformer.models.llama import llama
from jaxformer.models.presets import Preset, ZooRow


@builder(extends=llama)
def mistral(*, window: int | None = 4096, **options) -> ModelConfig:
    """Build a `llama` with a sliding window; releases after v0.1 have no window."""
    return llama(window=window, **options)


_PRESETS = {
    # general.parameter_count of GGUF files of mistralai/Mistral-7B-v0.1; the paper has no exact count.
    "mistral-7b": Preset(
        7_241_732_096,
        lambda: mistral(
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            mlp_dim=14_336,
            vocab_size=32_000,
            context_length=32_768,
        ),
    ),
}

ZOO_ROWS = (ZooRow("Mistral", _PRESETS),)
