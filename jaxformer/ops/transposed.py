"""Kernels with their outputs first: a CPU multiplies a single row faster with the weights of a channel side by side."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxformer.typing import Array, Float


class OutputsFirst(NamedTuple):
    values_OI: Float[Array, "O I"]


def outputs_first(kernel: Float[Array, "*in_and_out"], num_in: int, num_lead: int = 0) -> OutputsFirst:
    """From a kernel with `num_in` contracted dimensions, after `num_lead` that only count kernels, then the outputs."""
    lead, inputs = kernel.shape[:num_lead], math.prod(kernel.shape[num_lead : num_lead + num_in])
    return OutputsFirst(jnp.swapaxes(kernel.reshape(*lead, inputs, -1), -1, -2))


def product(
    x: Float[Array, "*lead_and_in"], matrix: OutputsFirst, num_in: int, dtype: jnp.dtype
) -> Float[Array, "*lead O"]:
    """x times the kernel, contracted over the `num_in` trailing dimensions of x; outputs as one dimension."""
    flat = x.reshape(*x.shape[: x.ndim - num_in], matrix.values_OI.shape[1])
    return jnp.einsum("...I,OI->...O", flat, matrix.values_OI.astype(x.dtype), preferred_element_type=dtype)
