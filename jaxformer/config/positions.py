"""Position encodings: embeddings, rotations and biases of attention."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from jaxformer.config.base import Config


class Sinusoidal(Config):
    """Sinusoidal position embeddings, added to the token embeddings (arXiv:1706.03762, section 3.5).

    The defaults are those of the paper. Marian has `layout=halves`; tensor2tensor, OpenNMT-tf and fairseq also have
    `endpoint=true`, with `offset` 0, 1 and the padding id plus 1."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves"] = "interleaved"
    """Order of channels. interleaved: sines and cosines alternate, as in the paper; halves: sines, then cosines."""
    endpoint: bool = False
    """Use frequencies 10000^(-i/(D/2-1)), of which the last is 1/10000. False: 10000^(-i/(D/2)), as in the paper."""
    offset: NonNegativeInt = 0
    """Added to every position; positions are counted from 0."""
    max_length: PositiveInt | None = None
    """Maximum sequence length in tokens. None: no limit."""


class Learned(Config):
    """Learned position embeddings, added to the token embeddings."""

    kind: Literal["learned"] = "learned"
    max_length: PositiveInt
    """Maximum sequence length in tokens."""
    offset: NonNegativeInt = 0
    """Number of unused rows at the start of the embedding table, before the row of position 0."""


class LinearScaling(Config):
    """Position interpolation: divide all positions by `factor` (arXiv:2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat
    """Ratio of the extended context length to the original one."""


class DynamicNtkScaling(Config):
    """Dynamic NTK-aware scaling: increase theta for rows longer than `original_length` (arXiv:2309.00071)."""

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: PositiveFloat
    """How fast theta increases with the length of a row."""
    original_length: PositiveInt
    """Context length in tokens before scaling; theta is unchanged for rows up to this length."""


class BandScaling(Config):
    """Divide low frequencies by `factor`, keep high ones, interpolate the others (Llama 3.1, arXiv:2407.21783)."""

    kind: Literal["bands"] = "bands"
    factor: PositiveFloat
    """Divisor of the low frequencies."""
    low_factor: PositiveFloat = 1.0
    """Frequencies with fewer full rotations than this over `original_length` are divided by `factor`."""
    high_factor: PositiveFloat = 4.0
    """Frequencies with more full rotations than this over `original_length` are unchanged."""
    original_length: PositiveInt
    """Context length in tokens before scaling."""

    @model_validator(mode="after")
    def _band_has_width(self) -> "BandScaling":
        if self.high_factor <= self.low_factor:
            raise ValueError(f"high_factor={self.high_factor} must be more than low_factor={self.low_factor}")
        return self


class YarnScaling(Config):
    """YaRN: divide low frequencies by `factor`, keep high ones, and rescale the logits (arXiv:2309.00071)."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    """Ratio of the extended context length to the original one."""
    original_length: PositiveInt
    """Context length in tokens before scaling."""
    fast_turns: PositiveFloat = 32.0
    """Frequencies with more full rotations than this over `original_length` are unchanged (beta in the paper)."""
    slow_turns: PositiveFloat = 1.0
    """Frequencies with fewer full rotations than this are divided by `factor` (alpha in the paper)."""
    magnitude: PositiveFloat | None = None
    """Multiplies rotated queries and keys, which rescales the logits. None: 0.1 * ln(factor) + 1."""
    whole_channels: bool = True
    """Round the first and the last interpolated channel to integers."""


RopeScaling = Annotated[LinearScaling | DynamicNtkScaling | BandScaling | YarnScaling, Field(discriminator="kind")]


class Rope(Config):
    """Rotary position embeddings (RoPE) of queries and keys (arXiv:2104.09864)."""

    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10_000.0
    """Base of the rotation frequencies theta ** (-2i / dim)."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Fraction of each head's channels that are rotated; the others are unchanged."""
    pairing: Literal["halves", "neighbours"] = "halves"
    """Channels that form a rotated pair. halves: i and i + dim / 2; neighbours: 2i and 2i + 1, as in the paper."""
    scaling: RopeScaling | None = None
    """How frequencies are changed to extend the context length. None: not changed."""

    def rotated_dim(self, head_dim: int) -> int:
        return int(head_dim * self.fraction)


class Alibi(Config):
    """ALiBi: logits decrease linearly with distance, with a fixed slope per head (arXiv:2108.12409)."""

    kind: Literal["alibi"] = "alibi"


class BucketBias(Config):
    """Relative position bias: one learned value per head and distance bucket (arXiv:1910.10683, section 2.1)."""

    num_buckets: Annotated[int, Field(ge=4, multiple_of=2)] = 32
    """Number of distance buckets; bidirectional attention uses half of them for each direction."""
    max_distance: PositiveInt = 128
    """Distances of this many tokens or more share the last bucket."""

    @model_validator(mode="after")
    def _far_enough(self) -> "BucketBias":
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance={self.max_distance} is not more than num_buckets // 2 = {self.num_buckets // 2}, the "
                f"number of distances with one bucket each: raise it above {self.num_buckets // 2}"
            )
        return self
