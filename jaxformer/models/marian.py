"""The translation models of OPUS-MT (Tiedemann and Thottingal 2020), trained with Marian (arXiv:1804.00344)."""

from jaxformer.config import Activation, ModelConfig, Sinusoidal, SpecialIds
from jaxformer.models.bart import bart
from jaxformer.models.builders import builder
from jaxformer.models.presets import Preset, ZooRow

_POSITION = Sinusoidal(layout="halves", max_length=512)


@builder(extends=bart)
def marian(
    *,
    vocab_size: int,
    source_vocab_size: int | None = None,
    position: Sinusoidal = _POSITION,
    activation: Activation = "silu",
    scale_embedding: bool = True,
    embedding_norm: bool = False,
    special: SpecialIds | None = None,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    **options,
) -> ModelConfig:
    """Build a `bart` with sinusoidal positions, scaled embeddings without a norm, and SiLU.

    Args:
      special: by default, the last id that both vocabularies have is the padding and the decoder start id, and id 0 is
        eos.
    """
    if special is None:
        last = min(vocab_size, source_vocab_size or vocab_size) - 1
        special = SpecialIds(eos=(0,), pad=last, decoder_start=last)
    return bart(
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        position=position,
        scale_embedding=scale_embedding,
        embedding_norm=embedding_norm,
        activation=activation,
        special=special,
        dropout=dropout,
        attention_dropout=attention_dropout,
        **options,
    )


_PRESETS = {
    # All language pairs have this shape but different vocabularies.
    # No published count was found: this is that of transformers for the published config.json, plus the logits' bias.
    "marian-opus-en-de": Preset(
        73_886_208 + 58_101, lambda: marian(num_layers=6, embed_dim=512, num_heads=8, mlp_dim=2048, vocab_size=58_101)
    ),
}

ZOO_ROWS = (ZooRow("Marian (OPUS-MT)", _PRESETS),)
