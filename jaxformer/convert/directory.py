"""A Hugging Face directory as a model: its config, and its parameters loaded straight into their sharding."""

import json
import math
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError

from jaxformer.config import ModelConfig
from jaxformer.config.overrides import explained
from jaxformer.convert import FORMATS
from jaxformer.convert.export import CONFIG, model_bindings
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.tables import Binding, bindings, flat_shapes
from jaxformer.convert.weights import DTYPES, Weights
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.typing import Params, PyTree

# A larger block of several layers goes to its device layer by layer, so that the host never holds all of it.
STAGED_BYTES = 16 * 2**20

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along every axis of a parameter."""
Sources = Mapping[tuple[int, ...], tuple[Binding, int]]
"""For one parameter: by index of layer and expert, the tensor and the part of it that hold this slice."""


def is_hugging_face(directory: str | Path) -> bool:
    """Whether config.json is that of a Hugging Face model; a run's has no model type."""
    path = Path(directory) / CONFIG
    return path.is_file() and "model_type" in _read_json(path)


class HuggingFaceDirectory:
    """The model of a directory, all tensors checked against config.json; `params` reads their contents."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        if not (self.path / CONFIG).is_file():
            raise UserError(f"'{directory}' has no {CONFIG}: name a directory that save_pretrained wrote")
        values = _read_json(self.path / CONFIG)
        self.format, self.architecture = _find_architecture(values, self.path / CONFIG)
        self._weights = Weights(self.path)
        names = frozenset(self._weights.tensors)
        self.base = self.format.base if any(n.startswith(self.format.base) for n in names) else ""
        fields = Fields(_with_generation_ids(values, self.path), str(self.path / CONFIG))
        self.model = _read_model(self.format, fields, ModelFiles(self.architecture, names))
        self._bindings = self._bind()

    @cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtype of every tensor, by the name that export gives it."""
        written = model_bindings(self.format, self.model, self.architecture)
        pairs = zip(written, self._bindings, strict=True)
        return {new.name: DTYPES[self._weights.tensors[self._stored_name(old.name)].dtype] for new, old in pairs}

    @property
    def dtype(self) -> np.dtype:
        """The dtype of most of the weights."""
        sizes: dict[np.dtype, int] = {}
        for binding, dtype in zip(self._bindings, self.dtypes.values(), strict=True):
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(binding.shape)
        return max(sizes, key=sizes.__getitem__)

    # ------------------------------------------------------------ parameters
    def params(self, abstract: PyTree) -> Params:
        """The parameters with the dtypes and shardings of `abstract`, made from one tensor of the files at a time."""
        sources: dict[str, dict[tuple[int, ...], tuple[Binding, int]]] = {}
        for binding in self._bindings:
            for number, part in enumerate(binding.parts):
                sources.setdefault(part.path, {})[part.index] = (binding, number)

        def make(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return self._make_param(sources["/".join(key.key for key in path)], leaf)

        return jax.tree_util.tree_map_with_path(make, abstract)

    def _make_param(self, sources: Sources, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """One parameter, whose shards go to their devices one after another."""
        # Devices that hold the same shard share one read of the files.
        holders: dict[Bounds, list[jax.Device]] = {}
        for device, where in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            bounds = tuple(s.indices(size)[:2] for s, size in zip(where, leaf.shape, strict=True))
            holders.setdefault(bounds, []).append(device)
        shards = [
            shard for bounds, devices in holders.items() for shard in self._shards(sources, bounds, leaf.dtype, devices)
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    def _shards(self, sources: Sources, bounds: Bounds, dtype: np.dtype, devices: list[jax.Device]) -> list[jax.Array]:
        """The same shard on several devices, assembled from the tensors of its layers and experts."""
        shape = [stop - start for start, stop in bounds]
        num_lead = len(next(iter(sources)))  # axes over layers and experts
        inside = tuple(slice(*bound) for bound in bounds[num_lead:])
        parts = [
            (tuple(i - start for i, (start, _) in zip(index, bounds, strict=False)), *source)
            for index, source in sources.items()
            if all(i in range(*bound) for i, bound in zip(index, bounds, strict=False))
        ]
        if not num_lead or math.prod(shape) * dtype.itemsize <= STAGED_BYTES:
            shard = np.empty(shape, dtype)
            for target, binding, number in parts:
                shard[target] = self._read_part(binding, number)[inside]
            return [jax.device_put(shard, device) for device in devices]
        shards = [jnp.empty(shape, dtype, device=device) for device in devices]
        for target, binding, number in parts:
            row = np.ascontiguousarray(self._read_part(binding, number)[inside], dtype)
            shards = [_set_row(shard, jax.device_put(row, shard.device), target) for shard in shards]
            # Transfers are asynchronous: without waiting, rows of many layers would be in host memory at once.
            jax.block_until_ready(shards)
        return shards

    def _read_part(self, binding: Binding, number: int) -> np.ndarray:
        array = binding.layout.to_ours(self._weights.read(self._stored_name(binding.name)), binding.sizes)
        return array if len(binding.parts) == 1 else array[number]

    # ------------------------------------------------------------ checks
    def _bind(self) -> list[Binding]:
        """Every parameter with its tensor; raises if a tensor is missing, unknown or has another shape."""
        shapes = flat_shapes(abstract_params(self.model)[0])
        bound = bindings(self.format.table(self.model), self.model, shapes, self.base)
        tensors = self._weights.tensors
        for binding in bound:
            stored = self._stored_name(binding.name)
            if stored not in tensors:
                raise UserError(
                    f"'{self.path}': tensor '{binding.name}' of shape {binding.shape} is missing: "
                    f"the weights are not those of {CONFIG}, or a weight file is missing"
                )
            if tensors[stored].shape != binding.shape:
                raise UserError(
                    f"'{tensors[stored].file}': tensor '{stored}' has shape {tensors[stored].shape}, but by "
                    f"{CONFIG} it must have {binding.shape}: correct the field that gives this size"
                )
            self._check_dtype(stored)
        self._check_unbound(set(tensors) - {self._stored_name(binding.name) for binding in bound})
        return bound

    def _stored_name(self, name: str) -> str:
        """The name of a tensor in the files, which may be an older one."""
        if name in self._weights.tensors:
            return name
        for old, new in self.format.renamed.items():
            if name.endswith(new) and (older := name.removesuffix(new) + old) in self._weights.tensors:
                return older
        return name

    def _check_unbound(self, names: set[str]) -> None:
        """Raise unless every tensor without a parameter is a copy of another one or known to be unused."""
        copies = {copy: original.format(base=self.base) for copy, original in self.format.copies.items()}
        for name in sorted(names):
            if name in copies:
                self._check_copy(name, copies[name])
            elif not any(re.fullmatch(pattern, name) for pattern in self.format.ignored):
                tensor = self._weights.tensors[name]
                raise UserError(
                    f"'{tensor.file}': tensor '{name}' of shape {tensor.shape} belongs to no parameter of "
                    f"{self.architecture}: the weights are not those of {CONFIG}"
                )

    def _check_copy(self, name: str, original: str) -> None:
        self._check_dtype(name)
        if np.array_equal(self._weights.read(name), self._weights.read(self._stored_name(original))):
            return
        can_untie = name in {row.name for row in self.format.table(self.model)}
        remedy = "set tie_word_embeddings to false" if can_untie else "a model with both is not supported"
        raise UserError(
            f"'{self._weights.tensors[name].file}': tensor '{name}' differs from '{original}', but by {CONFIG} they "
            f"are tied: {remedy}"
        )

    def _check_dtype(self, name: str) -> None:
        tensor = self._weights.tensors[name]
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"'{tensor.file}': tensor '{name}' has dtype {tensor.dtype}, which is not supported: "
                f"save the model in one of {', '.join(DTYPES)}"
            )


@partial(jax.jit, donate_argnums=0)
def _set_row(shard: jax.Array, row: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return shard.at[index].set(row)


# ---------------------------------------------------------------- config.json
def _read_model(format: Format, fields: Fields, files: ModelFiles) -> ModelConfig:
    try:
        model = format.read(fields, files)
    except UserError:
        raise
    except ValidationError as error:
        raise UserError(f"{fields.where}: no such model can be built: {'; '.join(explained(error))}") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{fields.where}: no such model can be built: {error}") from None
    fields.finish()
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' is not valid JSON ({error})") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror})") from None
    if not isinstance(values, dict):
        raise UserError(f"'{path}' does not hold a JSON object")
    return values


def _find_architecture(values: Mapping[str, Any], where: Path) -> tuple[Format, str]:
    """The format of a config.json and the architecture it names."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FORMATS:
        raise UserError(f"'{where}': model_type = {model_type!r} is not supported; there are: {', '.join(FORMATS)}")
    if "quantization_config" in values:
        method = (values["quantization_config"] or {}).get("quant_method")
        raise UserError(
            f"'{where}': quantization_config: quantized weights ({method}) are not supported: "
            "use the model they were made from"
        )
    format = FORMATS[model_type]
    listed = values.get("architectures") or [format.architectures[0]]
    if not isinstance(listed, list):
        raise UserError(f"'{where}': architectures = {listed!r} must be a list")
    if listed[0] not in format.architectures:
        raise UserError(
            f"'{where}': architecture '{listed[0]}' of {model_type} is not supported; "
            f"there are: {', '.join(format.architectures)}"
        )
    return format, listed[0]


def _with_generation_ids(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The fields of config.json with the token ids of generation_config.json, which take precedence."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return dict(values)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    generation = _read_json(path)
    return dict(values) | {name: generation[name] for name in names if generation.get(name) is not None}
