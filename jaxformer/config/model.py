"""The model as data: what one `Transformer` needs to know to be any of the families.

A field that only some families use has a meaning of its own; nothing here names a family. Run-time
choices that leave the parameters alone (dtype, remat, scan unrolling, kernels) live in `TrainConfig`.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from jaxformer.config.base import Config

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
ModelShape = Literal["encoder-decoder", "decoder-only", "encoder-only"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]


# ---------------------------------------------------------------- positions
class Sinusoidal(Config):
    """Fixed sines and cosines added to the embeddings (arXiv:1706.03762, section 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves"] = "interleaved"
    """Sine and cosine in turn, as in the paper, or all sines before all cosines."""
    offset: NonNegativeInt = 0
    """Added to every position."""
    max_length: PositiveInt | None = None
    """The longest sequence the model was made for; none means unbounded."""


class Learned(Config):
    """One trained vector per position added to the embeddings."""

    kind: Literal["learned"] = "learned"
    max_length: PositiveInt
    offset: NonNegativeInt = 0
    """Rows of the table before that of position 0."""


class LinearScaling(Config):
    """Positions divided by `factor` (arXiv:2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class DynamicNtkScaling(Config):
    """Theta grows with a row that is longer than `original_length` (the NTK-aware part of arXiv:2309.00071)."""

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: PositiveFloat
    original_length: PositiveInt


class BandScaling(Config):
    """Slow channels divided by `factor`, fast ones kept, a ramp between (Llama 3.1, arXiv:2407.21783)."""

    kind: Literal["bands"] = "bands"
    factor: PositiveFloat
    low_factor: PositiveFloat = 1.0
    """Channels that turn fewer times than this over `original_length` are divided by `factor`."""
    high_factor: PositiveFloat = 4.0
    """Channels that turn more often than this are kept."""
    original_length: PositiveInt

    @model_validator(mode="after")
    def _band_has_width(self) -> "BandScaling":
        if self.high_factor <= self.low_factor:
            raise ValueError(f"high_factor={self.high_factor} must be more than low_factor={self.low_factor}")
        return self


class YarnScaling(Config):
    """Interpolation by channel with a temperature on the logits (arXiv:2309.00071)."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_length: PositiveInt
    fast_turns: PositiveFloat = 32.0
    """Channels that turn more often than this over `original_length` are kept (beta in the paper)."""
    slow_turns: PositiveFloat = 1.0
    """Channels that turn fewer times than this are divided by `factor` (alpha in the paper)."""
    magnitude: PositiveFloat | None = None
    """Multiplies queries and keys; none means 0.1 ln(factor) + 1."""
    whole_channels: bool = True
    """Round the ends of the ramp to whole channels."""


RopeScaling = Annotated[LinearScaling | DynamicNtkScaling | BandScaling | YarnScaling, Field(discriminator="kind")]


class Rope(Config):
    """Rotation of queries and keys (arXiv:2104.09864)."""

    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10_000.0
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the channels that are rotated; the rest passes unchanged."""
    pairing: Literal["halves", "neighbours"] = "halves"
    """Which channels turn together: i with i + half, or 2i with 2i + 1 as in the paper."""
    scaling: RopeScaling | None = None

    def rotated_dim(self, head_dim: int) -> int:
        return int(head_dim * self.fraction)


class Alibi(Config):
    """Logits fall linearly with distance, at a slope of each head's own (arXiv:2108.12409)."""

    kind: Literal["alibi"] = "alibi"


class BucketBias(Config):
    """A trained number per head and bucket of distances, shared by all layers (arXiv:1910.10683, section 2.1)."""

    num_buckets: Annotated[int, Field(ge=4, multiple_of=2)] = 32
    """Half of them for each side where attention looks both ways."""
    max_distance: PositiveInt = 128

    @model_validator(mode="after")
    def _far_enough(self) -> "BucketBias":
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance={self.max_distance} is within the {self.num_buckets // 2} distances that have a bucket "
                f"of their own: raise it above {self.num_buckets // 2}"
            )
        return self


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
    scaled_queries: bool = False
    """Divide query projections by sqrt(head_dim), for attention whose logits are not (T5)."""


# ---------------------------------------------------------------- blocks
class NormConfig(Config):
    kind: Literal["layer", "rms"] = "layer"
    eps: PositiveFloat = 1e-5
    bias: bool = True
    """LayerNorm only: an RMSNorm never has a bias."""
    unit_offset: bool = False
    """Multiply by 1 + scale, so that the stored scale starts at 0."""


class AttentionConfig(Config):
    num_heads: PositiveInt
    num_kv_heads: PositiveInt | None = None
    """Fewer than `num_heads` is grouped-query, 1 is multi-query; none means as many as query heads."""
    head_dim: PositiveInt
    causal: bool = False
    window: PositiveInt | None = None
    """A query sees keys less than this far away, on either side unless causal; none means all."""
    position: Annotated[Rope | Alibi, Field(discriminator="kind")] | None = None
    qk_norm: NormConfig | None = None
    """Normalise every head's query and key before they are rotated (arXiv:2302.05442)."""
    softcap: PositiveFloat | None = None
    """Keep logits within +-softcap by tanh (arXiv:2408.00118, section 2)."""
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
        if isinstance(self.position, Rope) and self.position.rotated_dim(self.head_dim) % 2:
            raise ValueError(
                f"head_dim={self.head_dim} with position.fraction={self.position.fraction} rotates "
                f"{self.position.rotated_dim(self.head_dim)} channels: rotary positions turn pairs, use an even number"
            )
        scaling = getattr(self.position, "scaling", None)
        if isinstance(scaling, DynamicNtkScaling) and self.position.rotated_dim(self.head_dim) < 4:
            raise ValueError(f"head_dim={self.head_dim}: dynamic_ntk scaling needs at least 4 rotated channels")
        return self


class MlpConfig(Config):
    kind: Literal["mlp"] = "mlp"
    dim: PositiveInt
    activation: Activation = "gelu_tanh"
    gated: bool = False
    """Multiply the activated branch by a second linear branch (arXiv:2002.05202)."""
    bias: bool = False


class MoeConfig(Config):
    """Each token passes `top_k` of `num_experts` gated or plain MLPs, chosen by a softmax router (arXiv:1701.06538).

    No capacity: every token reaches every expert it chose."""

    kind: Literal["moe"] = "moe"
    num_experts: PositiveInt
    top_k: PositiveInt
    dim: PositiveInt
    """Width of one expert."""
    activation: Activation = "silu"
    gated: bool = True
    renormalize: bool = True
    """Softmax over the chosen experts only, so that their weights add up to 1; else over all experts."""
    load_balance: NonNegativeFloat = 0.0
    """Weight of the loss that spreads tokens over experts (arXiv:2101.03961, section 2.2)."""
    router_z: NonNegativeFloat = 0.0
    """Weight of the loss that keeps router logits small (arXiv:2202.08906, section 3.1)."""

    @model_validator(mode="after")
    def _enough_experts(self) -> "MoeConfig":
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}: lower top_k")
        return self


