"""The translation models of OPUS-MT (Tiedemann and Thottingal 2020), trained with Marian (arXiv:1804.00344)."""

from jaxformer.config import Activation, ModelConfig, Sinusoidal, SpecialIds
from jaxformer.models.bart import bart


def marian(
    *,
    vocab_size: int,
    max_length: int = 512,
    activation: Activation = "silu",
    scale_embedding: bool = True,
    special: SpecialIds | None = None,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    **options,
) -> ModelConfig:
    """A `bart` of these options with fixed positions, scaled embeddings without a norm, and SiLU.

    Args:
      special: none means that the last token pads and starts the decoder, and the first one ends a text.
    """
    last = vocab_size - 1
    return bart(
        vocab_size=vocab_size,
        position=Sinusoidal(layout="halves", max_length=max_length),
        scale_embedding=scale_embedding,
        embedding_norm=False,
        activation=activation,
        special=special or SpecialIds(eos=(0,), pad=last, decoder_start=last),
        dropout=dropout,
        attention_dropout=attention_dropout,
        **options,
    )


PRESETS = {
    # All pairs of languages have this shape and a vocabulary of their own.
    "marian-opus-en-de": lambda: marian(num_layers=6, embed_dim=512, num_heads=8, mlp_dim=2048, vocab_size=58_101),
}
