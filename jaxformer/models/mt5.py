"""mT5 (arXiv:2010.11934): T5 v1.1 with a vocabulary for 101 languages."""

from jaxformer.config import ModelConfig
from jaxformer.models.t5 import t5v1_1


def mt5(*, vocab_size: int = 250_112, **options) -> ModelConfig:
    """A `t5v1_1` of these options."""
    return t5v1_1(vocab_size=vocab_size, **options)


PRESETS = {
    "mt5-small": lambda: mt5(num_layers=8, embed_dim=512, num_heads=6, mlp_dim=1024),
    "mt5-base": lambda: mt5(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=2048),
    "mt5-large": lambda: mt5(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=2816),
    "mt5-xl": lambda: mt5(num_layers=24, embed_dim=2048, num_heads=32, mlp_dim=5120),
    "mt5-xxl": lambda: mt5(num_layers=24, embed_dim=4096, num_heads=64, mlp_dim=10_240),
}
