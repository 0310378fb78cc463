"""The sentence encoders all-MiniLM (Reimers and Gurevych, arXiv:1908.10084), distilled from BERT (arXiv:2002.10957)."""

from jaxformer.config import ModelConfig
from jaxformer.models.bert import bert
from jaxformer.models.builders import builder
from jaxformer.models.presets import Preset, ZooRow


@builder(extends=bert)
def minilm(*, masked_lm: bool | None = False, pooled: bool = True, **options) -> ModelConfig:
    """Build a `bert` with a pooler in place of the masked-LM head.

    A sentence embedding is the mean of the hidden states; the pooler is published with the weights but is not used.
    """
    return bert(masked_lm=masked_lm, pooled=pooled, **options)


_PRESETS = {
    # The hub for sentence-transformers/all-MiniLM-{L6,L12}-v2, minus the 512 position ids saved with them.
    "minilm-l6": Preset(22_713_728 - 512, lambda: minilm(num_layers=6, embed_dim=384, num_heads=12, mlp_dim=1536)),
    "minilm-l12": Preset(33_360_512 - 512, lambda: minilm(num_layers=12, embed_dim=384, num_heads=12, mlp_dim=1536)),
}

ZOO_ROWS = (ZooRow("MiniLM sentence encoders", _PRESETS),)
