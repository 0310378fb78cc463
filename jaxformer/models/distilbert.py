"""DistilBERT (arXiv:1910.01108): half of BERT's layers, no token types, and ReLU before the classes."""

from jaxformer.config import ModelConfig
from jaxformer.models.bert import bert


def distilbert(*, classifier_dropout: float | None = 0.2, **options) -> ModelConfig:
    """A `bert` of these options."""
    return bert(num_types=0, pooler_activation="relu", classifier_dropout=classifier_dropout, **options)


PRESETS = {
    "distilbert-base": lambda: distilbert(num_layers=6, embed_dim=768, num_heads=12, mlp_dim=3072),
}
