"""The model as data: what one `Transformer` needs to know to be any of the families.

A field that only some families use has a meaning of its own; nothing here names a family. Run-time
choices that leave the parameters alone (dtype, remat, scan unrolling, kernels) live in `TrainConfig`.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from jaxformer.config.base import Config

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


# ---------------------------------------------------------------- positions
class Sinusoidal(Config):
    """Fixed sines and cosines added to the embeddings (arXiv:1706.03762, section 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"


class Learned(Config):
    """One trained vector per position added to the embeddings."""

    kind: Literal["learned"] = "learned"
    max_length: PositiveInt


class Rope(Config):
    """Rotation of queries and keys (arXiv:2104.09864)."""

    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10_000.0


# ---------------------------------------------------------------- initialisers
class NormalInit(Config):
    """Normal with a fixed standard deviation (GPT-2: 0.02)."""

    kind: Literal["normal"] = "normal"
    stddev: PositiveFloat = 0.02


class XavierInit(Config):
    """Uniform with variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""

    kind: Literal["xavier"] = "xavier"
    gain: PositiveFloat = 1.0


class FanInInit(Config):
    """Truncated normal with variance scale / fan_in."""

    kind: Literal["fan_in"] = "fan_in"
    scale: PositiveFloat = 1.0


Init = Annotated[NormalInit | XavierInit | FanInInit, Field(discriminator="kind")]


class InitConfig(Config):
    kernel: Init = NormalInit()
    embedding: Init = NormalInit()
    depth_scaled_output: bool = False
    """Divide the projections that write into the residual stream by sqrt(2 * layers) (GPT-2)."""


# ---------------------------------------------------------------- blocks
class NormConfig(Config):
    kind: Literal["layer", "rms"] = "layer"
    eps: PositiveFloat = 1e-5
    bias: bool = True
    """LayerNorm only: an RMSNorm never has a bias."""


class AttentionConfig(Config):
    num_heads: PositiveInt
    num_kv_heads: PositiveInt | None = None
    """Fewer than `num_heads` is grouped-query, 1 is multi-query; none means as many as query heads."""
    head_dim: PositiveInt
    causal: bool = False
    window: PositiveInt | None = None
    """A query sees this many most recent keys, itself included; none means all."""
    position: Rope | None = None
    bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    scale: PositiveFloat | None = None
    """Multiplies the logits; none means head_dim ** -0.5."""
    dropout: Rate = 0.0
    """On the attention probabilities."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @model_validator(mode="after")
    def _heads_divide(self) -> "AttentionConfig":
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}: "
                "every key-value head serves the same number of query heads"
            )
        if self.position is not None and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary positions turn pairs, use an even number")
        if self.window is not None and not self.causal:
            raise ValueError(f"window={self.window} needs causal=true: a window counts back from the query")
        return self


class MlpConfig(Config):
    kind: Literal["mlp"] = "mlp"
    dim: PositiveInt
    activation: Activation = "gelu_tanh"
    gated: bool = False
    """Multiply the activated branch by a second linear branch (arXiv:2002.05202)."""
    bias: bool = False


class BlockConfig(Config):
    attention: AttentionConfig
    cross_attention: AttentionConfig | None = None
    mlp: MlpConfig
    norm: NormConfig = NormConfig()
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x)))."""
    dropout: Rate = 0.0
    """On what each sub-layer adds to the residual stream."""

    @model_validator(mode="after")
    def _cross_is_plain(self) -> "BlockConfig":
        cross = self.cross_attention
        if cross is not None and (cross.causal or cross.position is not None):
            raise ValueError("cross_attention must have causal=false and position=none: source order has no past")
        return self


class StackConfig(Config):
    num_layers: PositiveInt
    pattern: Annotated[tuple[BlockConfig, ...], Field(min_length=1)]
    """Repeats until `num_layers` blocks stand; a remainder takes the head of the pattern."""
    final_norm: NormConfig | None = None

    @model_validator(mode="after")
    def _pattern_fits(self) -> "StackConfig":
        if len(self.pattern) > self.num_layers:
            raise ValueError(
                f"pattern has {len(self.pattern)} blocks but num_layers={self.num_layers}: "
                "raise num_layers or shorten the pattern"
            )
        return self

    def layers_at(self, index: int) -> int:
        """How many layers the block at this place of the pattern stands for."""
        whole, rest = divmod(self.num_layers, len(self.pattern))
        return whole + (index < rest)


# ---------------------------------------------------------------- model
class EmbeddingConfig(Config):
    position: Annotated[Sinusoidal | Learned, Field(discriminator="kind")] | None = None
    scale: bool = False
    """Multiply token embeddings by sqrt(embed_dim) (arXiv:1706.03762, section 3.4)."""
    norm: NormConfig | None = None
    dropout: Rate = 0.0


class HeadConfig(Config):
    tied: bool = True
    """Use the token embedding as the output projection."""
    bias: bool = False


class ModelConfig(Config):
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    embedding: EmbeddingConfig = EmbeddingConfig()
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    head: HeadConfig | None = HeadConfig()
    """None gives hidden states instead of logits."""
    init: InitConfig = InitConfig()

    @property
    def shape(self) -> Literal["encoder-decoder", "decoder-only", "encoder-only"]:
        if self.encoder is not None and self.decoder is not None:
            return "encoder-decoder"
        return "decoder-only" if self.decoder is not None else "encoder-only"

    @property
    def max_length(self) -> int | None:
        """The longest sequence the positions can tell apart; none means unbounded."""
        return getattr(self.embedding.position, "max_length", None)

    @model_validator(mode="after")
    def _stacks_agree(self) -> "ModelConfig":
        if self.encoder is None and self.decoder is None:
            raise ValueError("encoder and decoder are both none: a model needs at least one stack")
        if self.decoder is not None:
            for i, block in enumerate(self.decoder.pattern):
                where = f"decoder.pattern.{i}"
                if not block.attention.causal:
                    raise ValueError(f"{where}.attention.causal=false: a decoder must not see the future, set true")
                if (block.cross_attention is None) != (self.encoder is None):
                    raise ValueError(
                        f"{where}.cross_attention is {'none' if block.cross_attention is None else 'set'} and encoder "
                        f"is {'none' if self.encoder is None else 'set'}: set both (encoder-decoder) or neither"
                    )
            if self.head is None:
                raise ValueError("head=none on a model with a decoder: generation needs logits, set a head")
        if self.encoder is not None and any(b.cross_attention is not None for b in self.encoder.pattern):
            raise ValueError("encoder.pattern has cross_attention: only a decoder attends to another stack")
        if self.embedding.position is not None and self.embedding.position.kind == "sinusoidal" and self.embed_dim % 2:
            raise ValueError(f"embed_dim={self.embed_dim} is odd: sinusoidal positions come in pairs, use an even one")
        return self
