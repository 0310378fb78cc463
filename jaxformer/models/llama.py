"""Llama 2 (arXiv:2307.09288) and Llama 3 (arXiv:2407.21783): the decoder that most later families modify."""

from collections.abc import Sequence

from jaxformer.config import (
    Activation,
    AttentionConfig,
    BandScaling,
    BlockConfig,
    EmbeddingConfig,
    HeadConfig,
    InitConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormalInit,
    NormConfig,
    Problem,
    Rope,
    SpecialIds,
)
from jaxformer.errors import UserError
from jaxformer.models.builders import attention_sizes, builder, decoder_class_head
from jaxformer.models.presets import Preset, ZooRow
from jaxformer.models.stacks import stack

_ROPE = Rope(theta=10_000.0)
_SPECIAL = SpecialIds()


@builder()
def llama(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    vocab_size: int,
    mlp_dim: int | None = None,
    moe: MoeConfig | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_classes: int | None = None,
    num_tags: int | None = None,
    labels: Sequence[str] = (),
    problem: Problem = "single_label",
    rope: Rope = _ROPE,
    window: int | None = None,
    local: Sequence[bool] | None = None,
    eps: float = 1e-5,
    activation: Activation = "silu",
    qk_norm: bool = False,
    bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
    context_length: int | None = None,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    classifier_dropout: float | None = None,
) -> ModelConfig:
    """Pre-norm RMSNorm, rotary positions, gated SiLU, grouped-query attention, no biases.

    Args:
      mlp_dim: width of the MLPs; omit it if `moe` replaces them.
      local: for each layer, whether it uses `window`; by default every layer does.
      classifier_dropout: defaults to 0.1 for tags; classes have none by default.
    """
    if (mlp_dim is None) == (moe is None):
        raise UserError(f"mlp_dim={mlp_dim} and moe={moe}: set exactly one of them")
    if moe is not None and mlp_bias:
        raise UserError("mlp_bias=True with moe: experts have no biases, set False")
    if local is not None and len(local) != num_layers:
        raise UserError(f"local has {len(local)} entries but num_layers={num_layers}: give one per layer")
    norm = NormConfig(kind="rms", eps=eps)

    def block(window: int | None) -> BlockConfig:
        return BlockConfig(
            attention=AttentionConfig(
                **attention_sizes(embed_dim, num_heads, num_kv_heads, head_dim),
                causal=True,
                window=window,
                position=rope,
                qk_norm=norm if qk_norm else None,
                bias=bias,
                output_bias=output_bias,
                dropout=attention_dropout,
            ),
            mlp=moe or MlpConfig(dim=mlp_dim, activation=activation, gated=True, bias=mlp_bias),
            norm=norm,
            dropout=dropout,
        )

    windows = [window if is_local else None for is_local in local or [True] * num_layers]
    classifier = decoder_class_head(num_classes, num_tags, labels, problem, classifier_dropout)
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(dropout=dropout),
        decoder=stack([block(window) for window in windows], final_norm=norm),
        head=HeadConfig(tied=tied) if classifier is None else None,
        pooler=classifier,
        context_length=context_length,
        special=special,
        init=InitConfig(kernel=NormalInit(stddev=0.02), depth_scaled_output=True),
    )


def _llama2(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **options) -> ModelConfig:
    return llama(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        vocab_size=32_000,
        context_length=4096,
        **options,
    )


def _llama3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **options) -> ModelConfig:
    shared = {"num_kv_heads": 8, "vocab_size": 128_256, "rope": Rope(theta=500_000.0), "context_length": 8192}
    shape = {"num_layers": num_layers, "embed_dim": embed_dim, "num_heads": num_heads, "mlp_dim": mlp_dim}
    return llama(**shared | shape | options)


def _long_context(factor: float) -> dict[str, object]:
    """Options of Llama 3.1 and 3.2, which extend the context length of Llama 3 beyond 8,192 tokens."""
    scaling = BandScaling(factor=factor, low_factor=1.0, high_factor=4.0, original_length=8192)
    return {"rope": Rope(theta=500_000.0, scaling=scaling), "context_length": 131_072}


_PRESETS = {
    # The hub for meta-llama/Llama-2-{7b,13b,70b}-hf, minus the 64 rotary frequencies saved with every layer.
    "llama2-7b": Preset(6_738_417_664 - 32 * 64, lambda: _llama2(32, 4096, 32, 11_008)),
    "llama2-13b": Preset(13_015_866_880 - 40 * 64, lambda: _llama2(40, 5120, 40, 13_824)),
    "llama2-70b": Preset(68_976_653_312 - 80 * 64, lambda: _llama2(80, 8192, 64, 28_672, num_kv_heads=8)),
    # The hub for meta-llama/Llama-3.1-{8B,70B,405B}, 3.2-{1B,3B}; 3.0 has the shapes of 3.1.
    "llama3-8b": Preset(8_030_261_248, lambda: _llama3(32, 4096, 32, 14_336)),
    "llama3-70b": Preset(70_553_706_496, lambda: _llama3(80, 8192, 64, 28_672)),
    "llama3.1-8b": Preset(8_030_261_248, lambda: _llama3(32, 4096, 32, 14_336, **_long_context(8.0))),
    "llama3.1-70b": Preset(70_553_706_496, lambda: _llama3(80, 8192, 64, 28_672, **_long_context(8.0))),
    "llama3.1-405b": Preset(405_853_388_800, lambda: _llama3(126, 16_384, 128, 53_248, **_long_context(8.0))),
    "llama3.2-1b": Preset(1_235_814_400, lambda: _llama3(16, 2048, 32, 8192, tied=True, **_long_context(32.0))),
    "llama3.2-3b": Preset(3_212_749_824, lambda: _llama3(28, 3072, 24, 8192, tied=True, **_long_context(32.0))),
}

ZOO_ROWS = (ZooRow("Llama 2, 3, 3.1, 3.2", _PRESETS),)
