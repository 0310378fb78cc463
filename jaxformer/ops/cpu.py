"""CPU optimisations: matmul shapes, weight layouts and compiler options.

Callers use them if `runtime.platform == "cpu"`. They change speed and rounding, not the function that is computed.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.ops.axes import Axes, inputs_first, weight_dims
from jaxformer.typing import Array, Float, Int, Params, PyTree

FEW_ROWS = 64
INT8_MAX = 127  # -128 is not used, so that the range is symmetric
FINE_STEPS = 2 * INT8_MAX  # steps of the low int8 part per step of the high part


# ---------------------------------------------------------------- products
def flat_matmul(
    x: Float[Array, "*batch I"], kernel: Float[Array, "I *out"], dtype: jnp.dtype
) -> Float[Array, "*batch_and_out"]:
    """The product of x and the kernel, each flattened to a matrix.

    XLA's CPU compiler copies both operands of a weight gradient that contracts batch and length as two dimensions.
    Other platforms keep the dimensions separate: a merged dimension could not be sharded over two mesh axes.
    """
    y_MO = jnp.dot(x.reshape(-1, x.shape[-1]), kernel.reshape(kernel.shape[0], -1), preferred_element_type=dtype)
    return y_MO.reshape(*x.shape[:-1], *kernel.shape[1:])


def int8_product(x_MI: Float[Array, "M I"], values_OI: Int[Array, "O I"]) -> Float[Array, "M O"]:
    """The product with int8 weights in integer arithmetic: a float product would first write the weights out as floats.

    Activations are split into a high and a low int8 part, with an error of at most 1 / (127 * 508) of the largest
    activation of a row, far below the rounding error of the weights. Both parts are rows of one product, so that
    weights are read once.
    """
    x_MI = x_MI.astype(jnp.float32)
    steps_M1 = jnp.abs(x_MI).max(axis=1, keepdims=True) / INT8_MAX
    scaled_MI = x_MI / jnp.where(steps_M1 > 0.0, steps_M1, 1.0)
    high_MI = jnp.round(scaled_MI)
    parts = jnp.concatenate([high_MI, jnp.round((scaled_MI - high_MI) * FINE_STEPS)]).astype(jnp.int8)
    products = jax.lax.dot_general(parts, values_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    high_MO, low_MO = jnp.split(products.astype(jnp.float32), 2)
    return (high_MO + low_MO / FINE_STEPS) * steps_M1


# ---------------------------------------------------------------- weights for decoding
class OutputMajor(NamedTuple):
    """A kernel stored with outputs before inputs, so that decoding a single row reads each channel contiguously."""

    values: Float[Array, "*lead_and_out_and_in"]

    def matmul(self, x: Array, num_in: int, dtype: jnp.dtype, platform: str) -> Array:
        batch, outputs = x.shape[: x.ndim - num_in], self.values.shape[: self.values.ndim - num_in]
        width = math.prod(x.shape[x.ndim - num_in :])
        x_MI, values_OI = x.reshape(*batch, width), self.values.reshape(-1, width).astype(x.dtype)
        y_MO = jnp.einsum("...I,OI->...O", x_MI, values_OI, preferred_element_type=dtype)
        return y_MO.reshape(*batch, *outputs)

    def to_array(self, num_in: int, dtype: jnp.dtype, num_lead: int = 0) -> Array:
        return inputs_first(self.values.astype(dtype), num_in, num_lead)


def output_major_params(params: Params, axes: PyTree) -> Params:
    """The same parameters with the decoder's kernels stored output-major, for decoding a single row."""

    def convert(leaf: Array, axes: Axes) -> Array | OutputMajor:
        dims = weight_dims(axes)
        # Experts are multiplied by groups of rows, which this layout would only slow down.
        if dims is None or "expert" in axes:
            return leaf
        order = (*dims.lead, *dims.outputs, *dims.inputs)
        return OutputMajor(jax.jit(lambda a: jnp.transpose(a, order))(leaf))

    return params | {"decoder": jax.tree.map(convert, params["decoder"], axes["decoder"])}


def untie_head(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same model with a transposed copy of the token embedding table as its output projection.

    With few rows, a CPU multiplies by this copy several times faster than by the transpose of the tied table.
    """
    head = config.head
    if head is None or not head.tied:
        return config, params
    kernel_DV = jax.jit(jnp.transpose)(params["embedding"]["tokens"])
    head_params = params.get("head", {}) | {"output": {"kernel": kernel_DV}}
    config = config.model_copy(update={"head": head.model_copy(update={"tied": False})})
    return config, params | {"head": head_params}


# ---------------------------------------------------------------- compiler options
def token_loop_options(platform: str, num_rows: int, quantized: bool) -> frozenset[tuple[str, str]]:
    """Compiler options for a decode loop over this number of rows."""
    # XLA's newer matmul library for CPUs (YNNPACK) is a third slower than the older one at 8 and 32 rows, and faster
    # from about 128 rows on. Only the newer one supports integers.
    if platform == "cpu" and num_rows <= FEW_ROWS and not quantized:
        return frozenset({("xla_cpu_experimental_ynn_fusion_type", "")})
    return frozenset()
