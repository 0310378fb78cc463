"""Everything that exists only because CPUs prefer it: matmul shapes, weight layouts and compiler options.

Callers choose these by `runtime.platform == "cpu"`. Results are the same functions of the same inputs.
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
FINE_STEPS = 2 * INT8_MAX  # steps of the low part in one step of the high part


# ---------------------------------------------------------------- products
def flat_matmul(
    x: Float[Array, "*batch I"], kernel: Float[Array, "I *out"], dtype: jnp.dtype
) -> Float[Array, "*batch_and_out"]:
    """The product as one of two matrices.

    XLA's CPU compiler copies both operands of a weight gradient that contracts batch and length as two dimensions.
    Elsewhere the dimensions stay apart: a merged batch and length could not be sharded over both.
    """
    y_MO = jnp.dot(x.reshape(-1, x.shape[-1]), kernel.reshape(kernel.shape[0], -1), preferred_element_type=dtype)
    return y_MO.reshape(*x.shape[:-1], *kernel.shape[1:])


def int8_product(x_MI: Float[Array, "M I"], values_OI: Int[Array, "O I"]) -> Float[Array, "M O"]:
    """An exact integer product: a float product would first write all weights out as floats.

    Activations are split into a high and a low int8 part, with an error of at most 1 / (127 * 508) of the largest
    activation of a row, far below the error of the weights. Both parts are rows of one product, so that weights are
    read once.
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
    """A kernel with outputs before inputs: with a single row, a CPU reads the weights of a channel contiguously."""

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
    """The same parameters with the decoder's projections output-major, for decoding a single row."""

    def convert(leaf: Array, axes: Axes) -> Array | OutputMajor:
        dims = weight_dims(axes)
        # Experts are multiplied in groups of rows, which this layout would only slow down.
        if dims is None or "expert" in axes:
            return leaf
        order = (*dims.lead, *dims.outputs, *dims.inputs)
        return OutputMajor(jax.jit(lambda a: jnp.transpose(a, order))(leaf))

    return params | {"decoder": jax.tree.map(convert, params["decoder"], axes["decoder"])}


def untie_head(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same model with a copy of the token table, transposed, as its output projection.

    With few rows, a CPU multiplies several times faster by a matrix than by the transpose that a tied table is.
    """
    head = config.head
    if head is None or not head.tied:
        return config, params
    kernel_DV = jax.jit(jnp.transpose)(params["embedding"]["tokens"])
    own = params.get("head", {}) | {"output": {"kernel": kernel_DV}}
    config = config.model_copy(update={"head": head.model_copy(update={"tied": False})})
    return config, params | {"head": own}


# ---------------------------------------------------------------- compiler options
def token_loop_options(platform: str, num_rows: int, quantized: bool) -> frozenset[tuple[str, str]]:
    """Compiler options of a loop that decodes one token at a time for so many rows."""
    # XLA's newer matmul library for CPUs (YNNPACK) is slower than the older one for few rows, by a third at 8 and 32
    # rows, and faster from about 128 on. Only the newer one multiplies integers.
    if platform == "cpu" and num_rows <= FEW_ROWS and not quantized:
        return frozenset({("xla_cpu_experimental_ynn_fusion_type", "")})
    return frozenset()
