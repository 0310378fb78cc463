"""Weights of which every device holds a shard along the mesh axis `fsdp`, and the collectives that use them.

Inside `sharding.on_devices`, a matrix is all-gathered where it is used, and its gradient is reduce-scattered into
the shape of the shard. Both go along one axis of the TPU's torus after another: over several at once, the TPU compiler
turns the reduce-scatter into an all-reduce of the whole matrix.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxformer.ops.axes import Axes, weight_dims
from jaxformer.ops.weights import Dense, DenseTable
from jaxformer.sharding import RULES, on_shards, torus_factors
from jaxformer.typing import Array, Float, Int, Params, PyTree

AXIS = "fsdp"
TABLE_AXES = ("vocab", "embed")


@dataclass(frozen=True)
class Fsdp:
    """How weights are sharded over the mesh axis `fsdp`; static under jit."""

    factors: tuple[int, ...]
    """Sizes of the torus axes that the mesh axis spans, outermost first (`sharding.torus_factors`)."""
    regather: bool = False
    """Whether the backward pass gathers weights again; with rematerialisation of whole blocks, it does so anyway."""
    gathers_head_once: bool = False
    """Whether the loss gathers the whole output matrix at once instead of one chunk at a time, twice."""

    @property
    def size(self) -> int:
        return math.prod(self.factors)


def fsdp_of(mesh: Mesh | AbstractMesh, platform: str, remat: str) -> Fsdp | None:
    """How weights are sharded on a mesh; None if its axis `fsdp` has one device."""
    if mesh.shape[AXIS] == 1:
        return None
    # GPUs have the memory for the whole output matrix, and gathering it twice would cost them more time.
    return Fsdp(torus_factors(mesh, AXIS), regather=remat == "none", gathers_head_once=platform == "gpu")


# ---------------------------------------------------------------- collectives
def all_gather(shard: Float[Array, "d *dims"], fsdp: Fsdp) -> Float[Array, "D *dims"]:
    """The whole array from shards of its leading dimension."""
    for groups in reversed(_axis_groups(fsdp.factors)):
        shard = jax.lax.all_gather(shard, AXIS, axis_index_groups=groups, tiled=True)
    return shard


def reduce_scatter(array: Float[Array, "D *dims"], fsdp: Fsdp) -> Float[Array, "d *dims"]:
    """This device's shard of the leading dimension of the sum over devices."""
    # Shards are a separate dimension: the TPU compiler may store the rows of a matrix last, and then all-reduces.
    parts = array.reshape(*fsdp.factors, -1, *array.shape[1:])
    for groups in _axis_groups(fsdp.factors):
        parts = jax.lax.psum_scatter(parts, AXIS, axis_index_groups=groups, tiled=False)
    return parts


def _axis_groups(factors: tuple[int, ...]) -> list[list[list[int]] | None]:
    """For each factor, the groups of devices that differ only in their position along it."""
    if len(factors) == 1:
        return [None]
    index = np.arange(math.prod(factors)).reshape(factors)
    return [np.moveaxis(index, i, -1).reshape(-1, n).tolist() for i, n in enumerate(factors)]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(shard: Float[Array, "*shard_dims"], axes: Axes, dtype: jnp.dtype, fsdp: Fsdp) -> Float[Array, "*dims"]:
    """The array with these logical axes in `dtype`; its gradient is summed over devices in `dtype` and scattered."""
    return _along_shards(partial(all_gather, fsdp=fsdp), shard.astype(dtype), axes)


def _gather_forward(shard, axes, dtype, fsdp):
    return gather(shard, axes, dtype, fsdp), jnp.zeros((0,), shard.dtype)


def _gather_backward(axes, dtype, fsdp, like, d_whole):
    return (_along_shards(partial(reduce_scatter, fsdp=fsdp), d_whole, axes).astype(like.dtype),)


def _along_shards(collective: Callable[[Array], Array], array: Array, axes: Axes) -> Array:
    """Apply a collective to the dimension that `fsdp` shards.

    Over the mesh axes that are left to XLA, each device does so with its own part: XLA would gather the array over them
    before a collective that it did not write.
    """
    (dim,) = _sharded_dims(axes)

    def on_part(part: Array) -> Array:
        return jnp.moveaxis(collective(jnp.moveaxis(part, dim, 0)), 0, dim)

    return on_shards(on_part, in_axes=(axes,), out_axes=axes)(array)


gather.defvjp(_gather_forward, _gather_backward)


