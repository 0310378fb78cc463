"""Model configs: an architecture as data, from which the one `Transformer` module builds every family.

Fields describe features of an architecture, not families, and no code branches on a family's name. Run-time options
that do not affect parameters (dtype, remat, scan unrolling, attention kernels) are in `TrainConfig`.
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
from jaxformer.config.positions import Alibi, BucketBias, DynamicNtkScaling, Learned, Rope, Sinusoidal

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
ModelShape = Literal["encoder-decoder", "decoder-only", "encoder-only", "embedding-only"]
Problem = Literal["single_label", "multi_label", "regression"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]


# ---------------------------------------------------------------- initialisers
class NormalInit(Config):
    """Normal distribution with a fixed standard deviation."""

    kind: Literal["normal"] = "normal"
    stddev: PositiveFloat = 0.02
    """Standard deviation; the default is that of GPT-2."""


class XavierInit(Config):
    """Uniform distribution with variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""

    kind: Literal["xavier"] = "xavier"
    gain: PositiveFloat = 1.0
    """Multiplies the standard deviation."""


class FanInInit(Config):
    """Truncated normal distribution with variance scale / fan_in."""

    kind: Literal["fan_in"] = "fan_in"
    scale: PositiveFloat = 1.0
    """Multiplies the variance."""


Init = Annotated[NormalInit | XavierInit | FanInInit, Field(discriminator="kind")]


class InitConfig(Config):
    """Random initialisation of the parameters; biases start at 0, and norms as the identity."""

    kernel: Init = NormalInit()
    """Initialiser of weight matrices."""
    embedding: Init = NormalInit()
    """Initialiser of token, position and type embeddings and of relative position biases."""
    depth_scaled_output: bool = False
    """Divide the output projections of attention and MLPs by sqrt(2 * num_layers), as GPT-2 does."""
    scaled_queries: bool = False
    """Divide query projections by sqrt(head_dim), for attention that does not scale its logits (T5)."""


# ---------------------------------------------------------------- blocks
class NormConfig(Config):
    """Normalisation over channels."""

    kind: Literal["layer", "rms"] = "layer"
    """layer: LayerNorm (arXiv:1607.06450); rms: RMSNorm (arXiv:1910.07467)."""
    eps: PositiveFloat = 1e-5
    """Added to the variance, or to the mean square in RMSNorm, for numerical stability."""
    bias: bool = True
    """Add a learned bias; ignored by RMSNorm, which has none."""
    unit_offset: bool = False
    """Multiply by 1 + scale instead of scale; the stored scale then starts at 0."""


