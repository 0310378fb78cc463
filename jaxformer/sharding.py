"""The device mesh, and the mapping of logical axes to mesh axes.

Layers give the dimensions of their parameters and activations logical names (`embed`, `heads`, ...). `RULES` maps each
name to the mesh axes over which it is sharded. A dimension that is not divisible by its mesh axes, or a mesh axis that
would shard two dimensions of one array, is an error: nothing is replicated silently.

Training and evaluation run on the shards of each device (`on_devices`), so that the collectives over `data` and `fsdp`
are those written in `ops.sharded`; only the axes in `AUTO_AXES` are left to XLA. Decoding leaves all axes to XLA.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.config import MESH_AXES as MESH_AXES, MeshConfig, RunConfig
from jaxformer.errors import UserError
from jaxformer.typing import Batch, PyTree

AUTO_AXES = ("tensor",)
"""Mesh axes over which XLA partitions the train step: activations and kernels are split over them by constraints."""

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": ("context",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "state": ("fsdp",),  # the input dimension of a recurrent kernel
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "position": (),
    "norm": (),  # scales and biases of norms are too small to be worth sharding
    "expert": ("expert",),
    "router": (),
    "layers": ("stage",),
}


def mesh_shape(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Sizes of all mesh axes, with -1 resolved; raises if their product is not the number of devices."""
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    requested = dict(sizes)
    fixed = math.prod(n for n in sizes.values() if n != -1)
    open_axis = next((axis for axis, n in sizes.items() if n == -1), None)
    if open_axis is not None and num_devices % fixed == 0:
        sizes[open_axis] = num_devices // fixed
    if math.prod(sizes.values()) != num_devices:
        shown = " x ".join(f"{axis}={n}" for axis, n in requested.items() if n != 1)
        raise UserError(
            f"mesh: {shown or 'all axes 1'} does not fit {num_devices} devices: "
            "make the product of the axes equal to the number of devices, or set one axis to -1"
        )
    return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with every axis of `MESH_AXES`, size 1 where unused.

    TPU devices are placed in the order of their coordinates in the torus, so that each mesh axis spans whole torus
    axes, or equal parts of them, as `torus_factors` reports.
    """
    sizes = mesh_shape(config, len(devices))
    # Auto axes let XLA propagate shardings from parameters and constraints; the default of make_mesh is Explicit.
    types = (AxisType.Auto,) * len(sizes)
    if devices[0].platform == "tpu":
        grid = np.array(sorted(devices, key=_coordinates)).reshape(tuple(sizes.values()))
        return Mesh(grid, tuple(sizes), axis_types=types)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def torus_factors(mesh: Mesh | AbstractMesh, axis: str) -> tuple[int, ...]:
    """The sizes of the torus axes that a mesh axis spans, outermost first; one factor where no torus is known.

    Index i on the mesh axis is the mixed-radix number of the positions on these torus axes.
    """
    size = mesh.shape[axis]
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "tpu":
        return (size,)
    coordinates = np.array([_coordinates(device) for device in mesh.devices.flat])
    dims = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
    factors = split_torus(tuple(dims), tuple(mesh.shape.values())) if math.prod(dims) == mesh.size else None
    return (size,) if factors is None else factors[mesh.axis_names.index(axis)]


def split_torus(torus: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The parts of torus axes that each mesh axis covers, if devices are numbered along both, last axis fastest.

    None if a mesh axis does not cover equal parts of torus axes.
    """
    remaining, factors = [int(n) for n in torus if n > 1], []
    for size in reversed(sizes):
        parts: list[int] = []
        while size > 1:
            part = math.gcd(size, remaining[-1])
            if part == 1 or (part < remaining[-1] and part < size):
                return None
            parts.insert(0, part)
            size //= part
            remaining[-1] //= part
            if remaining[-1] == 1:
                remaining.pop()
        factors.insert(0, tuple(parts) or (1,))
    return factors


def _coordinates(device: jax.Device) -> tuple[int, ...]:
    """The position of a TPU core in its slice."""
    return (*device.coords, device.core_on_chip)


def batch_ways(sizes: Mapping[str, int]) -> int:
    """Number of shards of the batch dimension on a mesh with these axis sizes."""
    return math.prod(sizes[axis] for axis in RULES["batch"])


def check_batch(config: RunConfig, num_devices: int) -> None:
    """Raise if the rows of a micro-batch do not divide evenly over the mesh axes that shard the batch."""
    sizes = mesh_shape(config.mesh, num_devices)
    ways = batch_ways(sizes)
    micro = config.data.batch_size // config.train.accumulate
    if micro % ways:
        raise UserError(
            f"data.batch_size={config.data.batch_size} / train.accumulate={config.train.accumulate} = {micro} rows "
            f"do not divide evenly into {ways} shards (mesh data={sizes['data']} x fsdp={sizes['fsdp']}): "
            f"make data.batch_size a multiple of {ways * config.train.accumulate}"
        )


def partition_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, name: str = "array"
) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; raises if they do not fit the mesh.

    Inside `on_devices`, arrays are shards, and only the mesh axes that are left to XLA appear.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name}: logical axes {axes} do not match shape {shape}")
    unknown = [axis for axis in axes if axis is not None and axis not in RULES]
    if unknown:
        raise ValueError(f"{name}: no rule for logical axis '{unknown[0]}'; known axes: {', '.join(RULES)}")
    entries: list[tuple[str, ...] | str | None] = []
    used: dict[str, str] = {}
    for axis, size in zip(axes, shape, strict=True):
        over = _mesh_axes(axis, mesh)
        for mesh_axis in over:
            if mesh_axis in used:
                raise UserError(
                    f"{name}: mesh axis '{mesh_axis}' would split both '{used[mesh_axis]}' and '{axis}' "
                    f"of shape {shape}: change sharding.RULES for one of them"
                )
            used[mesh_axis] = axis
        ways = math.prod(mesh.shape[a] for a in over)
        if size % ways:
            raise UserError(
                f"{name}: dimension '{axis}' of size {size} is not divisible by mesh "
                f"{' x '.join(f'{a}={mesh.shape[a]}' for a in over)}: change the size or the mesh"
            )
        entries.append(over[0] if len(over) == 1 else (over or None))
    return PartitionSpec(*entries)


