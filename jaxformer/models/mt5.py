"""mT5 (arXiv:2010.11934): T5 v1.1 with a vocabulary for 101 languages."""

from jaxformer.config import ModelConfig
from jaxformer.models.builders import builder
from jaxformer.models.presets import Preset, ZooRow
from jaxformer.models.t5 import t5v1_1


@builder(extends=t5v1_1)
def mt5(*, vocab_size: int = 250_112, **options) -> ModelConfig:
    """Build a `t5v1_1` with the vocabulary of mT5."""
    return t5v1_1(vocab_size=vocab_size, **options)


_PRESETS = {
    # num_parameters() of google/mt5-{small,base}. No exact count was found for the others: these are the counts of
    # transformers for the published config.json; table 1 of the paper says 1.2B, 3.7B and 13B.
    "mt5-small": Preset(300_176_768, lambda: mt5(num_layers=8, embed_dim=512, num_heads=6, mlp_dim=1024)),
    "mt5-base": Preset(582_401_280, lambda: mt5(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=2048)),
    "mt5-large": Preset(1_229_581_312, lambda: mt5(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=2816)),
    "mt5-xl": Preset(3_742_619_648, lambda: mt5(num_layers=24, embed_dim=2048, num_heads=32, mlp_dim=5120)),
    "mt5-xxl": Preset(12_921_057_280, lambda: mt5(num_layers=24, embed_dim=4096, num_heads=64, mlp_dim=10_240)),
}

ZOO_ROWS = (ZooRow("mT5", _PRESETS),)
