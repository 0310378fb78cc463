"""The original transformer, an encoder-decoder (arXiv:1706.03762)."""

from typing import Literal

from jaxformer.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    HeadConfig,
    InitConfig,
    MlpConfig,
    ModelConfig,
    NormalInit,
    NormConfig,
    Sinusoidal,
    SpecialIds,
    StackConfig,
    XavierInit,
)
from jaxformer.models.builders import attention_sizes, builder
from jaxformer.models.presets import Preset, ZooRow

_POSITION = Sinusoidal()
_SPECIAL = SpecialIds()


@builder()
def vaswani(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int = 37_000,
    source_vocab_size: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_decoder_layers: int | None = None,
    num_decoder_heads: int | None = None,
    decoder_mlp_dim: int | None = None,
    position: Sinusoidal = _POSITION,
    context_length: int | None = None,
    activation: Activation = "relu",
    placement: Literal["post", "pre"] = "post",
    tied: bool = True,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
) -> ModelConfig:
    """Post-norm, sinusoidal positions, ReLU, one embedding table for source, target and output.

    Args:
      placement: where norms are applied. `pre`, with a norm after each stack, trains without a long warm-up
        (arXiv:2002.04745).
    """

    def attention(heads: int) -> AttentionConfig:
        return AttentionConfig(**attention_sizes(embed_dim, heads, num_kv_heads, head_dim), dropout=attention_dropout)

    norm = NormConfig(kind="layer", eps=1e-6)
    shared = {"norm": norm, "placement": placement, "dropout": dropout}
    encoder = BlockConfig(
        attention=attention(num_heads), mlp=MlpConfig(dim=mlp_dim, activation=activation, bias=True), **shared
    )
    cross = attention(num_decoder_heads or num_heads)
    decoder = BlockConfig(
        attention=cross.model_copy(update={"causal": True}),
        cross_attention=cross,
        mlp=MlpConfig(dim=decoder_mlp_dim or mlp_dim, activation=activation, bias=True),
        **shared,
    )
    final_norm = norm if placement == "pre" else None
    if context_length is not None:
        position = position.replace(max_length=context_length)
    return ModelConfig(
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(position=position, scale=True, dropout=dropout),
        encoder=StackConfig(num_layers=num_layers, pattern=(encoder,), final_norm=final_norm),
        decoder=StackConfig(num_layers=num_decoder_layers or num_layers, pattern=(decoder,), final_norm=final_norm),
        head=HeadConfig(tied=tied),
        special=special,
        init=InitConfig(kernel=XavierInit(), embedding=NormalInit(stddev=embed_dim**-0.5)),
    )


def _count(num_layers: int, embed_dim: int, mlp_dim: int, vocab_size: int = 37_000) -> int:
    """The parameter count that follows from sections 3.1 to 3.4 of the paper, with the 37,000 tokens of section 5.1."""
    attention = 4 * embed_dim**2  # W^Q, W^K, W^V of all heads and W^O: 3.2.2, no biases
    feed_forward = 2 * embed_dim * mlp_dim + mlp_dim + embed_dim  # W_1, W_2, b_1, b_2: equation 2
    norm = 2 * embed_dim  # gain and bias after every sub-layer: 3.1
    encoder = num_layers * (attention + feed_forward + 2 * norm)
    decoder = num_layers * (2 * attention + feed_forward + 3 * norm)
    return vocab_size * embed_dim + encoder + decoder  # one table for source, target and output: 3.4


_PRESETS = {
    # Table 3 of the paper says 65M and 213M, but not how they were counted.
    "vaswani-base": Preset(
        _count(num_layers=6, embed_dim=512, mlp_dim=2048),
        lambda: vaswani(num_layers=6, embed_dim=512, num_heads=8, mlp_dim=2048),
    ),
    "vaswani-big": Preset(
        _count(num_layers=6, embed_dim=1024, mlp_dim=4096),
        lambda: vaswani(num_layers=6, embed_dim=1024, num_heads=16, mlp_dim=4096, dropout=0.3),
    ),
}

ZOO_ROWS = (ZooRow("Vaswani et al. 2017", _PRESETS),)
