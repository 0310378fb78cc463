"""The device mesh, and the mapping of logical axes to mesh axes.

Layers give the dimensions of their parameters and activations logical names (`embed`, `heads`, ...). `RULES` maps each
name to the mesh axes over which it is sharded. A dimension that is not divisible by its mesh axes, or a mesh axis that
would shard two dimensions of one array, is an error: nothing is replicated silently.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.config import MeshConfig, RunConfig
from jaxformer.errors import UserError
from jaxformer.typing import Batch, PyTree

MESH_AXES = tuple(MeshConfig.model_fields)

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
    sizes = dict(config)
    fixed = math.prod(n for n in sizes.values() if n != -1)
    open_axis = next((axis for axis, n in sizes.items() if n == -1), None)
    if open_axis is not None and num_devices % fixed == 0:
        sizes[open_axis] = num_devices // fixed
    if math.prod(sizes.values()) != num_devices:
        shown = " x ".join(f"{axis}={n}" for axis, n in dict(config).items() if n != 1)
        raise UserError(
            f"mesh: {shown or 'all axes 1'} does not fit {num_devices} devices: "
            "make the product of the axes equal to the number of devices, or set one axis to -1"
        )
    return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with every axis of `MESH_AXES`, size 1 where unused."""
    sizes = mesh_shape(config, len(devices))
    # Auto axes let XLA propagate shardings from parameters and constraints; the default of make_mesh is Explicit.
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


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
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, name: str = "array"
) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; raises if they do not fit the mesh."""
    if len(axes) != len(shape):
        raise ValueError(f"{name}: logical axes {axes} do not match shape {shape}")
    unknown = [axis for axis in axes if axis is not None and axis not in RULES]
    if unknown:
        raise ValueError(f"{name}: no rule for logical axis '{unknown[0]}'; known axes: {', '.join(RULES)}")
    entries: list[tuple[str, ...] | str | None] = []
    used: dict[str, str] = {}
    for axis, size in zip(axes, shape, strict=True):
        over = tuple(a for a in (RULES[axis] if axis is not None else ()) if mesh.shape[a] > 1)
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


def param_shardings(axes: PyTree, shapes: PyTree, mesh: Mesh) -> PyTree:
    """NamedShardings of a parameter tree, from trees of logical axes and of shapes."""

    def one(path, shape, names):
        spec = partition_spec(names, shape.shape, mesh, path_name(path))
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, shapes, axes)


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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: rows over the mesh axes of `batch`, other dimensions replicated."""
    over = tuple(axis for axis in RULES["batch"] if mesh.shape[axis] > 1)
    return NamedSharding(mesh, PartitionSpec(over or None))


def global_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Global arrays to which this host contributes its local rows."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


def is_sharded() -> bool:
    """Whether the mesh in context has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the sharding of an activation by its logical axes; a no-op on a single device."""
    if not is_sharded():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh, "activation"))


def path_name(path: tuple) -> str:
    """`decoder/blocks_0/attention/q/kernel` from a key path."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)
