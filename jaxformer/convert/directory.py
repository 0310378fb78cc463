"""Loads a Hugging Face directory: its model config, and its parameters directly into their sharding."""

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
from jaxformer.convert.fields import Fields, read_json
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.generation import ID_FIELDS, read_generation_fields
from jaxformer.convert.tables import Binding, bindings, flat_shapes
from jaxformer.convert.weights import DTYPES, Weights
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.typing import Params, PyTree

# Shards of stacked parameters above this size are copied to the device layer by layer to save host memory.
STAGED_BYTES = 16 * 2**20

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a shard along every axis of a parameter."""
Sources = Mapping[tuple[int, ...], tuple[Binding, int]]
"""The source of each (layer, expert) slice of one parameter: a tensor, and the index of the part if it is fused."""


def is_hugging_face(directory: str | Path) -> bool:
    """Whether config.json describes a Hugging Face model; the config.json of a run has no `model_type`."""
    path = Path(directory) / CONFIG
    return path.is_file() and "model_type" in read_json(path)


class HuggingFaceDirectory:
    """The model in a Hugging Face directory.

    The constructor checks names, shapes and dtypes of the tensors against config.json; `params` reads their contents.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        if not (self.path / CONFIG).is_file():
            raise UserError(f"'{directory}' has no {CONFIG}: name a directory that save_pretrained wrote")
        values = read_json(self.path / CONFIG)
        self.format, self.architecture = _find_architecture(values, self.path / CONFIG)
        self._weights = Weights(self.path)
        names = frozenset(self._weights.tensors)
        # Some published files, such as GPT-2's, lack the prefix although the model has a head.
        self.base = self.format.base if any(n.startswith(self.format.base) for n in names) else ""
        fields = Fields(_with_generation_ids(values, self.path), str(self.path / CONFIG))
        self.model = _read_model(self.format, fields, ModelFiles(self.architecture, names))
        self._bindings = self._bind()

    @cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtype of every tensor, keyed by the name that export writes."""
        written = model_bindings(self.format, self.model, self.architecture)
        pairs = zip(written, self._bindings, strict=True)
        return {new.name: DTYPES[self._weights.tensors[self._stored_name(old.name)].dtype] for new, old in pairs}

    @property
    def dtype(self) -> np.dtype:
        """The dtype that most of the weights have, counted by elements."""
        sizes: dict[np.dtype, int] = {}
        for binding, dtype in zip(self._bindings, self.dtypes.values(), strict=True):
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(binding.shape)
        return max(sizes, key=sizes.__getitem__)

    # ------------------------------------------------------------ parameters
    def params(self, abstract: PyTree) -> Params:
        """Load the parameters with the dtypes and shardings of `abstract`, reading one tensor at a time."""
        sources: dict[str, dict[tuple[int, ...], tuple[Binding, int]]] = {}
        for binding in self._bindings:
            for number, part in enumerate(binding.parts):
                sources.setdefault(part.path, {})[part.index] = (binding, number)

        def make(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return self._make_param(sources["/".join(key.key for key in path)], leaf)

        return jax.tree_util.tree_map_with_path(make, abstract)

    def _make_param(self, sources: Sources, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """Load one parameter, shard by shard."""
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
        """Assemble a shard from the tensors of its layers and experts, and copy it to each of the devices."""
        shape = [stop - start for start, stop in bounds]
        num_lead = len(next(iter(sources)))  # axes over layers and experts
        inside = tuple(slice(*bound) for bound in bounds[num_lead:])
        # The leading axes may be sharded too: keep only the layers and experts of this shard, counted from its start.
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
            # Transfers are asynchronous: without this, the host would hold many layers at once.
            jax.block_until_ready(shards)
        return shards

    def _read_part(self, binding: Binding, number: int) -> np.ndarray:
        array = binding.layout.to_ours(self._weights.read(self._stored_name(binding.name)), binding.sizes)
        return array if len(binding.parts) == 1 else array[number]

    # ------------------------------------------------------------ checks
    def _bind(self) -> list[Binding]:
        """Match parameters and tensors; raise if a tensor is missing or unknown, or its shape or dtype is wrong."""
        shapes = flat_shapes(abstract_params(self.model)[0])
        bound = bindings(self.format.table(self.model), self.model, shapes, self.base)
        tensors = self._weights.tensors
        for binding in bound:
            stored = self._stored_name(binding.name)
            if stored not in tensors:
                raise UserError(
                    f"'{self.path}': tensor '{binding.name}' of shape {binding.shape} is missing: "
                    f"the weights do not match {CONFIG}, or a weight file is missing"
                )
            if tensors[stored].shape != binding.shape:
                raise UserError(
                    f"'{tensors[stored].file}': tensor '{stored}' has shape {tensors[stored].shape}, but "
                    f"{CONFIG} requires {binding.shape}: correct the field that sets this size"
                )
            self._check_dtype(stored)
        self._check_unbound(set(tensors) - {self._stored_name(binding.name) for binding in bound})
        return bound

    def _stored_name(self, name: str) -> str:
        """The name of a tensor in the files, which may still have its old name."""
        if name in self._weights.tensors:
            return name
        for old, new in self.format.renamed.items():
            if name.endswith(new) and (older := name.removesuffix(new) + old) in self._weights.tensors:
                return older
        return name

    def _check_unbound(self, names: set[str]) -> None:
        """Raise unless every tensor without a parameter is a copy of a tied weight or listed in `Format.ignored`."""
        copies = {copy: original.format(base=self.base) for copy, original in self.format.tied(self.model).items()}
        for name in sorted(names):
            if name in copies:
                self._check_copy(name, copies[name])
            elif not any(re.fullmatch(pattern, name) for pattern in self.format.ignored):
                tensor = self._weights.tensors[name]
                raise UserError(
                    f"'{tensor.file}': tensor '{name}' of shape {tensor.shape} belongs to no parameter of "
                    f"{self.architecture}: the weights do not match {CONFIG}"
                )

    def _check_copy(self, name: str, original: str) -> None:
        self._check_dtype(name)
        if np.array_equal(self._weights.read(name), self._weights.read(self._stored_name(original))):
            return
        can_untie = name in {row.name for row in self.format.table(self.model)}
        remedy = "set tie_word_embeddings to false" if can_untie else "this architecture cannot untie them"
        raise UserError(
            f"'{self._weights.tensors[name].file}': tensor '{name}' differs from '{original}', but {CONFIG} ties "
            f"them: {remedy}"
        )

    def _check_dtype(self, name: str) -> None:
        tensor = self._weights.tensors[name]
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"'{tensor.file}': tensor '{name}' has dtype {tensor.dtype}, which is not supported: "
                f"save the model with one of the dtypes {', '.join(DTYPES)}"
            )


@partial(jax.jit, donate_argnums=0)  # without donation, every layer would copy the whole shard
def _set_row(shard: jax.Array, row: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return shard.at[index].set(row)


# ---------------------------------------------------------------- config.json
def _read_model(format: Format, fields: Fields, files: ModelFiles) -> ModelConfig:
    try:
        model = format.read(fields, files)
    except ValidationError as error:
        raise UserError(
            f"{fields.where}: the fields do not form a valid model: {'; '.join(explained(error))}"
        ) from None
    except (ValueError, TypeError, ArithmeticError) as error:
        if str(error).startswith(fields.where):  # from `Fields`, which names the file and the field
            raise
        raise UserError(f"{fields.where}: the fields do not form a valid model: {error}") from None
    fields.finish()
    return model


def _find_architecture(values: Mapping[str, Any], where: Path) -> tuple[Format, str]:
    """Return the format and the architecture that a config.json names."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FORMATS:
        raise UserError(f"'{where}': model_type = {model_type!r} is not supported; supported: {', '.join(FORMATS)}")
    if "quantization_config" in values:
        method = (values["quantization_config"] or {}).get("quant_method")
        raise UserError(
            f"'{where}': quantization_config: quantized weights ({method}) are not supported: use the unquantized model"
        )
    format = FORMATS[model_type]
    names = values.get("architectures") or [format.architectures[0]]
    if not isinstance(names, list):
        raise UserError(f"'{where}': architectures = {names!r} must be a list")
    if names[0] not in format.architectures:
        raise UserError(
            f"'{where}': architecture '{names[0]}' of {model_type} is not supported; "
            f"supported: {', '.join(format.architectures)}"
        )
    return format, names[0]


def _with_generation_ids(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the fields of config.json, with its token ids replaced by those in generation_config.json."""
    generation = read_generation_fields(directory) or {}
    return dict(values) | {name: generation[name] for name in ID_FIELDS if generation.get(name) is not None}