class BlockConfig(Config):
    attention: AttentionConfig
    cross_attention: AttentionConfig | None = None
    mlp: Annotated[MlpConfig | MoeConfig, Field(discriminator="kind")]
    norm: NormConfig = NormConfig()
    attention_norm: bool = True
    """Pre-norm blocks only: false lets self-attention read its input as it is."""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x)))."""
    dropout: Rate = 0.0
    """On what each sub-layer adds to the residual stream."""

    @model_validator(mode="after")
    def _cross_is_plain(self) -> "BlockConfig":
        cross = self.cross_attention
        if cross is not None and (cross.causal or cross.position is not None or cross.window is not None):
            raise ValueError(
                "cross_attention must have causal=false, position=none and window=none: source order has no past"
            )
        if not self.attention_norm and self.placement != "pre":
            raise ValueError(f"attention_norm=false needs placement=pre, not {self.placement}")
        return self


class StackConfig(Config):
    kind: Literal["transformer"] = "transformer"
    num_layers: PositiveInt
    """All of them, those of `first` included."""
    first: tuple[BlockConfig, ...] = ()
    """Layers that stand once, before the pattern begins."""
    pattern: Annotated[tuple[BlockConfig, ...], Field(min_length=1)]
    """Repeats until `num_layers` blocks stand; a remainder takes the head of the pattern."""
    final_norm: NormConfig | None = None
    relative_bias: BucketBias | None = None
    """Added to the logits of every layer's self-attention."""

    @model_validator(mode="after")
    def _pattern_fits(self) -> "StackConfig":
        if len(self.first) + len(self.pattern) > self.num_layers:
            raise ValueError(
                f"first and pattern have {len(self.first)} + {len(self.pattern)} blocks "
                f"but num_layers={self.num_layers}: raise num_layers or shorten the pattern"
            )
        if self.relative_bias is not None and len({b.attention.num_heads for b in self.blocks}) > 1:
            raise ValueError("relative_bias is shared by all layers: give them the same num_heads")
        return self

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """The block of every place: those of `first`, then those of `pattern`."""
        return (*self.first, *self.pattern)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """For every layer in order of depth, where its parameters are: the name of a place and the index there."""
        singles = [(f"first_{i}", 0) for i in range(len(self.first))]
        repeats = (divmod(layer, len(self.pattern)) for layer in range(self.num_layers - len(self.first)))
        return (*singles, *((f"blocks_{place}", depth) for depth, place in repeats))

    @property
    def sizes(self) -> dict[str, int]:
        """How many layers each place stands for."""
        counts: dict[str, int] = {}
        for name, _ in self.places:
            counts[name] = counts.get(name, 0) + 1
        return counts

    def block(self, layer: int) -> BlockConfig:
        """The block of a layer, by depth."""
        late = layer - len(self.first)
        return self.first[layer] if late < 0 else self.pattern[late % len(self.pattern)]


