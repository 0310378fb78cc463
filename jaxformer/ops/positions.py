"""Position encodings. Angles are always float32: bfloat16 cannot tell neighbouring positions apart."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.config import BandScaling, DynamicNtkScaling, LinearScaling, Rope, Sinusoidal, YarnScaling


def sinusoidal(positions: Int[Array, "B T"], dim: int, spec: Sinusoidal) -> Float[Array, "B T D"]:
    """sin and cos of position * 10000^(-2i/D) (arXiv:1706.03762, section 3.5), or of the variants of `Sinusoidal`."""
    count = dim // 2
    intervals = max(count - 1, 1) if spec.endpoint else count
    frequencies = 10_000.0 ** (-jnp.arange(count, dtype=jnp.float32) / intervals)
    angles = (positions + spec.offset)[..., None].astype(jnp.float32) * frequencies
    if spec.layout == "halves":
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, dim)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of all rotation angles, shared by all layers with the same spec and head dimension."""

    cos_BT1C: Float[Array, "B T 1 C"]
    sin_BT1C: Float[Array, "B T 1 C"]
    spec: Rope = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})


def rope_tables(positions_BT: Int[Array, "B T"], spec: Rope, head_dim: int) -> RopeTables:
    """Tables for the angles position * theta^(-2i/H) (arXiv:2104.09864, section 3.4)."""
    frequencies, magnitude = rope_frequencies(spec, spec.rotated_dim(head_dim), positions_BT)
    angles = positions_BT[..., None, None].astype(jnp.float32) * frequencies
    return RopeTables(magnitude * jnp.cos(angles), magnitude * jnp.sin(angles), spec, head_dim)


def apply_rope(x_BTNH: Float[Array, "B T N H"], tables: RopeTables) -> Float[Array, "B T N H"]:
    """Rotate pairs of channels; channels beyond the rotated fraction pass unchanged."""
    dim, cos, sin = tables.spec.rotated_dim(tables.head_dim), tables.cos_BT1C, tables.sin_BT1C
    x32, rest = x_BTNH[..., :dim].astype(jnp.float32), x_BTNH[..., dim:]
    if tables.spec.pairing == "halves":
        first, second = jnp.split(x32, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    else:
        first, second = x32[..., ::2], x32[..., 1::2]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x32.shape)
    return jnp.concatenate([rotated.astype(x_BTNH.dtype), rest], axis=-1)


def rope_frequencies(
    spec: Rope, dim: int, positions: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "#B 1 1 C"], float]:
    """Angle per position for every pair of channels, and the factor by which rotated vectors are scaled."""
    if isinstance(spec.scaling, DynamicNtkScaling):
        return _dynamic_ntk(spec.theta, dim, spec.scaling, positions), 1.0
    plain = spec.theta ** (-np.arange(0, dim, 2) / dim)
    scale = {LinearScaling: _linear, BandScaling: _bands, YarnScaling: _yarn}.get(type(spec.scaling))
    frequencies = plain if scale is None else scale(plain, spec.theta, spec.scaling)
    magnitude = 1.0
    if isinstance(spec.scaling, YarnScaling):
        magnitude = spec.scaling.magnitude or 0.1 * math.log(max(spec.scaling.factor, 1.0)) + 1.0
    return jnp.asarray(frequencies, jnp.float32)[None, None, None], magnitude


def _linear(plain: np.ndarray, theta: float, scaling: LinearScaling) -> np.ndarray:
    return plain / scaling.factor


def _bands(plain: np.ndarray, theta: float, scaling: BandScaling) -> np.ndarray:
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = np.clip((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0.0, 1.0)
    return plain * (kept + (1.0 - kept) / scaling.factor)


def _yarn(plain: np.ndarray, theta: float, scaling: YarnScaling) -> np.ndarray:
    """A linear ramp over channels, from those kept to those divided by `factor` (arXiv:2309.00071, section 3.2)."""
    dim = 2 * len(plain)

    def channel(turns: float) -> float:
        return dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.fast_turns), channel(scaling.slow_turns)
    if scaling.whole_channels:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # 0.001 avoids a division by zero if both ends of the ramp fall on the same channel.
    slowed = np.clip((np.arange(len(plain)) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return plain * ((1.0 - slowed) + slowed / scaling.factor)


def _dynamic_ntk(
    theta: float, dim: int, scaling: DynamicNtkScaling, positions: Int[Array, "B T"]
) -> Float[Array, "B 1 1 C"]:
    """Theta grows with the current length of each row."""
    length_B = jnp.maximum(positions.max(axis=-1) + 1, scaling.original_length).astype(jnp.float32)
    grown_B = theta * (scaling.factor * length_B / scaling.original_length - (scaling.factor - 1)) ** (dim / (dim - 2))
    exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return (grown_B[:, None] ** -exponents)[:, None, None]
