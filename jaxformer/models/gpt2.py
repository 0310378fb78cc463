"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    HeadConfig,
    InitConfig,
    Learned,
    MlpConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
)


def gpt2(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    vocab_size: int = 50_257,
    max_length: int = 1024,
    dropout: float = 0.0,
) -> ModelConfig:
    """Pre-norm, learned positions, biases everywhere, tanh GELU, tied output, depth-scaled initialisation."""
    norm = NormConfig(kind="layer", eps=1e-5)
    block = BlockConfig(
        attention=AttentionConfig(
            num_heads=num_heads,
            head_dim=embed_dim // num_heads,
            causal=True,
            bias=True,
            output_bias=True,
            dropout=dropout,
        ),
        mlp=MlpConfig(dim=4 * embed_dim, activation="gelu_tanh", bias=True),
        norm=norm,
        placement="pre",
        dropout=dropout,
    )
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(position=Learned(max_length=max_length), dropout=dropout),
        decoder=StackConfig(num_layers=num_layers, pattern=(block,), final_norm=norm),
        head=HeadConfig(tied=True),
        init=InitConfig(depth_scaled_output=True),
    )


PRESETS = {
    "gpt2-124m": lambda: gpt2(num_layers=12, embed_dim=768, num_heads=12),
    "gpt2-355m": lambda: gpt2(num_layers=24, embed_dim=1024, num_heads=16),
    "gpt2-774m": lambda: gpt2(num_layers=36, embed_dim=1280, num_heads=20),
    "gpt2-1.5b": lambda: gpt2(num_layers=48, embed_dim=1600, num_heads=25),
}
