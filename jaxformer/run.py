"""A trained model as a value: config, model, parameters, tokenizer; loaded from a run or a Hugging Face directory."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxformer.checkpoint import Checkpoints, abstract_like
from jaxformer.config import ModelConfig, RunConfig, TrainConfig, load_json
from jaxformer.convert.directory import HuggingFaceDirectory, is_hugging_face
from jaxformer.convert.hub import local_directory
from jaxformer.data.tokenizer import Tokenizer, check_vocabulary, find_tokenizer
from jaxformer.layers import Runtime, Transformer, abstract_params
from jaxformer.layers.stack import unstacked
from jaxformer.sharding import param_shardings
from jaxformer.typing import Params, PyTree


@dataclass
class Run:
    config: RunConfig
    model: Transformer
    params: Params
    tokenizer: Tokenizer | None
    step: int

    @cached_property
    def decode_params(self) -> Params:
        """The parameters layer by layer, as decoding reads them."""
        return jax.jit(unstacked)(self.params)


def load(
    path: str | Path, *, step: int | None = None, mesh: Mesh | None = None, dtype: str | jnp.dtype = "float32"
) -> Run:
    """A run directory at its latest checkpoint or at `step`, a Hugging Face directory, or `hf://org/name`.

    Args:
      mesh: devices to split the parameters over; none puts them on one.
      dtype: of the parameters of a Hugging Face directory in memory; a run's are as they were trained.
    """
    path = local_directory(path)
    return _load_hugging_face(path, mesh, jnp.dtype(dtype)) if is_hugging_face(path) else _load_run(path, step, mesh)


def _load_run(path: Path, step: int | None, mesh: Mesh | None) -> Run:
    config = load_json(path)
    with Checkpoints(path) as checkpoints:
        params, step = checkpoints.restore_params(_abstract(config.model, mesh), step)
    return Run(config, Transformer(config.model, make_runtime(config.train)), params, find_tokenizer(path), step)


def _load_hugging_face(path: Path, mesh: Mesh | None, dtype: jnp.dtype) -> Run:
    files, tokenizer = HuggingFaceDirectory(path), find_tokenizer(path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, files.model.vocab_size, f"'{path / 'config.json'}': vocab_size")
    config = RunConfig(model=files.model)
    params = files.params(_abstract(files.model, mesh, dtype))
    return Run(config, Transformer(config.model, make_runtime(config.train)), params, tokenizer, 0)


def _abstract(model: ModelConfig, mesh: Mesh | None, dtype: jnp.dtype | None = None) -> PyTree:
    """What the parameters look like and where they go."""
    shapes, axes = abstract_params(model)
    if dtype is not None:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    if mesh is None:
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), shapes)
    else:
        shardings = param_shardings(axes, shapes, mesh)
    return abstract_like(shapes, shardings)


def make_runtime(config: TrainConfig) -> Runtime:
    """How to run on the devices at hand."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return Runtime(jnp.dtype(dtype), config.remat, config.unroll, config.attention)