# ---------------------------------------------------------------- matrices
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedKernel:
    """A plain matrix with inputs before outputs, sharded along one dimension."""

    shard: Float[Array, "*lead_and_in_and_out"]
    stacked_axes: Axes = field(metadata={"static": True})
    """Logical axes, with those of all stacked dimensions, which `shard` may be a slice of."""
    fsdp: Fsdp = field(metadata={"static": True})

    @property
    def axes(self) -> Axes:
        return self.stacked_axes[len(self.stacked_axes) - self.shard.ndim :]

    def matmul(self, x: Array, num_in: int, dtype: jnp.dtype, platform: str) -> Array:
        def product(x: Array, shard: Array) -> Array:
            return Dense(gather(shard, self.axes, x.dtype, self.fsdp)).matmul(x, num_in, dtype, platform)

        return (jax.checkpoint(product) if self.fsdp.regather else product)(x, self.shard)

    def to_array(self, num_in: int, dtype: jnp.dtype, num_lead: int = 0) -> Array:
        return gather(self.shard, self.axes, dtype, self.fsdp)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedTable:
    """A plain embedding table, sharded along its channels."""

    shard_VD: Float[Array, "V d"]
    fsdp: Fsdp = field(metadata={"static": True})

    def matmul(self, x: Array, num_in: int, dtype: jnp.dtype, platform: str) -> Array:
        return DenseTable(gather(self.shard_VD, TABLE_AXES, x.dtype, self.fsdp)).matmul(x, num_in, dtype, platform)

    def to_array(self, num_in: int, dtype: jnp.dtype, num_lead: int = 0) -> Array:
        return gather(self.shard_VD, TABLE_AXES, dtype, self.fsdp).T

    def take(self, ids: Array, dtype: jnp.dtype) -> Array:
        """Every device looks up its channels for the tokens of all devices; the table is never gathered."""
        return _lookup(self.shard_VD, ids.reshape(-1), dtype, self.fsdp).reshape(*ids.shape, -1)


Sharded = ShardedKernel | ShardedTable


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(
    shard_VD: Float[Array, "V d"], ids_M: Int[Array, " M"], dtype: jnp.dtype, fsdp: Fsdp
) -> Float[Array, "M D"]:
    return _lookup_forward(shard_VD, ids_M, dtype, fsdp)[0]


def _lookup_forward(shard_VD, ids_M, dtype, fsdp):
    ids_SM = jax.lax.all_gather(ids_M, AXIS)
    # Channels come before tokens, because arrays with few channels in the last dimension are padded on a TPU.
    parts_SDM = jax.lax.map(lambda ids_M: shard_VD[ids_M].astype(dtype).T, ids_SM)
    parts_SDM = jax.lax.all_to_all(parts_SDM, AXIS, split_axis=0, concat_axis=0, tiled=True)
    return parts_SDM.reshape(-1, len(ids_M)).T, (shard_VD, ids_SM)


def _lookup_backward(dtype, fsdp, saved, d_x_MD):
    shard_VD, ids_SM = saved
    d_parts_SDM = d_x_MD.T.reshape(fsdp.size, -1, d_x_MD.shape[0])
    d_parts_SDM = jax.lax.all_to_all(d_parts_SDM, AXIS, split_axis=0, concat_axis=0, tiled=True)

    def add(d_shard_VD, part):
        ids_M, d_DM = part
        return d_shard_VD.at[ids_M].add(d_DM.T.astype(d_shard_VD.dtype)), None

    return jax.lax.scan(add, jnp.zeros_like(shard_VD), (ids_SM, d_parts_SDM))[0], None


_lookup.defvjp(_lookup_forward, _lookup_backward)


# ---------------------------------------------------------------- parameter trees
def shard_weights(params: Params, axes: PyTree, fsdp: Fsdp | None) -> Params:
    """The parameters of a model from the shards of one device, inside `on_devices`.

    Matrices become weights that are gathered where they are used. The other sharded parameters, such as biases and
    position tables, are small and gathered at once. `fsdp=None` returns the parameters as they are.
    """
    if fsdp is None:
        return params
    return jax.tree.map(lambda leaf, names: _shard(leaf, names, fsdp), params, axes)


def _shard(leaf: Array, axes: Axes, fsdp: Fsdp) -> Array | Sharded:
    dims = _sharded_dims(axes)
    if not dims:
        return leaf
    if weight_dims(axes) is None:
        return gather(leaf, axes, leaf.dtype, fsdp)
    return ShardedTable(leaf, fsdp) if axes == TABLE_AXES else ShardedKernel(leaf, axes, fsdp)


def _sharded_dims(axes: Sequence[str | None]) -> list[int]:
    return [i for i, axis in enumerate(axes) if axis is not None and AXIS in RULES[axis]]


def gather_weights(params: Params) -> Params:
    """The parameters with every weight of `shard_weights` as a whole array, for models that use arrays directly."""

    def whole(leaf: Array | Sharded) -> Array:
        if isinstance(leaf, ShardedTable):
            return gather(leaf.shard_VD, TABLE_AXES, leaf.shard_VD.dtype, leaf.fsdp)
        return gather(leaf.shard, leaf.axes, leaf.shard.dtype, leaf.fsdp) if isinstance(leaf, ShardedKernel) else leaf

    return jax.tree.map(whole, params, is_leaf=lambda leaf: isinstance(leaf, Sharded))
