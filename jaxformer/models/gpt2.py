"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

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
    NormConfig,
    Problem,
    SpecialIds,
    StackConfig,
)
from jaxformer.models.builders import attention_sizes, builder, decoder_class_head
from jaxformer.models.presets import Preset, ZooRow

_SPECIAL = SpecialIds()


@builder()
def gpt2(
    *,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    mlp_dim: int | None = None,
    vocab_size: int = 50_257,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_classes: int | None = None,
    num_tags: int | None = None,
    labels: Sequence[str] = (),
    problem: Problem = "single_label",
    context_length: int = 1024,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-5,
    scale: float | None = None,
    tied: bool = True,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    embedding_dropout: float | None = None,
    classifier_dropout: float | None = None,
) -> ModelConfig:
    """Pre-norm, learned positions, biases everywhere, tanh GELU, tied output, depth-scaled initialisation.

    Args:
      mlp_dim: defaults to 4 * embed_dim.
      scale: multiplies the attention logits; defaults to head_dim ** -0.5.
      attention_dropout, embedding_dropout: default to `dropout`.
      classifier_dropout: defaults to 0.1 for tags; classes have none by default.
    """
    norm = NormConfig(kind="layer", eps=eps)
    block = BlockConfig(
        attention=AttentionConfig(
            **attention_sizes(embed_dim, num_heads, num_kv_heads, head_dim),
            causal=True,
            bias=True,
            output_bias=True,
            scale=scale,
            dropout=dropout if attention_dropout is None else attention_dropout,
        ),
        mlp=MlpConfig(dim=mlp_dim or 4 * embed_dim, activation=activation, bias=True),
        norm=norm,
        placement="pre",
        dropout=dropout,
    )
    classifier = decoder_class_head(num_classes, num_tags, labels, problem, classifier_dropout)
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(
            position=Learned(max_length=context_length),
            dropout=dropout if embedding_dropout is None else embedding_dropout,
        ),
        decoder=StackConfig(num_layers=num_layers, pattern=(block,), final_norm=norm),
        head=HeadConfig(tied=tied) if classifier is None else None,
        pooler=classifier,
        special=special,
        init=InitConfig(depth_scaled_output=True),
    )


_PRESETS = {
    # num_parameters() of the released checkpoints (huggingface.co/openai-community/gpt2, -medium, -large, -xl);
    # the paper's own 117M and 345M were corrected to 124M and 355M in github.com/openai/gpt-2.
    "gpt2-124m": Preset(124_439_808, lambda: gpt2(num_layers=12, embed_dim=768, num_heads=12)),
    "gpt2-355m": Preset(354_823_168, lambda: gpt2(num_layers=24, embed_dim=1024, num_heads=16)),
    "gpt2-774m": Preset(774_030_080, lambda: gpt2(num_layers=36, embed_dim=1280, num_heads=20)),
    "gpt2-1.5b": Preset(1_557_611_200, lambda: gpt2(num_layers=48, embed_dim=1600, num_heads=25)),
}

ZOO_ROWS = (ZooRow("GPT-2", _PRESETS),)
