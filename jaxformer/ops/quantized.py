"""Matrices as whole numbers of 8 bits with one scale an output channel, and products with them.

The largest weight of a channel is 127 of its units. Activations stay what they are: only weights lose digits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.typing import Array, Float, Int

LARGEST = 127  # -128 is left out, so that signs are alike
FINE = 2 * LARGEST  # steps of the second digit in one of the first


class Int8Matrix(NamedTuple):
    """Output dimensions first: a product then reads the weights of a channel one after the other."""

    values: Int[Array, "*out_and_in"]
    scales: Float[Array, "*out"]

    @property
    def num_in(self) -> int:
        return self.values.ndim - self.scales.ndim


def quantize(kernel: Float[Array, "*in_and_out"], num_in: int, num_lead: int = 0) -> Int8Matrix:
    """From a kernel with `num_in` contracted dimensions, after `num_lead` that only count kernels, then the outputs."""
    inputs = tuple(range(num_lead, num_lead + num_in))
    moved = jnp.moveaxis(kernel.astype(jnp.float32), inputs, range(-num_in, 0))
    scales = jnp.abs(moved).max(axis=tuple(range(-num_in, 0))) / LARGEST
    units = jnp.expand_dims(jnp.where(scales > 0.0, scales, 1.0), tuple(range(-num_in, 0)))
    return Int8Matrix(jnp.round(moved / units).astype(jnp.int8), scales)


def dequantized(matrix: Int8Matrix, dtype: jnp.dtype) -> Float[Array, "*out_and_in"]:
    scales = jnp.expand_dims(matrix.scales, tuple(range(-matrix.num_in, 0)))
    return (matrix.values * scales).astype(dtype)


def matmul(x: Float[Array, "*lead_and_in"], matrix: Int8Matrix, dtype: jnp.dtype) -> Float[Array, "*lead_and_out"]:
    """x times the matrix, contracted over the trailing dimensions of x."""
    num_in, outs = matrix.num_in, matrix.scales.shape
    lead, width = x.shape[: x.ndim - num_in], matrix.values.size // matrix.scales.size
    x_MI, values_OI = x.reshape(-1, width), matrix.values.reshape(-1, width)
    scales_O = matrix.scales.reshape(-1)
    product = _whole_product if jax.default_backend() == "cpu" else _float_product
    return (product(x_MI, values_OI) * scales_O).astype(dtype).reshape(*lead, *outs)


def _float_product(x_MI: Float[Array, "M I"], values_OI: Int[Array, "O I"]) -> Float[Array, "M O"]:
    """The conversion is part of the product on accelerators."""
    return jnp.einsum("MI,OI->MO", x_MI, values_OI.astype(x_MI.dtype), preferred_element_type=jnp.float32)


def _whole_product(x_MI: Float[Array, "M I"], values_OI: Int[Array, "O I"]) -> Float[Array, "M O"]:
    """Products of whole numbers, exactly summed: a CPU would write out converted weights before a float product.

    Activations go in as two digits, coarse and fine: off by at most 1 / (127 * 508) of the largest of a row, far below
    what the weights lost. The two are rows of one product, so weights are read once.
    """
    x_MI = x_MI.astype(jnp.float32)
    units_M1 = jnp.abs(x_MI).max(axis=1, keepdims=True) / LARGEST
    scaled_MI = x_MI / jnp.where(units_M1 > 0.0, units_M1, 1.0)
    coarse_MI = jnp.round(scaled_MI)
    digits = jnp.concatenate([coarse_MI, jnp.round((scaled_MI - coarse_MI) * FINE)]).astype(jnp.int8)
    products = jax.lax.dot_general(digits, values_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    coarse_MO, fine_MO = jnp.split(products.astype(jnp.float32), 2)
    return (coarse_MO + fine_MO / FINE) * units_M1