class AttentionConfig(Config):
    """Multi-head, grouped-query or multi-query attention."""

    num_heads: PositiveInt
    """Number of query heads."""
    num_kv_heads: PositiveInt | None = None
    """Number of key-value heads: 1 is multi-query, fewer than `num_heads` grouped-query. None: `num_heads`."""
    head_dim: PositiveInt
    """Channels per head."""
    causal: bool = False
    """Each token attends only to itself and to earlier tokens; required in decoders."""
    window: PositiveInt | None = None
    """Sliding window: mask keys this many tokens away or farther, in both directions unless causal. None: no window."""
    position: Annotated[Rope | Alibi, Field(discriminator="kind")] | None = None
    """Position encoding inside attention: RoPE or ALiBi. None: neither."""
    qk_norm: NormConfig | None = None
    """Norm of the queries and keys of each head, applied before RoPE (arXiv:2302.05442). None: no norm."""
    softcap: PositiveFloat | None = None
    """Limit logits to +-softcap with tanh (arXiv:2408.00118, section 2). None: no limit."""
    bias: bool = False
    """Add biases to the query, key and value projections."""
    output_bias: bool = False
    """Add a bias to the output projection."""
    scale: PositiveFloat | None = None
    """Multiplies the attention logits. None: head_dim ** -0.5."""
    dropout: Rate = 0.0
    """Dropout rate of the attention probabilities."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @model_validator(mode="after")
    def _heads_divide(self) -> "AttentionConfig":
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}: change one of them, "
                "every key-value head serves the same number of query heads"
            )
        if isinstance(self.position, Rope) and self.position.rotated_dim(self.head_dim) % 2:
            raise ValueError(
                f"head_dim={self.head_dim} with position.fraction={self.position.fraction} rotates "
                f"{self.position.rotated_dim(self.head_dim)} channels: RoPE rotates pairs, use an even number"
            )
        scaling = getattr(self.position, "scaling", None)
        if isinstance(scaling, DynamicNtkScaling) and self.position.rotated_dim(self.head_dim) < 4:
            raise ValueError(f"head_dim={self.head_dim}: dynamic_ntk scaling needs at least 4 rotated channels")
        return self


class MlpConfig(Config):
    """Feed-forward layer with one hidden layer, plain or gated."""

    kind: Literal["mlp"] = "mlp"
    dim: PositiveInt
    """Channels of the hidden layer."""
    activation: Activation = "gelu_tanh"
    """Activation function; `gelu` is exact, `gelu_tanh` is its tanh approximation."""
    gated: bool = False
    """Multiply the activation by a second linear projection of the input, as in SwiGLU (arXiv:2002.05202)."""
    bias: bool = False
    """Add biases to all projections."""


class MoeConfig(Config):
    """Mixture of experts: a softmax router selects `top_k` of `num_experts` MLPs per token (arXiv:1701.06538).

    Experts have no capacity limit, so no token is dropped."""

    kind: Literal["moe"] = "moe"
    num_experts: PositiveInt
    """Number of experts."""
    top_k: PositiveInt
    """Number of experts per token."""
    dim: PositiveInt
    """Channels of the hidden layer of each expert."""
    activation: Activation = "silu"
    """Activation function; `gelu` is exact, `gelu_tanh` is its tanh approximation."""
    gated: bool = True
    """Multiply the activation by a second linear projection of the input, as in SwiGLU (arXiv:2002.05202)."""
    renormalize: bool = True
    """Apply the softmax over the selected experts only, so that their weights sum to 1. False: over all experts."""
    load_balance: NonNegativeFloat = 0.0
    """Weight of the loss that balances tokens across experts (arXiv:2101.03961, section 2.2). 0: no such loss."""
    router_z: NonNegativeFloat = 0.0
    """Weight of the z-loss, which keeps router logits small (arXiv:2202.08906, section 3.1). 0: no such loss."""

    @model_validator(mode="after")
    def _enough_experts(self) -> "MoeConfig":
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}: lower top_k")
        return self


class BlockConfig(Config):
    """One layer: self-attention, optional cross-attention, and an MLP, each with norms and a residual connection."""

    attention: AttentionConfig
    """Self-attention."""
    cross_attention: AttentionConfig | None = None
    """Attention to the encoder's output, in the decoder of an encoder-decoder. None: no cross-attention."""
    mlp: Annotated[MlpConfig | MoeConfig, Field(discriminator="kind")]
    """Feed-forward layer or mixture of experts."""
    norm: NormConfig = NormConfig()
    """Norm of each sub-layer; all sub-layers have the same kind of norm."""
    attention_norm: bool = True
    """Normalise the input of self-attention; false is only allowed with placement `pre`."""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """Where norms are applied. pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x)))."""
    dropout: Rate = 0.0
    """Dropout rate of each sub-layer's output, before it is added to the residual stream."""

    @model_validator(mode="after")
    def _cross_is_plain(self) -> "BlockConfig":
        cross = self.cross_attention
        if cross is not None and (cross.causal or cross.position is not None or cross.window is not None):
            raise ValueError(
                "cross_attention must have causal=false, position=none and window=none: every token attends to the "
                "whole source"
            )
        if not self.attention_norm and self.placement != "pre":
            raise ValueError(f"attention_norm=false needs placement=pre, not {self.placement}")
        return self


class StackConfig(Config):
    """A stack of transformer layers: optional first layers, then a repeating pattern of layers."""

    kind: Literal["transformer"] = "transformer"
    num_layers: PositiveInt
    """Total number of layers, including those of `first`."""
    first: tuple[BlockConfig, ...] = ()
    """Layers before the repeating pattern, each used once."""
    pattern: Annotated[tuple[BlockConfig, ...], Field(min_length=1)]
    """Layers that repeat until there are `num_layers`; the last repeat may be incomplete."""
    final_norm: NormConfig | None = None
    """Norm after the last layer. None: no norm."""
    relative_bias: BucketBias | None = None
    """Relative position bias, shared by the self-attention of all layers. None: no bias."""

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
        """The entries of `first`, then those of `pattern`."""
        return (*self.first, *self.pattern)

    @property
    def num_repeats(self) -> int:
        """Number of complete repeats of the pattern."""
        return (self.num_layers - len(self.first)) // len(self.pattern)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Where the parameters of each layer are stored, in order of depth.

        Layers of one pattern entry are stacked along a leading axis: a place is the name of the entry's parameters
        (`first_0`, `blocks_0`, ...) and the index of the layer along that axis."""
        singles = [(f"first_{i}", 0) for i in range(len(self.first))]
        repeats = (divmod(layer, len(self.pattern)) for layer in range(self.num_layers - len(self.first)))
        return (*singles, *((f"blocks_{entry}", index) for index, entry in repeats))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of layers stacked under each parameter name (`first_0`, `blocks_0`, ...)."""
        counts: dict[str, int] = {}
        for name, _ in self.places:
            counts[name] = counts.get(name, 0) + 1
        return counts

    def block(self, layer: int) -> BlockConfig:
        """The config of the layer at this depth."""
        index = layer - len(self.first)
        return self.first[layer] if index < 0 else self.pattern[index % len(self.pattern)]


