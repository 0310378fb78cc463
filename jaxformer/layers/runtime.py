"""How a model runs, as opposed to what it is: nothing here changes a parameter's name or shape."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp


@dataclass(frozen=True)
class Runtime:
    dtype: Any = jnp.float32
    remat: Literal["none", "full", "dots"] = "none"
    unroll: int | Literal["all"] = 1
    attention: str = "auto"
    platform: str = "cpu"
    """What the program runs on: "cpu", "gpu" or "tpu"; the devices may exist only as a topology description."""
    cache: Literal["dtype", "int8"] = "dtype"
    """How decoding stores keys and values: in `dtype`, or as whole numbers with a scale each."""
