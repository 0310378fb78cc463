"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and the text part of Gemma 3 (arXiv:2503.19786)."""

from collections.abc import Sequence
from typing import Literal

from jaxformer.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    HeadConfig,
    LinearScaling,
    MlpConfig,
    ModelConfig,
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
_GLOBAL_ROPE = Rope(theta=1e6)
_SPECIAL = SpecialIds()


@builder()
def gemma(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int = 256_000,
    num_kv_heads: int | None = None,
    head_dim: int | None = 256,
    num_classes: int | None = None,
    num_tags: int | None = None,
    labels: Sequence[str] = (),
    problem: Problem = "single_label",
    rope: Rope = _ROPE,
    local_rope: Rope | None = None,
    window: int | None = None,
    local: Sequence[bool] | None = None,
    query_scalar: float | None = None,
    qk_norm: bool = False,
    attention_softcap: float | None = None,
    head_softcap: float | None = None,
    placement: Literal["pre", "sandwich"] = "pre",
    eps: float = 1e-6,
    activation: Activation = "gelu_tanh",
    bias: bool = False,
    output_bias: bool = False,
    tied: bool = True,
    context_length: int | None = 8192,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    classifier_dropout: float | None = None,
) -> ModelConfig:
    """RMSNorm that stores `scale - 1`, scaled embeddings, gated GELU, `head_dim` independent of `embed_dim`.

    Args:
      rope: rotary positions of the global layers.
      local_rope: rotary positions of the local layers; default to those of the global layers.
      local: for each layer, whether it uses `window` and `local_rope`; by default no layer does.
      query_scalar: attention logits are divided by its square root; defaults to `head_dim`.
      classifier_dropout: defaults to 0.1 for tags; classes have none by default.
    """
    local = [False] * num_layers if local is None else local
    if len(local) != num_layers:
        raise UserError(f"local has {len(local)} entries but num_layers={num_layers}: give one per layer")
    norm = NormConfig(kind="rms", eps=eps, unit_offset=True)

    def block(is_local: bool) -> BlockConfig:
        return BlockConfig(
            attention=AttentionConfig(
                **attention_sizes(embed_dim, num_heads, num_kv_heads, head_dim),
                causal=True,
                window=window if is_local else None,
                position=local_rope or rope if is_local else rope,
                qk_norm=norm if qk_norm else None,
                softcap=attention_softcap,
                bias=bias,
                output_bias=output_bias,
                scale=None if query_scalar is None else query_scalar**-0.5,
                dropout=attention_dropout,
            ),
            mlp=MlpConfig(dim=mlp_dim, activation=activation, gated=True),
            norm=norm,
            placement=placement,
            dropout=dropout,
        )

    classifier = decoder_class_head(num_classes, num_tags, labels, problem, classifier_dropout)
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(scale=True, dropout=dropout),
        decoder=stack([block(is_local) for is_local in local], final_norm=norm),
        head=HeadConfig(tied=tied, softcap=head_softcap) if classifier is None else None,
        pooler=classifier,
        context_length=context_length,
        special=special,
    )


@builder(extends=gemma)
def gemma2(
    *,
    num_layers: int,
    window: int | None = 4096,
    local: Sequence[bool] | None = None,
    query_scalar: float | None = 256.0,
    attention_softcap: float | None = 50.0,
    head_softcap: float | None = 30.0,
    placement: Literal["pre", "sandwich"] = "sandwich",
    **options,
) -> ModelConfig:
    """Build a `gemma` with norms around each sub-layer, soft-capped logits, and alternating local and global layers."""
    return gemma(
        num_layers=num_layers,
        window=window,
        local=_local_except_every(2, num_layers) if local is None else local,
        query_scalar=query_scalar,
        attention_softcap=attention_softcap,
        head_softcap=head_softcap,
        placement=placement,
        **options,
    )


