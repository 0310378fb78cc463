"""The sentence encoders all-MiniLM (Reimers and Gurevych, arXiv:1908.10084), distilled from BERT (arXiv:2002.10957)."""

from jaxformer.config import ModelConfig
from jaxformer.models.bert import bert


def minilm(*, masked_lm: bool = False, pooled: bool = True, **options) -> ModelConfig:
    """A `bert` of these options.

    A sentence's vector is the mean of its hidden states; the pooler is published with them and has no part in it.
    """
    return bert(masked_lm=masked_lm, pooled=pooled, **options)


PRESETS = {
    "minilm-l6": lambda: minilm(num_layers=6, embed_dim=384, num_heads=12, mlp_dim=1536),
    "minilm-l12": lambda: minilm(num_layers=12, embed_dim=384, num_heads=12, mlp_dim=1536),
}