class RecurrentConfig(Config):
    """A stack of recurrent layers, as a baseline for attention."""

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["elman", "lstm"] = "lstm"
    """elman: tanh (Cognitive Science 14, 1990); lstm: LSTM with a forget gate (Neural Computation 9(8), 1997)."""
    num_layers: PositiveInt
    """Number of layers."""
    dim: PositiveInt
    """Channels of the state of each layer."""
    dropout: Rate = 0.0
    """Dropout rate of each layer's output; not applied to the recurrent state (arXiv:1409.2329)."""


# ---------------------------------------------------------------- model
class EmbeddingConfig(Config):
    """Token, position and type embeddings.

    The encoder and decoder of one model share token embeddings, unless the model has a `source_vocab_size`, but not
    learned position embeddings and norms."""

    position: Annotated[Sinusoidal | Learned, Field(discriminator="kind")] | None = None
    """Position embeddings added to the token embeddings. None: no position embeddings."""
    scale: bool = False
    """Multiply token embeddings by sqrt(embed_dim) (arXiv:1706.03762, section 3.4)."""
    num_types: NonNegativeInt = 0
    """Number of token types, such as first and second sentence (arXiv:1810.04805). 0: no type embeddings."""
    norm: NormConfig | None = None
    """Norm of the summed embeddings. None: no norm."""
    dropout: Rate = 0.0
    """Dropout rate of the summed embeddings."""


class TransformConfig(Config):
    """A dense layer of width `embed_dim`, an activation and an optional norm."""

    activation: Activation
    """Activation function; `gelu` is exact, `gelu_tanh` is its tanh approximation."""
    bias: bool = True
    """Add a bias to the dense layer."""
    norm: NormConfig | None = None
    """Norm after the activation. None: no norm."""


class HeadConfig(Config):
    """Output head: logits over the vocabulary."""

    tied: bool = True
    """Use the token embeddings as the output projection."""
    bias: bool = False
    """Add a bias to the logits."""
    scale: bool = False
    """Multiply hidden states by embed_dim ** -0.5 before the output projection."""
    transform: TransformConfig | None = None
    """Dense layer between the hidden states and the output projection. None: no such layer."""
    softcap: PositiveFloat | None = None
    """Limit logits to +-softcap with tanh. None: no limit."""


class PoolerConfig(Config):
    """A head for classification, tagging and sentence vectors: pooling, an optional dense layer, optional classes."""

    pooling: Literal["first", "mean", "last", "none"] = "first"
    """first or last: the hidden state of that token; mean: the mean over all tokens; none: every token (tagging)."""
    transform: TransformConfig | None = None
    """Dense layer applied to the pooled vector. None: no such layer."""
    num_classes: PositiveInt | None = None
    """Number of classes. None: the pooler returns the vector instead of class logits."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of their ids. Empty: those of the training data, in sorted order."""
    problem: Problem = "single_label"
    """single_label: exactly one class; multi_label: any number of classes; regression: numbers, one per class."""
    bias: bool = True
    """Add a bias to the class logits."""
    dropout: Rate = 0.0
    """Dropout rate of the vector before the classifier."""

    @model_validator(mode="after")
    def _labels_fit(self) -> "PoolerConfig":
        if self.labels and len(self.labels) != (self.num_classes or 0):
            raise ValueError(f"labels has {len(self.labels)} names but num_classes={self.num_classes}: make them equal")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels={list(self.labels)} has a name twice: give every class its own name")
        if self.pooling == "none" and (self.num_classes is None or self.problem != "single_label"):
            raise ValueError("pooling=none (tagging) needs num_classes and problem=single_label")
        return self


class SpecialIds(Config):
    """Ids of the model's special tokens."""

    bos: NonNegativeInt | None = None
    """Id that begins a text. None: that of the tokenizer."""
    eos: tuple[NonNegativeInt, ...] = ()
    """Ids that end a text; training appends the first, decoding stops at any. Empty: that of the tokenizer."""
    pad: NonNegativeInt | None = None
    """Padding id in exported models. None: that of the tokenizer."""
    decoder_start: NonNegativeInt | None = None
    """Id that the decoder of an encoder-decoder reads first. None: `bos`."""


def _decoder_kind(value: Any) -> str:
    """Runs saved before recurrent decoders existed have no `kind`: they are transformers."""
    return value.get("kind", "transformer") if isinstance(value, dict) else getattr(value, "kind", "transformer")


