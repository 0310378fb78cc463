"""T5 (arXiv:1910.10683) and T5 v1.1, whose shapes Flan-T5 (arXiv:2210.11416) shares.

v1.1 is described in github.com/google-research/text-to-text-transfer-transformer, released_checkpoints.md.

Deviation: T5 also applies dropout inside the MLPs, after the final norm of each stack and before the dense layer of a
classifier.
"""

from collections.abc import Sequence

from jaxformer.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    BucketBias,
    EmbeddingConfig,
    FanInInit,
    HeadConfig,
    InitConfig,
    MlpConfig,
    ModelConfig,
    NormalInit,
    NormConfig,
    Problem,
    SpecialIds,
    StackConfig,
)
from jaxformer.models.builders import attention_sizes, builder, source_class_head
from jaxformer.models.presets import Preset, ZooRow

_BUCKETS = BucketBias(num_buckets=32, max_distance=128)
_SPECIAL = SpecialIds(eos=(1,), pad=0, decoder_start=0)


@builder()
def t5(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int = 32_128,
    source_vocab_size: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = 64,
    num_decoder_layers: int | None = None,
    num_decoder_heads: int | None = None,
    decoder_mlp_dim: int | None = None,
    num_classes: int | None = None,
    labels: Sequence[str] = (),
    problem: Problem = "single_label",
    relative_bias: BucketBias = _BUCKETS,
    activation: Activation = "relu",
    gated: bool = False,
    tied: bool = True,
    head_scale: bool = True,
    eps: float = 1e-6,
    context_length: int | None = None,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.1,
    attention_dropout: float | None = None,
    classifier_dropout: float = 0.0,
) -> ModelConfig:
    """Pre-norm RMSNorm, no biases, unscaled attention logits with a learned bias per distance bucket.

    A classifier reads the text in the encoder and again in the decoder, whose last token it pools.

    Args:
      attention_dropout: defaults to `dropout`.
      head_scale: whether the final hidden states are multiplied by embed_dim ** -0.5, as a tied output requires.
    """
    rate = dropout if attention_dropout is None else attention_dropout

    def attention(heads: int) -> AttentionConfig:
        return AttentionConfig(**attention_sizes(embed_dim, heads, num_kv_heads, head_dim), scale=1.0, dropout=rate)

    norm = NormConfig(kind="rms", eps=eps)
    encoder = BlockConfig(
        attention=attention(num_heads),
        mlp=MlpConfig(dim=mlp_dim, activation=activation, gated=gated),
        norm=norm,
        dropout=dropout,
    )
    cross = attention(num_decoder_heads or num_heads)
    decoder = BlockConfig(
        attention=cross.model_copy(update={"causal": True}),
        cross_attention=cross,
        mlp=MlpConfig(dim=decoder_mlp_dim or mlp_dim, activation=activation, gated=gated),
        norm=norm,
        dropout=dropout,
    )

    def stack(block: BlockConfig, depth: int) -> StackConfig:
        return StackConfig(num_layers=depth, pattern=(block,), final_norm=norm, relative_bias=relative_bias)

    classifier = source_class_head(num_classes, labels, problem, classifier_dropout)
    return ModelConfig(
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(dropout=dropout),
        encoder=stack(encoder, num_layers),
        decoder=stack(decoder, num_decoder_layers or num_layers),
        head=HeadConfig(tied=tied, scale=head_scale) if classifier is None else None,
        pooler=classifier,
        context_length=context_length,
        special=special,
        init=InitConfig(kernel=FanInInit(scale=1.0), embedding=NormalInit(stddev=1.0), scaled_queries=True),
    )


@builder(extends=t5)
def t5v1_1(
    *,
    activation: Activation = "gelu_tanh",
    gated: bool = True,
    tied: bool = False,
    head_scale: bool = False,
    **options,
) -> ModelConfig:
    """Build a `t5` with gated MLPs and an untied output projection.

    The default dropout is that of fine-tuning; v1.1 was pre-trained without dropout.
    """
    return t5(activation=activation, gated=gated, tied=tied, head_scale=head_scale, **options)


_T5 = {
    # num_parameters() of google-t5/t5-*, and Keras for all but 11B. The published files have 32 * num_heads parameters
    # more: a relative position bias of cross-attention that is never used.
    "t5-small": Preset(60_506_624, lambda: t5(num_layers=6, embed_dim=512, num_heads=8, mlp_dim=2048)),
    "t5-base": Preset(222_903_552, lambda: t5(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072)),
    "t5-large": Preset(737_668_096, lambda: t5(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=4096)),
    "t5-3b": Preset(
        2_851_598_336, lambda: t5(num_layers=24, embed_dim=1024, num_heads=32, head_dim=128, mlp_dim=16_384)
    ),
    "t5-11b": Preset(
        11_307_321_344, lambda: t5(num_layers=24, embed_dim=1024, num_heads=128, head_dim=128, mlp_dim=65_536)
    ),
}
_T5_V1_1 = {
    # Keras for base, xl and xxl, training logs of T5X for small and large; Flan-T5's xl has the same count on the hub.
    "t5v1.1-small": Preset(76_961_152, lambda: t5v1_1(num_layers=8, embed_dim=512, num_heads=6, mlp_dim=1024)),
    "t5v1.1-base": Preset(247_577_856, lambda: t5v1_1(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=2048)),
    "t5v1.1-large": Preset(783_150_080, lambda: t5v1_1(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=2816)),
    "t5v1.1-xl": Preset(2_849_757_184, lambda: t5v1_1(num_layers=24, embed_dim=2048, num_heads=32, mlp_dim=5120)),
    "t5v1.1-xxl": Preset(11_135_332_352, lambda: t5v1_1(num_layers=24, embed_dim=4096, num_heads=64, mlp_dim=10_240)),
}

ZOO_ROWS = (ZooRow("T5", _T5), ZooRow("T5 v1.1, Flan-T5", _T5_V1_1))
