"""`jaxformer show`: prints what a config, a run directory or a Hugging Face directory contains.

Parameters, shardings and bytes per device are computed without allocating arrays, in seconds for any model.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

from jaxformer.checkpoint import Checkpoints, abstract_like
from jaxformer.config import MESH_AXES, MeshConfig, RunConfig, apply_overrides
from jaxformer.convert.directory import HuggingFaceDirectory, is_hugging_face
from jaxformer.convert.hub import local_directory
from jaxformer.data.tokenizer import find_tokenizer
from jaxformer.errors import UserError
from jaxformer.evaluate.report import format_metrics
from jaxformer.layers import abstract_params
from jaxformer.rundir import RunDir
from jaxformer.sharding import param_shardings, path_name
from jaxformer.train.metrics import step_flops
from jaxformer.train.program import program_on_mesh
from jaxformer.train.start import load_config
from jaxformer.typing import PyTree


@dataclass(frozen=True)
class ParameterRow:
    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sharding: str
    bytes_per_device: int


@dataclass(frozen=True)
class TrainSummary:
    """What training needs on each device besides the parameters."""

    optimizer_bytes: int
    total_bytes: int
    """Bytes of the whole train state."""
    step_flops: float


@dataclass(frozen=True)
class Summary:
    parameters: list[ParameterRow]
    mesh: dict[str, int]
    train: TrainSummary | None
    """None if the config has no data, so that it cannot train."""

    @property
    def num_params(self) -> int:
        return sum(math.prod(row.shape) for row in self.parameters)

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters on each device."""
        return sum(row.bytes_per_device for row in self.parameters)


def show(path: str | Path, overrides: Sequence[str], console: Console) -> None:
    """Print the resolved config, the parameter table, totals, and what the files of a directory hold."""
    config, facts = _read(path, overrides)
    if not console.is_terminal:
        console.width = 200  # in a file or pipe, do not wrap long paths
    console.print_json(config.model_dump_json())
    summary = summarize(config)
    table = Table("path", "shape", "logical axes", "sharding", "bytes per device", box=None, header_style="bold")
    for row in summary.parameters:
        axes = ", ".join(axis or "-" for axis in row.axes)
        shape = " x ".join(map(str, row.shape))
        table.add_row(row.path, shape, axes, row.sharding, f"{row.bytes_per_device:,}")
    console.print(table)
    for line in (*_totals(config, summary), *facts):
        console.print(line, soft_wrap=True, markup=False)


def summarize(config: RunConfig) -> Summary:
    """Compute the summary from `eval_shape` and an abstract mesh."""
    mesh = _abstract_mesh(config.mesh)
    shapes, axes = abstract_params(config.model)
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(abstract_like(shapes, param_shardings(axes, shapes, mesh)))
    rows = [
        ParameterRow(path_name(path), leaf.shape, name, str(tuple(leaf.sharding.spec)), _shard_bytes(leaf))
        for (path, leaf), name in zip(leaves, names, strict=True)
    ]
    return Summary(rows, dict(mesh.shape), _summarize_training(config, mesh))


def _summarize_training(config: RunConfig, mesh: AbstractMesh) -> TrainSummary | None:
    if config.data is None:
        return None
    state = program_on_mesh(config, mesh, "cpu").abstract_state
    return TrainSummary(_tree_bytes(state.opt_state), _tree_bytes(state), step_flops(config))


def _totals(config: RunConfig, summary: Summary) -> list[str]:
    used = ", ".join(f"{axis}={size}" for axis, size in summary.mesh.items() if size > 1)
    size = f"{config.model.shape}: {summary.num_params:,} parameters; mesh {used or 'of one device'}"
    params = f"bytes per device: parameters {summary.param_bytes:,}"
    if summary.train is None:
        return [size, params]
    return [
        size,
        f"{params}, optimizer {summary.train.optimizer_bytes:,}, "
        f"train state {summary.train.total_bytes:,} (without activations)",
        f"model FLOPs per step: {summary.train.step_flops:.3e}",
    ]


# ---------------------------------------------------------------- configs and directories
def _read(path: str | Path, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The config of a Python file, a run directory or a Hugging Face directory, and lines about the directory."""
    if str(path).startswith("hf:") or Path(path).is_dir():
        directory = local_directory(path)
        if is_hugging_face(directory):
            files = HuggingFaceDirectory(directory)
            return apply_overrides(RunConfig(model=files.model), overrides), _describe_hugging_face(files)
        return apply_overrides(RunDir(directory).read_config(), overrides), _describe_run(directory)
    if not Path(path).exists():
        raise UserError(f"'{path}' does not exist: name a Python config, a run directory or a Hugging Face directory")
    return load_config(path, overrides), []


def _describe_run(directory: Path) -> list[str]:
    run_dir = RunDir(directory)
    steps = []
    if run_dir.checkpoints.exists():
        with Checkpoints(run_dir) as checkpoints:
            steps = checkpoints.steps
    kept = f"steps {', '.join(map(str, steps))}" if steps else "none"
    lines = [f"checkpoints: {kept}", _describe_tokenizer(directory)]
    if latest := _latest_metrics(run_dir):
        values = (f"{name} {value:.4g}" for name, value in latest.items() if isinstance(value, int | float))
        lines.append(f"latest metrics: {', '.join(values)}")
    if evaluation := run_dir.read_evaluation():
        lines.append(f"evaluation at step {evaluation['step']}: {format_metrics(evaluation)}")
    return lines


def _latest_metrics(run_dir: RunDir) -> dict[str, float | None]:
    """The metrics of the last logged step; ignores an incomplete last line, which is still being written."""
    text = run_dir.metrics.read_text(encoding="utf-8") if run_dir.metrics.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return json.loads(lines[-1]) if lines else {}


def _describe_hugging_face(files: HuggingFaceDirectory) -> list[str]:
    others = sorted({dtype.name for dtype in files.dtypes.values()} - {files.dtype.name})
    mixed = f", some {' and '.join(others)}" if others else ""
    listed = sorted(file for file in files.path.iterdir() if file.is_file())
    sizes = [f"  {file.name}  {file.stat().st_size:,} bytes" for file in listed]
    return [
        f"Hugging Face model: {files.architecture} ({files.format.model_type}), dtype {files.dtype.name}{mixed}",
        _describe_tokenizer(files.path),
        f"files: {sum(file.stat().st_size for file in listed):,} bytes",
        *sizes,
    ]


def _describe_tokenizer(directory: Path) -> str:
    tokenizer = find_tokenizer(directory)
    if tokenizer is None:
        return "tokenizer: none"
    source_size = tokenizer.source_vocab_size
    source = "" if source_size == tokenizer.vocab_size else f", {source_size:,} source ids"
    return f"tokenizer: {type(tokenizer).__name__} with {tokenizer.vocab_size:,} ids{source}"


# ---------------------------------------------------------------- sizes
def _abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The configured mesh, even if fewer devices are attached; an axis of -1 uses the attached devices."""
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    fixed = math.prod(n for n in sizes.values() if n != -1)
    sizes = {axis: max(1, jax.device_count() // fixed) if n == -1 else n for axis, n in sizes.items()}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _tree_bytes(tree: PyTree) -> int:
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree))
