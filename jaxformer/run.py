"""`Run`, a trained model with its config, parameters and tokenizer, and `load`, which reads one from a directory."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxformer.checkpoint import Checkpoints, abstract_like
from jaxformer.config import ModelConfig, RunConfig, TrainConfig
from jaxformer.convert.directory import HuggingFaceDirectory, is_hugging_face
from jaxformer.convert.generation import GenerationDefaults, read_generation_defaults
from jaxformer.convert.hub import local_directory
from jaxformer.data.tokenizer import Tokenizer, check_vocabulary, find_tokenizer
from jaxformer.errors import UserError
from jaxformer.layers import Runtime, Transformer, abstract_params
from jaxformer.layers.partition import Partition, abstract_rows
from jaxformer.layers.stack import unstack_layers
from jaxformer.ops.cpu import output_major_params, untie_head
from jaxformer.ops.weights import is_quantized, quantize_params
from jaxformer.rundir import RunDir
from jaxformer.sharding import param_shardings
from jaxformer.typing import Params, PyTree


@dataclass(frozen=True, eq=False)
class Run:
    """A trained model with its config, parameters and tokenizer.

    It is frozen, because it caches weights derived from the parameters: use `dataclasses.replace` for a variant."""

    config: RunConfig
    model: Transformer
    params: Params
    tokenizer: Tokenizer | None
    step: int
    mesh: Mesh | None = None
    """Devices that the parameters are sharded over. None: a single device."""
    generation: GenerationDefaults | None = None
    """Decoding defaults from generation_config.json. None: the directory has no such file."""
    _decoding: dict[bool, tuple[Transformer, Params]] = field(default_factory=dict, init=False, repr=False)
    """The cached results of `decoding_weights`, by `single_row`; at most one, because each is a copy of the weights."""

    @property
    def decoding(self) -> tuple[Transformer, Params]:
        """The model and its parameters in the layout for decoding."""
        return self._decoding_weights(single_row=False)

    @property
    def decoding_alone(self) -> tuple[Transformer, Params]:
        """The same for a batch of one row; only the layout that was used last is kept in memory."""
        has_own_layout = self.model.runtime.platform == "cpu" and self.mesh is None and not is_quantized(self.params)
        return self._decoding_weights(single_row=has_own_layout)

    def _decoding_weights(self, single_row: bool) -> tuple[Transformer, Params]:
        if single_row not in self._decoding:
            self._decoding.clear()  # before the new copy is made, so that memory never holds two
            self._decoding[single_row] = decoding_weights(self.model, self.params, single_row)
        return self._decoding[single_row]


def load(
    path: str | Path,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    dtype: str | jnp.dtype = "float32",
    weights: str | None = None,
    cache: str | None = None,
) -> Run:
    """Load a run directory (its latest checkpoint, or `step`), a Hugging Face directory, or `hf://org/name`.

    Args:
      mesh: devices to shard the parameters over. None: a single device.
      dtype: dtype of the parameters of a Hugging Face directory; those of a run are float32.
      weights: "int8" quantizes weight matrices, with one scale per channel: a quarter of the memory, for inference.
      cache: "int8" quantizes the KV cache.
    """
    for name, value in (("weights", weights), ("cache", cache)):
        _check_int8(name, value)
    path = local_directory(path)
    run = _load_hugging_face(path, mesh, jnp.dtype(dtype)) if is_hugging_face(path) else _load_run(path, step, mesh)
    if cache is not None:
        run = replace(run, model=run.model.clone(runtime=replace(run.model.runtime, cache=cache)))
    return run if weights is None else quantized_run(run, weights)


def quantized_run(run: Run, weights: str) -> Run:
    """A copy of the run with int8 weights, for decoding and evaluation."""
    _check_int8("weights", weights)
    if run.config.model.shape == "embedding-only":
        raise UserError(f"weights={weights!r}: word vectors are not quantized, because they have no matrix products")
    return replace(run, params=quantize_params(run.params, abstract_params(run.config.model)[1], run.mesh))


def _check_int8(name: str, value: str | None) -> None:
    if value not in (None, "int8"):
        raise UserError(f"{name}={value!r}: must be 'int8' or none")


def decoding_weights(model: Transformer, params: Params, single_row: bool) -> tuple[Transformer, Params]:
    """An equivalent model and parameters, in the layout that decodes fastest; `single_row` is for a batch of one."""
    relayout = model.runtime.platform == "cpu" and not is_quantized(params)
    if relayout and single_row:
        params = output_major_params(params, abstract_params(model.config)[1])
    if not model.runtime.scan_decode:
        params = jax.jit(partial(unstack_layers, config=model.config))(params)
    if not relayout:
        return model, params
    config, params = untie_head(model.config, params)
    return model.clone(config=config), params


def load_params(path: str | Path, abstract: PyTree, step: int | None = None) -> Params:
    """Load the parameters of a run or Hugging Face directory, with the shapes, dtypes and shardings of `abstract`."""
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
    generation = read_generation_defaults(path, config.model)
    return Run(config, _make_model(config, mesh), params, find_tokenizer(path), step, mesh, generation)


def _load_hugging_face(path: Path, mesh: Mesh | None, dtype: jnp.dtype) -> Run:
    files, tokenizer = HuggingFaceDirectory(path), find_tokenizer(path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, files.model, f"'{path / 'config.json'}': ")
    config, generation = RunConfig(model=files.model), read_generation_defaults(path, files.model)
    params = files.params(_abstract(files.model, mesh, dtype))
    return Run(config, _make_model(config, mesh), params, tokenizer, 0, mesh, generation)


def _make_model(config: RunConfig, mesh: Mesh | None) -> Transformer:
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    return Transformer(config.model, make_runtime(config.train, device.platform))


def _abstract(model: ModelConfig, mesh: Mesh | None, dtype: jnp.dtype | None = None) -> PyTree:
    """Shapes, dtypes and shardings of the parameters."""
    shapes, axes = abstract_params(model)
    if dtype is not None:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    if mesh is None:
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), shapes)
    else:
        shardings = param_shardings(axes, shapes, mesh)
    return abstract_like(shapes, shardings)


def make_runtime(config: TrainConfig, platform: str) -> Runtime:
    """The runtime options of a config on this platform."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    # A CPU copies what is sliced out of stacked parameters and caches; accelerators slice as they read.
    scan_decode = platform != "cpu" and config.unroll != "all"
    return Runtime(jnp.dtype(dtype), config.remat, config.unroll, config.attention, platform, scan_decode=scan_decode)
