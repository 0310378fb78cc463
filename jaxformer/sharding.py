"""The device mesh and the one place where logical axes become mesh axes.

Layers name the dimensions of their parameters and activations (`embed`, `heads`, ...). `RULES` says over
which mesh axes each is split. An array dimension that does not divide, or a mesh axis that would be used
twice in one array, raises: nothing is replicated silently.
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
    "state": ("fsdp",),  # inputs of a recurrent kernel
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "position": (),
    "norm": (),  # scales and biases of norms are too small to be worth gathering
    "expert": ("expert",),
    "router": (),
    "layers": ("stage",),
}


def mesh_shape(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Sizes of all mesh axes, -1 filled in; raises if they do not use exactly all devices."""
    sizes = dict(config)
    fixed = math.prod(n for n in sizes.values() if n != -1)
    open_axis = next((axis for axis, n in sizes.items() if n == -1), None)
    if open_axis is not None and num_devices % fixed == 0:
        sizes[open_axis] = num_devices // fixed
    if math.prod(sizes.values()) != num_devices:
        shown = " x ".join(f"{axis}={n}" for axis, n in dict(config).items() if n != 1)
        raise UserError(
            f"mesh: {shown or 'all axes 1'} does not fit {num_devices} devices: "
            "make the product of the axes the number of devices, or set one axis to -1"
        )
    return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with every axis of `MESH_AXES`, size 1 where unused."""
    sizes = mesh_shape(config, len(devices))
    # Auto: XLA propagates shardings from parameters and constraints; make_mesh would default to Explicit.
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def batch_ways(sizes: Mapping[str, int]) -> int:
    """Into how many parts the rows of a batch are split on a mesh of these axis sizes."""
    return math.prod(sizes[axis] for axis in RULES["batch"])


def check_batch(config: RunConfig, num_devices: int) -> None:
    """The micro-batch must split evenly over the devices that hold different rows."""
    sizes = mesh_shape(config.mesh, num_devices)
    ways = batch_ways(sizes)
    micro = config.data.batch_size // config.train.accumulate
    if micro % ways:
        raise UserError(
            f"data.batch_size={config.data.batch_size} / train.accumulate={config.train.accumulate} = {micro} rows "
            f"do not divide over {ways} devices (mesh data={sizes['data']} x fsdp={sizes['fsdp']}): "
            f"make data.batch_size a multiple of {ways * config.train.accumulate}"
        )


def partition_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, name: str = "array"
) -> PartitionSpec:
    """The spec of one array with these logical axes."""
    if len(axes) != len(shape):
        raise ValueError(f"{name}: logical axes {axes} do not match shape {shape}")
    unknown = [axis for axis in axes if axis is not None and axis not in RULES]
    if unknown:
        raise ValueError(f"{name}: no rule for logical axis '{unknown[0]}'; there are: {', '.join(RULES)}")
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
                f"{name}: dimension '{axis}' of size {size} does not divide over mesh "
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
    """Shardings for optimizer state: a leaf whose path ends in a parameter's path and has its shape follows
    that parameter, a leaf of reduced shape or a scalar is replicated."""
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
    """Rows of a batch over the data axes; the host's rows become its part of the global array."""
    over = tuple(axis for axis in RULES["batch"] if mesh.shape[axis] > 1)
    return NamedSharding(mesh, PartitionSpec(over or None))


def global_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This host's rows as its part of the global arrays."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


def is_sharded() -> bool:
    """Whether the program being traced is for a mesh of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin the sharding of an activation; without a mesh in context, x unchanged."""
    if not is_sharded():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh, "activation"))


def path_name(path: tuple) -> str:
    """`decoder/blocks_0/attention/q/kernel` from a key path."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)