def param_specs(axes: PyTree, shapes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """PartitionSpecs of a parameter tree, from trees of logical axes and of shapes."""

    def one(path, shape, names):
        return partition_spec(names, shape.shape, mesh, path_name(path))

    return jax.tree_util.tree_map_with_path(one, shapes, axes)


def param_shardings(axes: PyTree, shapes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """NamedShardings of a parameter tree, from trees of logical axes and of shapes."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(axes, shapes, mesh), is_leaf=_is_spec)


def like_params(tree: PyTree, params: PyTree, shardings: PyTree, mesh: Mesh) -> PyTree:
    """Shardings of the optimizer state.

    A leaf whose path ends in the path of a parameter and that has the same shape is sharded like the parameter. All
    others, such as scalars and factored moments, are replicated.
    """
    known = {
        path_name(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }
    replicated = NamedSharding(mesh, PartitionSpec())

    def one(path, leaf):
        parts = path_name(path).split("/")
        for start in range(len(parts)):
            shape, sharding = known.get("/".join(parts[start:]), (None, None))
            if shape == leaf.shape:
                return sharding
        return replicated

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The PartitionSpec of a batch: rows over the mesh axes of `batch`, other dimensions replicated."""
    return PartitionSpec(_mesh_axes("batch", mesh) or None)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, batch_spec(mesh))


def global_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Global arrays to which this host contributes its local rows."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


# ---------------------------------------------------------------- computing on shards
def on_devices(function: Callable, mesh: Mesh | AbstractMesh, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """`function` of the shards that one device holds, instead of whole arrays.

    Inside, collectives over all mesh axes but `AUTO_AXES` are written by hand (see `ops.sharded`), and functions of
    this module refer only to the remaining axes. On a mesh of one device, this is `function` itself.

    Args:
      in_specs: PartitionSpecs of the arguments, as for `jax.shard_map`; axes in `AUTO_AXES` are ignored.
    """
    if mesh.size == 1:
        return function
    manual = {axis for axis in mesh.axis_names if axis not in AUTO_AXES or mesh.shape[axis] == 1}
    specs = [
        jax.tree.map(lambda spec: _only_axes(spec, manual), each, is_leaf=_is_spec) for each in (in_specs, out_specs)
    ]
    return jax.shard_map(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1], axis_names=manual, check_vma=False)


def on_shards(function: Callable, in_axes: Sequence[tuple[str | None, ...]], out_axes: PyTree) -> Callable:
    """`function` of the shards of arrays with these logical axes, for kernels that XLA cannot partition.

    It maps over the mesh axes that are left to XLA; if none has several devices, this is `function` itself.

    Args:
      in_axes: logical axes of each argument, which is an array or None.
      out_axes: logical axes of the result, or a tuple of them if there are several.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _auto_axes(mesh):
        return function
    over = set(mesh.axis_names) - set(mesh.manual_axes)
    in_specs = tuple(_spec(axes, mesh) for axes in in_axes)
    several = bool(out_axes) and isinstance(out_axes[0], tuple)
    out_specs = tuple(_spec(axes, mesh) for axes in out_axes) if several else _spec(out_axes, mesh)
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=over, check_vma=False)


def sum_devices(x: PyTree, over: Sequence[str] = RULES["batch"]) -> PyTree:
    """Inside `on_devices`: the sum over the devices along these mesh axes; elsewhere, `x` itself."""
    axes = tuple(axis for axis in over if axis in _manual_axes())
    return jax.lax.psum(x, axes) if axes else x


def first_row(num_rows: int) -> jax.Array | int:
    """Inside `on_devices`: the index in the whole batch of the first of this device's rows; elsewhere 0."""
    axes = tuple(axis for axis in RULES["batch"] if axis in _manual_axes())
    return jax.lax.axis_index(axes) * num_rows if axes else 0


def is_sharded() -> bool:
    """Whether XLA partitions arrays over several devices of the mesh in context."""
    return bool(_auto_axes(jax.sharding.get_abstract_mesh()))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of an activation by its logical axes; a no-op where XLA does not partition."""
    if not is_sharded():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh, "activation"))


def _auto_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """The mesh axes of more than one device that are left to XLA."""
    if mesh.empty:
        return ()
    return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in mesh.manual_axes)


def _manual_axes() -> tuple[str, ...]:
    """The mesh axes of more than one device for which the code in context writes its own collectives."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)


def _mesh_axes(axis: str | None, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes that shard a logical axis."""
    manual = mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()
    return tuple(a for a in (RULES[axis] if axis is not None else ()) if mesh.shape[a] > 1 and a not in manual)


def _spec(axes: tuple[str | None, ...], mesh: AbstractMesh) -> PartitionSpec:
    return PartitionSpec(*(_mesh_axes(axis, mesh) or None for axis in axes))


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _only_axes(spec: PartitionSpec, axes: set[str]) -> PartitionSpec:
    """The spec without the mesh axes that are not in `axes`."""
    entries = [(entry,) if isinstance(entry, str) else (entry or ()) for entry in spec]
    return PartitionSpec(*(tuple(a for a in entry if a in axes) or None for entry in entries))


def path_name(path: tuple) -> str:
    """`decoder/blocks_0/attention/q/kernel` from a key path."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)
