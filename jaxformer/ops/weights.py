"""Storage formats of weight matrices behind one protocol: plain arrays, embedding tables, int8 values with scales.

The logical axes of a parameter determine which of its dimensions are contracted (`ops.axes`), so a format depends
neither on parameter names nor on einsum equations. Layouts that only help on a CPU are in `ops.cpu`.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxformer.ops import cpu
from jaxformer.ops.axes import Axes, MatrixDims, inputs_first, weight_dims
from jaxformer.sharding import constrain, is_sharded, partition_spec, path_name
from jaxformer.typing import Array, Float, Int, Params, PyTree


@runtime_checkable
class Weight(Protocol):
    """A kernel with any number of lead dimensions, then input dimensions, then output dimensions."""

    def matmul(
        self, x: Float[Array, "*batch_and_in"], num_in: int, dtype: jnp.dtype, platform: str
    ) -> Float[Array, "*batch_and_out"]:
        """Contract the last `num_in` dimensions of x with a kernel without lead dimensions; the result has `dtype`."""

    def to_array(self, num_in: int, dtype: jnp.dtype, num_lead: int = 0) -> Float[Array, "*lead_and_in_and_out"]:
        """The kernel as a plain array, inputs before outputs."""


@runtime_checkable
class Table(Weight, Protocol):
    """An embedding table, which is also the kernel of a tied output head."""

    def take(self, ids: Int[Array, "*dims"], dtype: jnp.dtype) -> Float[Array, "*dims D"]:
        """The embedding vectors of these ids."""


# ---------------------------------------------------------------- plain arrays
class Dense(NamedTuple):
    """A plain array with inputs before outputs."""

    kernel: Float[Array, "*lead_and_in_and_out"]

    def matmul(self, x: Array, num_in: int, dtype: jnp.dtype, platform: str) -> Array:
        outputs = self.kernel.shape[num_in:]
        # Input dimensions are merged into one: XLA might otherwise transpose the kernel to match the layout of x.
        x = x.reshape(*x.shape[: x.ndim - num_in], -1)
        kernel = self.kernel.astype(x.dtype).reshape(-1, *outputs)
        # A mesh of CPU devices uses the same product as accelerators: flat ones made sharded steps deadlock in XLA.
        if platform == "cpu" and not is_sharded():
            return cpu.flat_matmul(x, kernel, dtype)
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)

    def to_array(self, num_in: int, dtype: jnp.dtype, num_lead: int = 0) -> Array:
        return self.kernel.astype(dtype)


class DenseTable(NamedTuple):
    """A plain embedding table."""

    rows_VD: Float[Array, "V D"]

    def matmul(self, x: Array, num_in: int, dtype: jnp.dtype, platform: str) -> Array:
        return jnp.einsum("...D,VD->...V", x, self.rows_VD.astype(x.dtype), preferred_element_type=dtype)

    def to_array(self, num_in: int, dtype: jnp.dtype, num_lead: int = 0) -> Array:
        return self.rows_VD.T.astype(dtype)

    def take(self, ids: Array, dtype: jnp.dtype) -> Array:
        if not is_sharded():
            return self.rows_VD[ids].astype(dtype)  # the gradient is then summed in the dtype of the table
        return gather_rows(self.rows_VD.astype(dtype), "vocab")[ids]


def gather_rows(table: Float[Array, "R *D"], axis: str) -> Float[Array, "R *D"]:
    """All-gather the vectors of a table before a lookup: looking up sharded vectors makes XLA reshard activations."""
    return constrain(table, axis, *[None] * (table.ndim - 1))


# ---------------------------------------------------------------- int8
class Int8Matrix(NamedTuple):
    """int8 values with one scale per output channel, stored with outputs before inputs so that channels are contiguous.

    The largest weight of a channel is stored as +-127. Activations keep their precision (see `cpu.int8_product`).
    """

    values: Int[Array, "*lead_and_out_and_in"]
    scales: Float[Array, "*lead_and_out"]

    def matmul(self, x: Array, num_in: int, dtype: jnp.dtype, platform: str) -> Array:
        batch, outputs = x.shape[: x.ndim - num_in], self.scales.shape
        width = self.values.size // self.scales.size
        product = cpu.int8_product if platform == "cpu" else _float_product
        y_MO = product(x.reshape(-1, width), self.values.reshape(-1, width)) * self.scales.reshape(-1)
        return y_MO.astype(dtype).reshape(*batch, *outputs)

    def to_array(self, num_in: int, dtype: jnp.dtype, num_lead: int = 0) -> Array:
        scales = jnp.expand_dims(self.scales, tuple(range(-num_in, 0)))
        return inputs_first((self.values * scales).astype(dtype), num_in, num_lead)

    def take(self, ids: Array, dtype: jnp.dtype) -> Array:
        values_VD, scales_V = gather_rows(self.values, "vocab"), gather_rows(self.scales, "vocab")
        return (values_VD[ids] * scales_V[ids][..., None]).astype(dtype)


def quantize(kernel: Float[Array, "*dims"], dims: MatrixDims) -> Int8Matrix:
    """Quantize symmetrically to [-127, 127], with one scale per output channel."""
    array = jnp.transpose(kernel.astype(jnp.float32), (*dims.lead, *dims.outputs, *dims.inputs))
    inputs = tuple(range(-len(dims.inputs), 0))
    scales = jnp.abs(array).max(axis=inputs) / cpu.INT8_MAX
    steps = jnp.expand_dims(jnp.where(scales > 0.0, scales, 1.0), inputs)
    return Int8Matrix(jnp.round(array / steps).astype(jnp.int8), scales)


def quantize_params(params: Params, axes: PyTree, mesh: Mesh | None = None) -> Params:
    """The parameters with every matrix but the routers quantized to int8, sharded according to its logical axes."""

    def convert(path: tuple, leaf: Array, axes: Axes) -> Array | Int8Matrix:
        dims = weight_dims(axes)
        if dims is None:
            return leaf
        shardings = None if mesh is None else _int8_shardings(leaf, axes, dims, mesh, path_name(path))
        return jax.jit(lambda a: quantize(a, dims), out_shardings=shardings)(leaf)

    return jax.tree_util.tree_map_with_path(convert, params, axes)


def _int8_shardings(leaf: Array, axes: Axes, dims: MatrixDims, mesh: Mesh, name: str) -> Int8Matrix:
    shapes = jax.eval_shape(lambda a: quantize(a, dims), leaf)
    scale_axes = tuple(axes[i] for i in (*dims.lead, *dims.outputs))
    value_axes = (*scale_axes, *(axes[i] for i in dims.inputs))
    specs = (
        partition_spec(value_axes, shapes.values.shape, mesh, name),
        partition_spec(scale_axes, shapes.scales.shape, mesh, name),
    )
    return Int8Matrix(*(NamedSharding(mesh, spec) for spec in specs))


def is_quantized(params: Params) -> bool:
    """Whether the matrices of a model are int8."""
    return isinstance(params["embedding"]["tokens"], Int8Matrix)


def _float_product(x_MI: Float[Array, "M I"], values_OI: Int[Array, "O I"]) -> Float[Array, "M O"]:
    """The product in floating point: accelerators fuse the conversion of the weights into it."""
    return jnp.einsum("MI,OI->MO", x_MI, values_OI.astype(x_MI.dtype), preferred_element_type=jnp.float32)
