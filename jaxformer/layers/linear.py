"""The one projection layer: it owns kernel, bias, their dtypes and logical axes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import Init
from jaxformer.layers.initializers import initializer
from jaxformer.ops.quantized import Int8Matrix, matmul
from jaxformer.ops.transposed import OutputsFirst, product


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
        x, matrix = x.astype(self.dtype), stored_matrix(self, "kernel")
        if matrix is not None:
            y = self._stored_product(equation, x, matrix)
        else:
            draw = initializer(self.kernel_init, self.num_in, self.init_scale)
            kernel = self.param("kernel", nn.with_logical_partitioning(draw, self.axes), self.shape)
            y = self._product(equation, x, kernel.astype(self.dtype))
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.num_in :])
            y = y + self.param("bias", zeros, self.shape[self.num_in :]).astype(self.dtype)
        return y

    def _product(self, equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
        if self.num_in > 1:
            # As one dimension: XLA might otherwise transpose the kernel to suit the order in which x was made.
            x = x.reshape(*x.shape[: -self.num_in], -1)
            kernel = kernel.reshape(-1, *kernel.shape[self.num_in :])
            inputs, weights, outputs = re.split(",|->", equation)
            equation = f"{inputs[: 1 - self.num_in]},{inputs[-self.num_in]}{weights[self.num_in :]}->{outputs}"
        return jnp.einsum(equation, x, kernel, preferred_element_type=self.out_dtype)

    def _stored_product(self, equation: str, x: jax.Array, matrix: Int8Matrix | OutputsFirst) -> jax.Array:
        inputs, kernel, outputs = re.split(",|->", equation)
        natural, dtype = inputs[: -self.num_in] + kernel[self.num_in :], self.out_dtype or self.dtype
        if isinstance(matrix, OutputsFirst):
            y = product(x, matrix, self.num_in, dtype)
            y = y.reshape(*y.shape[:-1], *self.shape[self.num_in :])
        else:
            y = matmul(x, matrix, dtype)
        return y if natural == outputs else jnp.einsum(f"{natural}->{outputs}", y)


def stored_matrix(module: nn.Module, name: str) -> Int8Matrix | OutputsFirst | None:
    """The module's parameter if it has a form for decoding; none if it is a plain array, or not there yet."""
    if not module.has_variable("params", name):
        return None
    stored = module.get_variable("params", name)
    return stored if isinstance(stored, Int8Matrix | OutputsFirst) else None
