"""Llama 2 (arXiv:2307.09288) and Llama 3 (arXiv:2407.21783)."""

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    HeadConfig,
    InitConfig,
    MlpConfig,
    ModelConfig,
    NormalInit,
    NormConfig,
    Rope,
    StackConfig,
)


def llama(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int,
    num_kv_heads: int | None = None,
    theta: float = 10_000.0,
    eps: float = 1e-5,
    tied: bool = False,
) -> ModelConfig:
    """Pre-norm RMSNorm, rotary positions, gated SiLU, grouped-query attention, no biases."""
    norm = NormConfig(kind="rms", eps=eps)
    block = BlockConfig(
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=embed_dim // num_heads,
            causal=True,
            position=Rope(theta=theta),
        ),
        mlp=MlpConfig(dim=mlp_dim, activation="silu", gated=True),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        decoder=StackConfig(num_layers=num_layers, pattern=(block,), final_norm=norm),
        head=HeadConfig(tied=tied),
        init=InitConfig(kernel=NormalInit(stddev=0.02), depth_scaled_output=True),
    )


def _llama3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int) -> ModelConfig:
    return llama(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=8,
        mlp_dim=mlp_dim,
        vocab_size=128_256,
        theta=500_000.0,
    )


PRESETS = {
    "llama2-7b": lambda: llama(num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=11_008, vocab_size=32_000),
    "llama2-13b": lambda: llama(num_layers=40, embed_dim=5120, num_heads=40, mlp_dim=13_824, vocab_size=32_000),
    "llama2-70b": lambda: llama(
        num_layers=80, embed_dim=8192, num_heads=64, num_kv_heads=8, mlp_dim=28_672, vocab_size=32_000
    ),
    "llama3-8b": lambda: _llama3(32, 4096, 32, 14_336),
    "llama3-70b": lambda: _llama3(80, 8192, 64, 28_672),
}
