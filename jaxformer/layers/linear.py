"""Building blocks of all layers: run-time options, the linear layer, norms and initialisers.

These modules own parameters, dtypes and logical axes. A matrix may be stored in a format other than a plain array
(`ops.weights`); the layers only use the `Weight` protocol.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import FanInInit, Init, NormalInit, NormConfig, XavierInit
from jaxformer.config.run import Remat
from jaxformer.ops.norms import layer_norm, rms_norm
from jaxformer.ops.weights import Dense, DenseTable, Weight


@dataclass(frozen=True)
class Runtime:
    """Run-time options of a model; none of them changes the name or shape of a parameter."""

    dtype: Any = jnp.float32
    remat: Remat = "none"
    unroll: int | Literal["all"] = 1
    attention: str = "auto"
    platform: str = "cpu"
    """Target platform: "cpu", "gpu" or "tpu"; the devices may exist only as a topology description."""
    cache: Literal["dtype", "int8"] = "dtype"
    """Storage of the KV cache: in `dtype`, or as int8 with one scale per vector."""
    scan_decode: bool = False
    """Whether decoding scans over the layers as training does, so that compile time does not grow with depth."""


class Linear(nn.Module):
    """Contracts the last `num_in` dimensions of x with the first ones of the kernel, then adds a bias."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kernel_init: Init
    runtime: Runtime
    num_in: int = 1
    init_scale: float = 1.0
    bias: bool = False
    dtype: Any = None
    """Dtype in which the layer computes; None means the runtime's dtype."""
    out_dtype: Any = None
    """Dtype of the matrix product, before the bias is added; None means `dtype`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.runtime.dtype if self.dtype is None else self.dtype
        init = nn.with_logical_partitioning(initializer(self.kernel_init, self.num_in, self.init_scale), self.axes)
        kernel = weight_param(self, "kernel", init, self.shape)
        out_dtype = dtype if self.out_dtype is None else self.out_dtype
        y = kernel.matmul(x.astype(dtype), self.num_in, out_dtype, self.runtime.platform)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.num_in :])
            y = y + self.param("bias", zeros, self.shape[self.num_in :]).astype(dtype)
        return y


def weight_param(
    module: nn.Module,
    name: str,
    init: Callable[..., Any],
    shape: tuple[int, ...],
    plain: type[Dense] | type[DenseTable] = Dense,
) -> Weight:
    """A module's parameter in the format in which it is stored, or newly initialised as a plain array."""
    stored = module.get_variable("params", name) if module.has_variable("params", name) else None
    # `module.param` compares the shape of a stored parameter with the initialiser's, which only plain arrays match.
    return stored if isinstance(stored, Weight) else plain(module.param(name, init, shape))


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension."""

    config: NormConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape, offset = x.shape[-1:], self.config.unit_offset
        scale_init = nn.initializers.zeros if offset else nn.initializers.ones
        scale = self.param("scale", nn.with_logical_partitioning(scale_init, ("norm",)), shape)
        scale = 1.0 + scale if offset else scale
        if self.config.kind == "rms":
            return rms_norm(x, scale, self.config.eps)
        bias = None
        if self.config.bias:
            bias = self.param("bias", nn.with_logical_partitioning(nn.initializers.zeros, ("norm",)), shape)
        return layer_norm(x, scale, bias, self.config.eps)


# ---------------------------------------------------------------- initialisers
def initializer(config: Init, num_in: int, scale: float = 1.0) -> Callable[..., jax.Array]:
    """`(key, shape, dtype) -> array`; the first `num_in` dimensions are contracted with the input."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
        return scale * _INITIALIZERS[config.kind](config, key, shape, num_in).astype(dtype)

    return init


def _normal(config: NormalInit, key, shape, num_in):
    return config.stddev * jax.random.normal(key, shape)


def _xavier(config: XavierInit, key, shape, num_in):
    fan_in, fan_out = math.prod(shape[:num_in]), math.prod(shape[num_in:])
    bound = config.gain * math.sqrt(6.0 / (fan_in + fan_out))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _fan_in(config: FanInInit, key, shape, num_in):
    # 0.8796... is the standard deviation of a standard normal truncated at +-2; dividing by it keeps the variance.
    stddev = math.sqrt(config.scale / math.prod(shape[:num_in])) / 0.87962566103423978
    return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape)


_INITIALIZERS = {"normal": _normal, "xavier": _xavier, "fan_in": _fan_in}
