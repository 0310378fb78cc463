"""BART (arXiv:1910.13461).

Deviation: BART also applies dropout inside the MLPs, and before the dense layer of a classifier.
"""

from collections.abc import Sequence

from jaxformer.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    HeadConfig,
    InitConfig,
    Learned,
    MlpConfig,
    ModelConfig,
    NormalInit,
    NormConfig,
    Problem,
    Sinusoidal,
    SpecialIds,
    StackConfig,
)
from jaxformer.models.builders import attention_sizes, builder, source_class_head
from jaxformer.models.presets import Preset, ZooRow

# The first two rows of the published tables are unused: positions count from 2.
_POSITION = Learned(max_length=1024, offset=2)
_SPECIAL = SpecialIds(bos=0, eos=(2,), pad=1, decoder_start=2)


@builder()
def bart(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int = 50_265,
    source_vocab_size: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_decoder_layers: int | None = None,
    num_decoder_heads: int | None = None,
    decoder_mlp_dim: int | None = None,
    num_classes: int | None = None,
    labels: Sequence[str] = (),
    problem: Problem = "single_label",
    position: Learned | Sinusoidal = _POSITION,
    context_length: int | None = None,
    scale_embedding: bool = False,
    embedding_norm: bool = True,
    activation: Activation = "gelu",
    tied: bool = True,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    classifier_dropout: float = 0.0,
) -> ModelConfig:
    """Post-norm, learned positions, exact GELU, biases everywhere, normalised embeddings.

    A classifier reads the text in the encoder and again in the decoder, whose last token it pools.
    """

    def attention(heads: int) -> AttentionConfig:
        sizes = attention_sizes(embed_dim, heads, num_kv_heads, head_dim)
        return AttentionConfig(**sizes, bias=True, output_bias=True, dropout=attention_dropout)

    norm = NormConfig(kind="layer", eps=1e-5)
    shared = {"norm": norm, "placement": "post", "dropout": dropout}
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
    if context_length is not None:
        position = position.replace(max_length=context_length)
    classifier = source_class_head(num_classes, labels, problem, classifier_dropout)
    return ModelConfig(
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(
            position=position, scale=scale_embedding, norm=norm if embedding_norm else None, dropout=dropout
        ),
        encoder=StackConfig(num_layers=num_layers, pattern=(encoder,)),
        decoder=StackConfig(num_layers=num_decoder_layers or num_layers, pattern=(decoder,)),
        head=HeadConfig(tied=tied, bias=True) if classifier is None else None,
        pooler=classifier,
        special=special,
        init=InitConfig(kernel=NormalInit(stddev=0.02), embedding=NormalInit(stddev=0.02)),
    )


_PRESETS = {
    # num_parameters() of facebook/bart-{base,large}, plus the bias of the logits, which is a buffer in transformers.
    "bart-base": Preset(139_420_416 + 50_265, lambda: bart(num_layers=6, embed_dim=768, num_heads=12, mlp_dim=3072)),
    "bart-large": Preset(406_291_456 + 50_265, lambda: bart(num_layers=12, embed_dim=1024, num_heads=16, mlp_dim=4096)),
}

ZOO_ROWS = (ZooRow("BART", _PRESETS),)
