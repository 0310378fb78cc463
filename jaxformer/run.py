"""A trained model as a value: config, model, parameters, tokenizer; loaded from a run or a Hugging Face directory."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxformer.checkpoint import Checkpoints, abstract_like
from jaxformer.config import ModelConfig, RunConfig, TrainConfig
from jaxformer.convert.directory import HuggingFaceDirectory, is_hugging_face
from jaxformer.convert.hub import local_directory
from jaxformer.data.tokenizer import Tokenizer, check_vocabulary, find_tokenizer
from jaxformer.errors import UserError
from jaxformer.layers import Runtime, Transformer, abstract_params
from jaxformer.layers.forms import is_quantized, outputs_first, quantized
from jaxformer.layers.partition import Partition, abstract_rows
from jaxformer.layers.stack import unstacked
from jaxformer.rundir import RunDir
from jaxformer.sharding import param_shardings
from jaxformer.typing import Params, PyTree


@dataclass
class Run:
    config: RunConfig
    model: Transformer
    params: Params
    tokenizer: Tokenizer | None
    step: int
    mesh: Mesh | None = None
    """The devices the parameters are split over; none is one device."""

    _decoding: tuple[bool, tuple[Transformer, Params]] | None = field(default=None, init=False, repr=False)

    @property
    def decoding(self) -> tuple[Transformer, Params]:
        """The model as decoding runs it, and its parameters layer by layer."""
        return self._form(alone=False)

    @property
    def decoding_alone(self) -> tuple[Transformer, Params]:
        """The same for a single row; only the form asked for last is kept."""
        return self._form(alone=jax.default_backend() == "cpu" and self.mesh is None and not is_quantized(self.params))

    def _form(self, alone: bool) -> tuple[Transformer, Params]:
        if self._decoding is None or self._decoding[0] != alone:
            self._decoding = None  # before the next is made
            self._decoding = (alone, for_decoding(self.model, self.params, alone))
        return self._decoding[1]


def load(
    path: str | Path,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    dtype: str | jnp.dtype = "float32",
    weights: str | None = None,
    cache: str | None = None,
) -> Run:
    """A run directory at its latest checkpoint or at `step`, a Hugging Face directory, or `hf://org/name`.

    Args:
      mesh: devices to split the parameters over; none puts them on one.
      dtype: of the parameters of a Hugging Face directory in memory; a run's are as they were trained.
      weights: "int8" keeps matrices as whole numbers with a scale a channel: a quarter of the memory, for decoding.
      cache: "int8" keeps the keys and values of decoding so.
    """
    for name, value in (("weights", weights), ("cache", cache)):
        _check_int8(name, value)
    path = local_directory(path)
    run = _load_hugging_face(path, mesh, jnp.dtype(dtype)) if is_hugging_face(path) else _load_run(path, step, mesh)
    run = replace(run, mesh=mesh)
    if cache is not None:
        run.model = run.model.clone(runtime=replace(run.model.runtime, cache=cache))
    return run if weights is None else quantized_run(run, weights)


def quantized_run(run: Run, weights: str) -> Run:
    """The run with its matrices as whole numbers, for decoding and evaluation."""
    _check_int8("weights", weights)
    params = quantized(run.params, run.config.model, run.mesh)
    return Run(run.config, run.model, params, run.tokenizer, run.step, run.mesh)


def _check_int8(name: str, value: str | None) -> None:
    if value not in (None, "int8"):
        raise UserError(f"{name}={value!r}: must be 'int8' or none")


def for_decoding(model: Transformer, params: Params, alone: bool) -> tuple[Transformer, Params]:
    """The same function of tokens, in the form in which one token at a time runs best; `alone` is for a single row."""
    if alone:
        params = outputs_first(params, model.config)
    params = jax.jit(unstacked)(params)
    head = model.config.head
    if jax.default_backend() != "cpu" or head is None or not head.tied or is_quantized(params):
        return model, params
    # A CPU multiplies few rows several times faster with a matrix than with its transpose, which the table would be.
    config = model.config.model_copy(update={"head": head.model_copy(update={"tied": False})})
    kernel_DV = jax.jit(jnp.transpose)(params["embedding"]["tokens"])
    own = params.get("head", {}) | {"output": {"kernel": kernel_DV}}
    return model.clone(config=config), params | {"head": own}


def load_params(path: str | Path, abstract: PyTree, step: int | None = None) -> Params:
    """The parameters of a run or Hugging Face directory, each placed as `abstract` says."""
    directory = local_directory(path)
    if is_hugging_face(directory):
        return HuggingFaceDirectory(directory).params(abstract)
    return _restore(RunDir(directory), abstract, step)[0]


def _restore(run_dir: RunDir, abstract: PyTree, step: int | None) -> tuple[Params, int]:
    config = run_dir.read_config()
    partition = Partition(config.model, config.train.freeze)
    with Checkpoints(run_dir) as checkpoints:
        parts = partition.split(abstract, take=abstract_rows)
        trainable, frozen, step = checkpoints.restore_params(*parts, step=step)
    return partition.merge(trainable, frozen), step


def _load_run(path: Path, step: int | None, mesh: Mesh | None) -> Run:
    config = RunDir(path).read_config()
    params, step = _restore(RunDir(path), _abstract(config.model, mesh), step)
    return Run(
        config,
        Transformer(config.model, make_runtime(config.train, jax.local_devices()[0].platform)),
        params,
        find_tokenizer(path),
        step,
    )


def _load_hugging_face(path: Path, mesh: Mesh | None, dtype: jnp.dtype) -> Run:
    files, tokenizer = HuggingFaceDirectory(path), find_tokenizer(path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, files.model.vocab_size, f"'{path / 'config.json'}': vocab_size")
    config = RunConfig(model=files.model)
    params = files.params(_abstract(files.model, mesh, dtype))
    return Run(
        config,
        Transformer(config.model, make_runtime(config.train, jax.local_devices()[0].platform)),
        params,
        tokenizer,
        0,
    )


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


def make_runtime(config: TrainConfig, platform: str) -> Runtime:
    """How to run on devices of this platform."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    return Runtime(jnp.dtype(dtype), config.remat, config.unroll, config.attention, platform)
