"""Summary of a config, computed without allocating arrays: parameters, shardings, bytes per device."""

import math
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

from jaxformer.config import MeshConfig, RunConfig
from jaxformer.layers import abstract_params
from jaxformer.sharding import path_name
from jaxformer.train.metrics import step_flops
from jaxformer.train.program import program_on_mesh
from jaxformer.typing import PyTree


@dataclass(frozen=True)
class ParameterRow:
    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sharding: str
    bytes_per_device: int


@dataclass(frozen=True)
class Summary:
    parameters: list[ParameterRow]
    num_params: int
    param_bytes: int
    """Bytes of the parameters on each device."""
    optimizer_bytes: int
    """Bytes of the optimizer state on each device."""
    total_bytes: int
    """Bytes of the whole train state on each device."""
    step_flops: float
    mesh: dict[str, int]


def summarize(config: RunConfig) -> Summary:
    """Compute the summary from `eval_shape` and an abstract mesh, which takes seconds for any model size."""
    program = program_on_mesh(config, _abstract_mesh(config.mesh), "cpu")
    state, axes = program.abstract_state, abstract_params(config.model)[1]
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract_params)
    rows = [
        ParameterRow(path_name(path), leaf.shape, name, str(tuple(leaf.sharding.spec)), _shard_bytes(leaf))
        for (path, leaf), name in zip(leaves, names, strict=True)
    ]
    return Summary(
        parameters=rows,
        num_params=sum(math.prod(row.shape) for row in rows),
        param_bytes=_tree_bytes((state.params, state.frozen)),
        optimizer_bytes=_tree_bytes(state.opt_state),
        total_bytes=_tree_bytes(state),
        step_flops=step_flops(config),
        mesh=dict(program.mesh.shape),
    )


def show(config: RunConfig, console: Console) -> None:
    """Print the resolved config, the parameter table and totals."""
    summary = summarize(config)
    if not console.is_terminal:
        console.width = 200  # in a file or pipe, do not wrap long paths
    console.print_json(config.model_dump_json())
    table = Table("path", "shape", "logical axes", "sharding", "bytes per device", box=None, header_style="bold")
    for row in summary.parameters:
        axes = ", ".join(axis or "-" for axis in row.axes)
        shape = " x ".join(map(str, row.shape))
        table.add_row(row.path, shape, axes, row.sharding, f"{row.bytes_per_device:,}")
    console.print(table)
    used = ", ".join(f"{axis}={size}" for axis, size in summary.mesh.items() if size > 1)
    console.print(
        f"{config.model.shape}: {summary.num_params:,} parameters; mesh {used or 'of one device'}\n"
        f"bytes per device: parameters {summary.param_bytes:,}, optimizer {summary.optimizer_bytes:,}, "
        f"train state {summary.total_bytes:,} (without activations)\n"
        f"model FLOPs per step: {summary.step_flops:.3e}",
        soft_wrap=True,
    )


def _abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The configured mesh, whether or not so many devices are attached; an axis of -1 uses the attached devices."""
    sizes = dict(config)
    fixed = math.prod(n for n in sizes.values() if n != -1)
    sizes = {axis: max(1, jax.device_count() // fixed) if n == -1 else n for axis, n in sizes.items()}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _tree_bytes(tree: PyTree) -> int:
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree))
