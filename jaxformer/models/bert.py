"""BERT (arXiv:1810.04805)."""

from collections.abc import Sequence
from typing import Literal

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
    PoolerConfig,
    Problem,
    SpecialIds,
    StackConfig,
    TransformConfig,
)
from jaxformer.models.builders import attention_sizes, builder, class_head
from jaxformer.models.presets import Preset, ZooRow

_POSITION = Learned(max_length=512)
_SPECIAL = SpecialIds(pad=0)


@builder()
def bert(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int = 30_522,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    masked_lm: bool | None = None,
    pooled: bool = False,
    num_classes: int | None = None,
    num_tags: int | None = None,
    labels: Sequence[str] = (),
    problem: Problem = "single_label",
    pooling: Literal["first", "mean"] = "first",
    position: Learned = _POSITION,
    context_length: int | None = None,
    num_types: int = 2,
    eps: float = 1e-12,
    activation: Activation = "gelu",
    head_activation: Activation | None = None,
    pooler_activation: Activation = "tanh",
    tied: bool = True,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    classifier_dropout: float | None = None,
) -> ModelConfig:
    """Post-norm, learned positions, exact GELU, biases everywhere, normalised embeddings.

    Args:
      pooled: whether the model has a pooler without classes, for sentence vectors.
      pooling: the tokens that the pooler reads; published models read the first.
      head_activation: defaults to `activation`.
      classifier_dropout: defaults to `dropout`.
    """
    norm = NormConfig(kind="layer", eps=eps)
    block = BlockConfig(
        attention=AttentionConfig(
            **attention_sizes(embed_dim, num_heads, num_kv_heads, head_dim),
            bias=True,
            output_bias=True,
            dropout=attention_dropout,
        ),
        mlp=MlpConfig(dim=mlp_dim, activation=activation, bias=True),
        norm=norm,
        placement="post",
        dropout=dropout,
    )
    head = HeadConfig(
        tied=tied, bias=True, transform=TransformConfig(activation=head_activation or activation, norm=norm)
    )
    rate = {"dropout": dropout if classifier_dropout is None else classifier_dropout}
    vector = {"pooling": pooling, "transform": TransformConfig(activation=pooler_activation), **rate}
    classifier = class_head(num_classes, num_tags, labels, problem, classes=vector, tags=rate)
    has_head = classifier is None if masked_lm is None else masked_lm
    if context_length is not None:
        position = position.replace(max_length=context_length)
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(position=position, num_types=num_types, norm=norm, dropout=dropout),
        encoder=StackConfig(num_layers=num_layers, pattern=(block,)),
        head=head if has_head else None,
        pooler=PoolerConfig(**vector) if classifier is None and pooled else classifier,
        special=special,
        init=InitConfig(kernel=NormalInit(stddev=0.02), embedding=NormalInit(stddev=0.02)),
    )


_PRESETS = {
    # The hub for google-bert/bert-base-uncased and the tensors in the files of -large, both without the pooler and the
    # next-sentence head.
    "bert-base": Preset(
        110_106_428 - (768 * 768 + 768) - (768 * 2 + 2),
        lambda: bert(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072),
    ),
    "bert-large": Preset(
        336_226_108 - (1024 * 1024 + 1024) - (1024 * 2 + 2),
        lambda: bert(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=4096),
    ),
}

ZOO_ROWS = (ZooRow("BERT", _PRESETS),)
