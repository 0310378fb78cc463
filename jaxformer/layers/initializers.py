"""Initialisers from their configs."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.config import FanInInit, Init, NormalInit, XavierInit


def initializer(config: Init, num_in: int, scale: float = 1.0) -> Callable[..., jax.Array]:
    """`(key, shape, dtype) -> array`; the first `num_in` dimensions are contracted with the input."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
        return scale * _DRAW[config.kind](config, key, shape, num_in).astype(dtype)

    return init


def _normal(config: NormalInit, key, shape, num_in):
    return config.stddev * jax.random.normal(key, shape)


def _xavier(config: XavierInit, key, shape, num_in):
    fan_in, fan_out = math.prod(shape[:num_in]), math.prod(shape[num_in:])
    bound = config.gain * math.sqrt(6.0 / (fan_in + fan_out))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _fan_in(config: FanInInit, key, shape, num_in):
    # 0.8796...: standard deviation of a standard normal cut at +-2, divided out to keep the stated variance.
    stddev = math.sqrt(config.scale / math.prod(shape[:num_in])) / 0.87962566103423978
    return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape)


_DRAW = {"normal": _normal, "xavier": _xavier, "fan_in": _fan_in}
