"""The original encoder-decoder (arXiv:1706.03762)."""

from jaxformer.config import (
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
    StackConfig,
    XavierInit,
)


def vaswani(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int = 37_000,
    dropout: float = 0.1,
) -> ModelConfig:
    """Post-norm, sinusoidal positions, ReLU, one vocabulary whose table serves source, target and output."""
    attention = AttentionConfig(num_heads=num_heads, head_dim=embed_dim // num_heads, dropout=0.0)
    causal = attention.model_copy(update={"causal": True})
    shared = {
        "mlp": MlpConfig(dim=mlp_dim, activation="relu", bias=True),
        "norm": NormConfig(kind="layer", eps=1e-6),
        "placement": "post",
        "dropout": dropout,
    }
    encoder = BlockConfig(attention=attention, **shared)
    decoder = BlockConfig(attention=causal, cross_attention=attention, **shared)
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(position=Sinusoidal(), scale=True, dropout=dropout),
        encoder=StackConfig(num_layers=num_layers, pattern=(encoder,)),
        decoder=StackConfig(num_layers=num_layers, pattern=(decoder,)),
        head=HeadConfig(tied=True),
        init=InitConfig(kernel=XavierInit(), embedding=NormalInit(stddev=embed_dim**-0.5)),
    )


PRESETS = {
    "vaswani-base": lambda: vaswani(num_layers=6, embed_dim=512, num_heads=8, mlp_dim=2048),
    "vaswani-big": lambda: vaswani(num_layers=6, embed_dim=1024, num_heads=16, mlp_dim=4096, dropout=0.3),
}