class RecurrentConfig(Config):
    """Layers that read one token after another: the baselines that came before attention."""

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["elman", "lstm"] = "lstm"
    """Elman (Cognitive Science 14, 1990) with tanh, or LSTM (Neural Computation 9(8), 1997) with a forget gate."""
    num_layers: PositiveInt
    dim: PositiveInt
    """Width of the state of every layer."""
    dropout: Rate = 0.0
    """Between layers and before the head (arXiv:1409.2329)."""


# ---------------------------------------------------------------- model
class EmbeddingConfig(Config):
    """An encoder and a decoder share the token table; learned positions and norms are each side's own."""

    position: Annotated[Sinusoidal | Learned, Field(discriminator="kind")] | None = None
    scale: bool = False
    """Multiply token embeddings by sqrt(embed_dim) (arXiv:1706.03762, section 3.4)."""
    num_types: NonNegativeInt = 0
    """Kinds of tokens with a vector of their own, such as first and second sentence (arXiv:1810.04805)."""
    norm: NormConfig | None = None
    dropout: Rate = 0.0


class TransformConfig(Config):
    """A dense layer of width embed_dim, an activation and perhaps a norm."""

    activation: Activation
    bias: bool = True
    norm: NormConfig | None = None


class HeadConfig(Config):
    tied: bool = True
    """Use the token embedding as the output projection."""
    bias: bool = False
    scale: bool = False
    """Multiply hidden states by embed_dim ** -0.5 first."""
    transform: TransformConfig | None = None
    """Between the hidden states and the output projection."""
    softcap: PositiveFloat | None = None
    """Keep logits within +-softcap by tanh."""


class PoolerConfig(Config):
    """One vector for a whole row, and class logits from it."""

    pooling: Literal["first", "mean"] = "first"
    transform: TransformConfig
    num_classes: PositiveInt | None = None
    """None gives the vector only."""
    dropout: Rate = 0.0
    """On the vector the classes are read from."""


