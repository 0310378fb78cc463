"""SmolLM2 (arXiv:2502.02737): small Llamas with a tied output."""

from jaxformer.config import ModelConfig, Rope
from jaxformer.models.builders import builder
from jaxformer.models.llama import llama
from jaxformer.models.presets import Preset, ZooRow

_ROPE = Rope(theta=100_000.0)


@builder(extends=llama)
def smollm2(
    *,
    vocab_size: int = 49_152,
    context_length: int | None = 8192,
    rope: Rope = _ROPE,
    tied: bool = True,
    **options,
) -> ModelConfig:
    """Build a `llama` with the defaults of SmolLM2."""
    return llama(vocab_size=vocab_size, context_length=context_length, rope=rope, tied=tied, **options)


_PRESETS = {
    # The hub for HuggingFaceTB/SmolLM2-{135M,360M,1.7B}-Instruct.
    "smollm2-135m": Preset(
        134_515_008, lambda: smollm2(num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, mlp_dim=1536)
    ),
    "smollm2-360m": Preset(
        361_821_120, lambda: smollm2(num_layers=32, embed_dim=960, num_heads=15, num_kv_heads=5, mlp_dim=2560)
    ),
    "smollm2-1.7b": Preset(
        1_711_376_384,
        lambda: smollm2(num_layers=24, embed_dim=2048, num_heads=32, mlp_dim=8192, rope=Rope(theta=130_000.0)),
    ),
}

ZOO_ROWS = (ZooRow("SmolLM2", _PRESETS),)