@builder(extends=gemma)
def gemma3(
    *,
    num_layers: int,
    vocab_size: int = 262_208,
    rope: Rope = _GLOBAL_ROPE,
    local_rope: Rope | None = _ROPE,
    window: int | None = 1024,
    local: Sequence[bool] | None = None,
    query_scalar: float | None = 256.0,
    qk_norm: bool = True,
    placement: Literal["pre", "sandwich"] = "sandwich",
    context_length: int | None = 131_072,
    **options,
) -> ModelConfig:
    """Build a `gemma` with norms around each sub-layer and on queries and keys; five local layers per global one."""
    return gemma(
        num_layers=num_layers,
        vocab_size=vocab_size,
        rope=rope,
        local_rope=local_rope,
        window=window,
        local=_local_except_every(6, num_layers) if local is None else local,
        query_scalar=query_scalar,
        qk_norm=qk_norm,
        placement=placement,
        context_length=context_length,
        **options,
    )


def _local_except_every(period: int, num_layers: int) -> list[bool]:
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _preset(build, shape: Sequence[int], **options) -> ModelConfig:
    num_layers, embed_dim, num_heads, num_kv_heads, mlp_dim = shape
    return build(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mlp_dim=mlp_dim,
        **options,
    )


def _text_count(total: int, embed_dim: int) -> int:
    """The count of the text model: without SigLIP at 896 pixels (arXiv:2303.15343) and its norm and projection."""
    return total - 416_866_032 - (1152 + 1152 * embed_dim)


# Gemma 3 paper, section 3: models with a context of 128K tokens scale the RoPE of global layers; the others have 32K.
_LONG = {"rope": Rope(theta=1e6, scaling=LinearScaling(factor=8.0))}
_SHORT = {"vocab_size": 262_144, "window": 512, "context_length": 32_768}


_GEMMA = {
    # Keras.
    "gemma-2b": Preset(2_506_172_416, lambda: _preset(gemma, (18, 2048, 8, 1, 16_384))),
    "gemma-7b": Preset(8_537_680_896, lambda: _preset(gemma, (28, 3072, 16, 16, 24_576))),
}
_GEMMA_2 = {
    # Keras.
    "gemma2-2b": Preset(2_614_341_888, lambda: _preset(gemma2, (26, 2304, 8, 4, 9216))),
    "gemma2-9b": Preset(9_241_705_984, lambda: _preset(gemma2, (42, 3584, 16, 8, 14_336))),
    "gemma2-27b": Preset(
        27_227_128_320, lambda: _preset(gemma2, (46, 4608, 32, 16, 36_864), head_dim=128, query_scalar=144.0)
    ),
}
_GEMMA_3 = {
    # Keras for 270m and 27b (there MedGemma, which has the same shape); the hub for google/gemma-3-{1b,4b,12b}-it.
    "gemma3-270m": Preset(268_098_176, lambda: _preset(gemma3, (18, 640, 4, 1, 2048), **_SHORT)),
    "gemma3-1b": Preset(999_885_952, lambda: _preset(gemma3, (26, 1152, 4, 1, 6912), **_SHORT)),
    "gemma3-4b": Preset(
        _text_count(4_300_079_472, embed_dim=2560), lambda: _preset(gemma3, (34, 2560, 8, 4, 10_240), **_LONG)
    ),
    "gemma3-12b": Preset(
        _text_count(12_187_325_040, embed_dim=3840), lambda: _preset(gemma3, (48, 3840, 16, 8, 15_360), **_LONG)
    ),
    "gemma3-27b": Preset(
        _text_count(27_432_406_640, embed_dim=5376),
        lambda: _preset(gemma3, (62, 5376, 32, 16, 21_504), head_dim=128, query_scalar=168.0, **_LONG),
    ),
}

ZOO_ROWS = (ZooRow("Gemma", _GEMMA), ZooRow("Gemma 2", _GEMMA_2), ZooRow("Gemma 3, text", _GEMMA_3))
