"""DistilBERT (arXiv:1910.01108): half of BERT's layers, no token types, and ReLU in the classification head."""

from jaxformer.config import Activation, ModelConfig
from jaxformer.models.bert import bert
from jaxformer.models.builders import builder
from jaxformer.models.presets import Preset, ZooRow


@builder(extends=bert)
def distilbert(
    *,
    num_types: int = 0,
    pooler_activation: Activation = "relu",
    classifier_dropout: float | None = 0.2,
    **options,
) -> ModelConfig:
    """Build a `bert` with the defaults of DistilBERT."""
    return bert(
        num_types=num_types, pooler_activation=pooler_activation, classifier_dropout=classifier_dropout, **options
    )


_PRESETS = {
    # num_parameters() of distilbert-base-uncased with its masked-LM head.
    "distilbert-base": Preset(66_985_530, lambda: distilbert(num_layers=6, embed_dim=768, num_heads=12, mlp_dim=3072)),
}

ZOO_ROWS = (ZooRow("DistilBERT", _PRESETS),)
