"""ModernBERT (arXiv:2412.13663)."""

from collections.abc import Sequence
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
    PoolerConfig,
    Problem,
    Rope,
    SpecialIds,
    TransformConfig,
)
from jaxformer.errors import UserError
from jaxformer.models.builders import attention_sizes, builder, class_head
from jaxformer.models.presets import Preset, ZooRow
from jaxformer.models.stacks import stack

_ROPE = Rope(theta=160_000.0)
_LOCAL_ROPE = Rope(theta=10_000.0)
_SPECIAL = SpecialIds()


@builder()
def modernbert(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int,
    vocab_size: int = 50_368,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    masked_lm: bool | None = None,
    pooled: bool = False,
    num_classes: int | None = None,
    num_tags: int | None = None,
    labels: Sequence[str] = (),
    problem: Problem = "single_label",
    pooling: Literal["first", "mean"] = "first",
    rope: Rope = _ROPE,
    local_rope: Rope = _LOCAL_ROPE,
    window: int = 65,
    local: Sequence[bool] | None = None,
    eps: float = 1e-5,
    activation: Activation = "gelu",
    transform_activation: Activation = "gelu",
    bias: bool = False,
    mlp_bias: bool = False,
    norm_bias: bool = False,
    transform_bias: bool = False,
    head_bias: bool = True,
    tied: bool = True,
    context_length: int | None = 8192,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    classifier_dropout: float = 0.0,
) -> ModelConfig:
    """Pre-norm LayerNorm, rotary positions, gated exact GELU, no biases, two local layers for each global layer.

    Args:
      pooled: whether the model has a pooler without classes, for sentence vectors.
      pooling: the tokens that the pooler reads.
      window: 65 means the token itself and 64 tokens on each side, published as `local_attention` = 128.
      local: for each layer, whether it uses `window` and `local_rope`; by default all but every third layer do.
      transform_activation, transform_bias: of the dense layer between the hidden states and the head or classifier.
    """
    local = [layer % 3 != 0 for layer in range(num_layers)] if local is None else local
    if len(local) != num_layers:
        raise UserError(f"local has {len(local)} entries but num_layers={num_layers}: give one per layer")
    norm = NormConfig(kind="layer", eps=eps, bias=norm_bias)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(
            attention=AttentionConfig(
                **attention_sizes(embed_dim, num_heads, num_kv_heads, head_dim),
                window=window if local[layer] else None,
                position=local_rope if local[layer] else rope,
                bias=bias,
                output_bias=bias,
                dropout=attention_dropout,
            ),
            mlp=MlpConfig(dim=mlp_dim, activation=activation, gated=True, bias=mlp_bias),
            norm=norm,
            attention_norm=layer > 0,  # the embeddings are normalised already
            dropout=dropout,
        )

    transform = TransformConfig(activation=transform_activation, bias=transform_bias, norm=norm)
    tags = {"transform": transform, "dropout": classifier_dropout}
    vector = {"pooling": pooling, **tags}
    classifier = class_head(num_classes, num_tags, labels, problem, classes=vector, tags=tags)
    has_head = classifier is None if masked_lm is None else masked_lm
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(norm=norm, dropout=dropout),
        encoder=stack([block(layer) for layer in range(num_layers)], final_norm=norm),
        head=HeadConfig(tied=tied, bias=head_bias, transform=transform) if has_head else None,
        pooler=PoolerConfig(**vector) if classifier is None and pooled else classifier,
        context_length=context_length,
        special=special,
        init=InitConfig(kernel=NormalInit(stddev=0.02), depth_scaled_output=True),
    )


_PRESETS = {
    # The tensors in the files of answerdotai/ModernBERT-{base,large}, which include the masked-LM head.
    "modernbert-base": Preset(
        149_655_232, lambda: modernbert(num_layers=22, embed_dim=768, num_heads=12, mlp_dim=1152)
    ),
    "modernbert-large": Preset(
        395_881_664, lambda: modernbert(num_layers=28, embed_dim=1024, num_heads=16, mlp_dim=2624)
    ),
}

ZOO_ROWS = (ZooRow("ModernBERT", _PRESETS),)