Decoder = Annotated[
    Annotated[StackConfig, Tag("transformer")] | Annotated[RecurrentConfig, Tag("recurrent")],
    Discriminator(_decoder_kind),
]


class ModelConfig(Config):
    """Architecture of an encoder-decoder, decoder-only or encoder-only model, or of word vectors (embedding-only)."""

    vocab_size: PositiveInt
    """Number of token ids; may be larger than the tokenizer's vocabulary."""
    source_vocab_size: PositiveInt | None = None
    """Number of token ids of the source, which then has its own embedding table. None: the source uses `vocab_size`."""
    embed_dim: PositiveInt
    """Channels of the embeddings and of the residual stream."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """Token, position and type embeddings."""
    encoder: StackConfig | None = None
    """Encoder stack. None: the model is decoder-only, or embedding-only if it has no decoder either."""
    decoder: Decoder | None = None
    """Decoder stack. None: the model is encoder-only, or embedding-only if it has no encoder either."""
    head: HeadConfig | None = HeadConfig()
    """Output head. None: the model has no logits over the vocabulary, only hidden states."""
    pooler: PoolerConfig | None = None
    """Head for classification, tagging and sentence vectors. None: no such head."""
    prefix: bool = False
    """Prefix language model: the tokens of a prompt attend to each other in both directions, in generation and in the
    objective `prefix`; only for decoder-only transformers."""
    context_length: PositiveInt | None = None
    """Maximum sequence length in tokens, if lower than that of the position embeddings. None: no further limit."""
    special: SpecialIds = SpecialIds()
    """Ids of special tokens."""
    init: InitConfig = InitConfig()
    """Random initialisation of the parameters."""

    @property
    def shape(self) -> ModelShape:
        if self.encoder is not None and self.decoder is not None:
            return "encoder-decoder"
        if self.encoder is None and self.decoder is None:
            return "embedding-only"
        return "decoder-only" if self.decoder is not None else "encoder-only"

    @property
    def encoder_vocab_size(self) -> int:
        """Number of token ids that the encoder reads."""
        return self.source_vocab_size or self.vocab_size

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens; None if there is no limit."""
        limits = (self.context_length, getattr(self.embedding.position, "max_length", None))
        return min((limit for limit in limits if limit is not None), default=None)

    @model_validator(mode="after")
    def _stacks_agree(self) -> "ModelConfig":
        if self.shape == "embedding-only":
            self._check_embeddings()
        if self.decoder is not None:
            self._check_decoder()
            if self.head is None and (self.pooler is None or self.pooler.num_classes is None):
                raise ValueError(
                    "head=none on a model with a decoder: set a head to generate text, or pooler.num_classes"
                )
        if self.encoder is not None and any(b.cross_attention is not None for b in self.encoder.blocks):
            raise ValueError("encoder has cross_attention: only a decoder attends to another stack, set it to none")
        if self.prefix and (self.shape != "decoder-only" or isinstance(self.decoder, RecurrentConfig)):
            kind = "recurrent" if isinstance(self.decoder, RecurrentConfig) else self.shape
            raise ValueError(
                f"prefix=true on a model that is {kind}: only a decoder-only transformer can read its prompt in both "
                "directions, set false"
            )
        if self.source_vocab_size is not None and self.shape != "encoder-decoder":
            raise ValueError(
                f"source_vocab_size={self.source_vocab_size} on a model that is {self.shape}: only an encoder-decoder "
                "has a source, set it to none"
            )
        if self.embedding.position is not None and self.embedding.position.kind == "sinusoidal" and self.embed_dim % 2:
            raise ValueError(f"embed_dim={self.embed_dim} is odd: sinusoidal positions need an even number")
        for name, id in self._special_ids():
            if id >= self.vocab_size:
                raise ValueError(
                    f"special.{name}={id} is outside the vocabulary of {self.vocab_size} ids: use a smaller id"
                )
        return self

    def _check_embeddings(self) -> None:
        """A model without stacks consists of two vectors per word, as in word2vec, and of nothing else."""
        only_vectors = HeadConfig(tied=False)
        if self.head != only_vectors or self.embedding != EmbeddingConfig() or self.pooler is not None:
            raise ValueError(
                "encoder and decoder are both none: a model needs at least one stack; only word vectors "
                "(models.word2vec) have none, with head.tied=false and no other settings of head, embedding and pooler"
            )

    def _check_decoder(self) -> None:
        if isinstance(self.decoder, RecurrentConfig):
            if self.encoder is not None:
                raise ValueError(
                    "decoder.kind=recurrent with an encoder: recurrent models are decoder-only, set encoder=none"
                )
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
