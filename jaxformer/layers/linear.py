"""The one projection layer: it owns kernel, bias, their dtypes and logical axes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import Init
from jaxformer.layers.initializers import initializer


class Linear(nn.Module):
    """`einsum(equation, x, kernel) + bias`, such as `'BTD,DNH->BTNH'`."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kernel_init: Init
    num_in: int = 1
    """How many leading dimensions of the kernel are contracted."""
    init_scale: float = 1.0
    bias: bool = False
    dtype: Any = jnp.float32
    out_dtype: Any = None
    """Of the sum of products, before any bias; none means `dtype`."""

    @nn.compact
    def __call__(self, equation: str, x: jax.Array) -> jax.Array:
        draw = initializer(self.kernel_init, self.num_in, self.init_scale)
        kernel = self.param("kernel", nn.with_logical_partitioning(draw, self.axes), self.shape)
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        y = jnp.einsum(equation, x, kernel, preferred_element_type=self.out_dtype)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.num_in :])
            y = y + self.param("bias", zeros, self.shape[self.num_in :]).astype(self.dtype)
        return y