class SpecialIds(Config):
    """Token ids with a meaning; none leaves it to the tokenizer."""

    bos: NonNegativeInt | None = None
    eos: tuple[NonNegativeInt, ...] = ()
    """Any of them ends a text; empty leaves it to the tokenizer."""
    pad: NonNegativeInt | None = None
    decoder_start: NonNegativeInt | None = None
    """What the decoder of an encoder-decoder reads first; none means bos."""


def _decoder_kind(value: Any) -> str:
    """Attention is what a decoder has unless it says otherwise, as runs older than the choice do not."""
    return value.get("kind", "transformer") if isinstance(value, dict) else getattr(value, "kind", "transformer")


Decoder = Annotated[
    Annotated[StackConfig, Tag("transformer")] | Annotated[RecurrentConfig, Tag("recurrent")],
    Discriminator(_decoder_kind),
]


class ModelConfig(Config):
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    embedding: EmbeddingConfig = EmbeddingConfig()
    encoder: StackConfig | None = None
    decoder: Decoder | None = None
    head: HeadConfig | None = HeadConfig()
    """None gives hidden states instead of logits."""
    pooler: PoolerConfig | None = None
    """Encoder-only."""
    context_length: PositiveInt | None = None
    """The longest sequence the model is good for where its positions set no limit; none means unbounded."""
    special: SpecialIds = SpecialIds()
    init: InitConfig = InitConfig()

    @property
    def shape(self) -> ModelShape:
        if self.encoder is not None and self.decoder is not None:
            return "encoder-decoder"
        return "decoder-only" if self.decoder is not None else "encoder-only"

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model takes; none means unbounded."""
        limits = (self.context_length, getattr(self.embedding.position, "max_length", None))
        return min((limit for limit in limits if limit is not None), default=None)

    @model_validator(mode="after")
    def _stacks_agree(self) -> "ModelConfig":
        if self.encoder is None and self.decoder is None:
            raise ValueError("encoder and decoder are both none: a model needs at least one stack")
        if self.decoder is not None:
            self._check_decoder()
            if self.head is None:
                raise ValueError("head=none on a model with a decoder: generation needs logits, set a head")
            if self.pooler is not None:
                raise ValueError(
                    "pooler is set on a model with a decoder: only encoder-only models pool, set it to none"
                )
        if self.encoder is not None and any(b.cross_attention is not None for b in self.encoder.blocks):
            raise ValueError("encoder has cross_attention: only a decoder attends to another stack")
        if self.embedding.position is not None and self.embedding.position.kind == "sinusoidal" and self.embed_dim % 2:
            raise ValueError(f"embed_dim={self.embed_dim} is odd: sinusoidal positions come in pairs, use an even one")
        for name, id in self._special_ids():
            if id >= self.vocab_size:
                raise ValueError(f"special.{name}={id} is outside the vocabulary of {self.vocab_size}: correct it")
        return self

    def _check_decoder(self) -> None:
        if isinstance(self.decoder, RecurrentConfig):
            if self.encoder is not None:
                raise ValueError("decoder.kind=recurrent with an encoder: a recurrent stack is decoder-only")
            return
        for i, block in enumerate(self.decoder.blocks):
            where = f"decoder block {i}"
            if not block.attention.causal:
                raise ValueError(f"{where}: attention.causal=false: a decoder must not see the future, set true")
            if (block.cross_attention is None) != (self.encoder is None):
                raise ValueError(
                    f"{where}: cross_attention is {'none' if block.cross_attention is None else 'set'} and encoder "
                    f"is {'none' if self.encoder is None else 'set'}: set both (encoder-decoder) or neither"
                )

    def _special_ids(self) -> list[tuple[str, int]]:
        special = self.special
        single = (("bos", special.bos), ("pad", special.pad), ("decoder_start", special.decoder_start))
        return [(name, id) for name, id in single if id is not None] + [("eos", id) for id in special.eos]
