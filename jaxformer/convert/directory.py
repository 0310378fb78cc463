"""A Hugging Face directory as a model: its config, its parameters straight into their sharding, and back."""

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
from jaxformer.convert import bart, bert, gemma, gpt2, llama, modernbert, t5
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import Format, Found
from jaxformer.convert.tables import Binding, Part, bindings, flat_shapes
from jaxformer.convert.weights import DTYPES, MAX_FILE_BYTES, Planned, Weights, write_weights
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.typing import Params, PyTree

FORMATS: Mapping[str, Format] = {
    format.model_type: format
    for module in (gpt2, llama, gemma, t5, bart, bert, modernbert)
    for format in module.FORMATS
}
CONFIG = "config.json"
# A block of many layers that is larger goes to its device layer by layer and is never whole in the host's memory.
STAGED_BYTES = 16 * 2**20

Pieces = Mapping[tuple[int, ...], tuple[Binding, int]]
"""Of one parameter: layer and expert to their tensor, and which part of it."""


def is_hugging_face(directory: str | Path) -> bool:
    """Whether config.json is one of theirs; ours has no model type."""
    path = Path(directory) / CONFIG
    return path.is_file() and "model_type" in _json(path)


class HuggingFaceDirectory:
    """Everything of a directory but its tensors' contents."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        if not (self.path / CONFIG).is_file():
            raise UserError(f"'{directory}' has no {CONFIG}: name a directory that save_pretrained wrote")
        values = _json(self.path / CONFIG)
        self.format, self.architecture = _format(values, self.path / CONFIG)
        self._weights = Weights(self.path)
        names = frozenset(self._weights.tensors)
        self.base = self.format.base if any(n.startswith(self.format.base) for n in names) else ""
        fields = Fields(_with_generation(values, self.path), str(self.path / CONFIG))
        self.model = _read_model(self.format, fields, Found(self.architecture, names))
        self._bindings = self._bound()

    @cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """Of every tensor, by the name that export gives it."""
        written = _model_bindings(self.format, self.model, self.architecture)
        pairs = zip(written, self._bindings, strict=True)
        return {new.name: DTYPES[self._weights.tensors[self._stored(old.name)].dtype] for new, old in pairs}

    @property
    def dtype(self) -> np.dtype:
        """What most of the weights have."""
        sizes: dict[np.dtype, int] = {}
        for binding, dtype in zip(self._bindings, self.dtypes.values(), strict=True):
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(binding.shape)
        return max(sizes, key=sizes.__getitem__)

    def params(self, abstract: PyTree) -> Params:
        """The parameters, each made where `abstract` says, from one tensor of the files at a time."""
        places: dict[str, dict[tuple[int, ...], tuple[Binding, int]]] = {}
        for binding in self._bindings:
            for number, part in enumerate(binding.parts):
                places.setdefault(part.path, {})[part.index] = (binding, number)

        def make(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return self._placed(places["/".join(key.key for key in path)], leaf)

        return jax.tree_util.tree_map_with_path(make, abstract)

    def _placed(self, pieces: Pieces, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """One parameter, whose blocks go to their devices one after another."""
        holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        for device, where in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            bounds = tuple(s.indices(size)[:2] for s, size in zip(where, leaf.shape, strict=True))
            holders.setdefault(bounds, []).append(device)
        blocks = [
            block for bounds, devices in holders.items() for block in self._blocks(pieces, bounds, leaf.dtype, devices)
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, blocks)

    def _blocks(
        self, pieces: Pieces, bounds: tuple[tuple[int, int], ...], dtype: np.dtype, devices: list[jax.Device]
    ) -> list[jax.Array]:
        """The same block on several devices, put together from the tensors of its layers and experts."""
        shape = [stop - start for start, stop in bounds]
        lead = len(next(iter(pieces)))
        inside = tuple(slice(*bound) for bound in bounds[lead:])
        parts = [
            (tuple(i - start for i, (start, _) in zip(index, bounds, strict=False)), *source)
            for index, source in pieces.items()
            if all(i in range(*bound) for i, bound in zip(index, bounds, strict=False))
        ]
        if not lead or math.prod(shape) * dtype.itemsize <= STAGED_BYTES:
            block = np.empty(shape, dtype)
            for target, binding, number in parts:
                block[target] = self._part(binding, number)[inside]
            return [jax.device_put(block, device) for device in devices]
        placed = [jnp.empty(shape, dtype, device=device) for device in devices]
        for target, binding, number in parts:
            row = np.ascontiguousarray(self._part(binding, number)[inside], dtype)
            placed = [_with_row(block, jax.device_put(row, block.device), target) for block in placed]
            jax.block_until_ready(placed)  # or rows of many layers wait in memory
        return placed

    def _part(self, binding: Binding, number: int) -> np.ndarray:
        array = binding.form.to_ours(self._weights.read(self._stored(binding.name)), binding.sizes)
        return array if len(binding.parts) == 1 else array[number]

    def _stored(self, name: str) -> str:
        """The name in the files, which may be an older spelling."""
        if name in self._weights.tensors:
            return name
        for old, new in self.format.renamed.items():
            if name.endswith(new) and (spelt := name.removesuffix(new) + old) in self._weights.tensors:
                return spelt
        return name

    def _bound(self) -> list[Binding]:
        """Every parameter with its tensor; raises on a tensor that is missing, unknown or of another shape."""
        shapes = flat_shapes(abstract_params(self.model)[0])
        found = bindings(self.format.table(self.model), self.model, shapes, self.base)
        tensors = self._weights.tensors
        for binding in found:
            stored = self._stored(binding.name)
            if stored not in tensors:
                raise UserError(
                    f"'{self.path}': tensor '{binding.name}' of shape {binding.shape} is missing: "
                    f"the weights are not those of {CONFIG}, or a file of them is not there"
                )
            if tensors[stored].shape != binding.shape:
                raise UserError(
                    f"'{tensors[stored].file}': tensor '{stored}' has shape {tensors[stored].shape}, but by "
                    f"{CONFIG} it must have {binding.shape}: correct the field that gives this size"
                )
            self._check_dtype(stored)
        self._check_left(set(tensors) - {self._stored(binding.name) for binding in found})
        return found

    def _check_left(self, names: set[str]) -> None:
        """Tensors no parameter takes must be known to be copies or not to matter."""
        copies = {copy: original.format(base=self.base) for copy, original in self.format.copies.items()}
        untied = {row.name for row in self.format.table(self.model)}
        for name in sorted(names):
            if name in copies:
                self._check_dtype(name)
                if not np.array_equal(self._weights.read(name), self._weights.read(self._stored(copies[name]))):
                    remedy = "set tie_word_embeddings to false" if name in untied else "there is no model with both"
                    raise UserError(
                        f"'{self._weights.tensors[name].file}': tensor '{name}' differs from '{copies[name]}', though "
                        f"by {CONFIG} they are one: {remedy}"
                    )
            elif not any(re.fullmatch(pattern, name) for pattern in self.format.ignored):
                tensor = self._weights.tensors[name]
                raise UserError(
                    f"'{tensor.file}': tensor '{name}' of shape {tensor.shape} belongs to no parameter of "
                    f"{self.architecture}: the weights are not those of {CONFIG}"
                )

    def _check_dtype(self, name: str) -> None:
        tensor = self._weights.tensors[name]
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"'{tensor.file}': tensor '{name}' has dtype {tensor.dtype}, which is not supported: "
                f"save the model in one of {', '.join(DTYPES)}"
            )


@partial(jax.jit, donate_argnums=0)
def _with_row(block: jax.Array, row: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return block.at[index].set(row)


# ---------------------------------------------------------------- export
def export_format(model: ModelConfig, model_type: str | None = None) -> tuple[Format, dict[str, Any]]:
    """The format that can say everything about a model, and its config.json.

    A format fits if it reads its own writing back as the same model, training settings aside.
    """
    if model_type is not None and model_type not in FORMATS:
        raise UserError(f"no Hugging Face format '{model_type}'; there are: {', '.join(FORMATS)}")
    reasons = []
    for format in [FORMATS[model_type]] if model_type else FORMATS.values():
        if format.shape == model.shape:
            written, reason = _fitting(format, model)
            if reason is None:
                return format, {"model_type": format.model_type, **written}
            reasons.append(f"  {format.model_type}: {reason}")
    if not reasons:
        raise UserError(f"the Hugging Face format '{model_type}' cannot hold this model: it is not {model.shape}")
    raise UserError("no Hugging Face format can hold this model:\n" + "\n".join(reasons))


def _fitting(format: Format, model: ModelConfig) -> tuple[dict[str, Any], str | None]:
    """The fields, and why they do not say the same as the model; none if they do."""
    if getattr(model.decoder, "kind", "transformer") != "transformer":
        return {}, "it has no recurrent layers"
    try:
        written = format.write(model)
        names = frozenset(b.name for b in _model_bindings(format, model, written["architectures"][0]))
        again = format.read(Fields(written, "written"), Found(written["architectures"][0], names))
    except (AttributeError, ValueError, TypeError) as error:
        # Fields that the format reads are not there in a model of another kind.
        return {}, f"it is not made like this model ({str(error).splitlines()[0]})"
    return written, _difference(_maths(model), _maths(again))


def export(
    directory: Path,
    model: ModelConfig,
    params: Params,
    dtype: np.dtype,
    *,
    dtypes: Mapping[str, np.dtype] | None = None,
    model_type: str | None = None,
    max_bytes: int = MAX_FILE_BYTES,
) -> Format:
    """Write config.json and the weights into a directory that exists.

    Args:
      dtypes: of tensors that are to have another dtype than the rest.
    """
    format, fields = export_format(model, model_type)
    planned = [
        Planned(b.name, b.shape, (dtypes or {}).get(b.name, dtype), partial(_joined, params, b))
        for b in _model_bindings(format, model, fields["architectures"][0])
    ]
    write_weights(directory, sorted(planned, key=lambda tensor: tensor.name), max_bytes)
    (directory / CONFIG).write_text(json.dumps(fields | {"dtype": dtype.name}, indent=2) + "\n", encoding="utf-8")
    return format


def _model_bindings(format: Format, model: ModelConfig, architecture: str) -> list[Binding]:
    shapes = flat_shapes(abstract_params(model)[0])
    found = bindings(format.table(model), model, shapes, format.base_of(architecture))
    covered = {part.path for binding in found for part in binding.parts}
    if left := sorted(set(shapes) - covered):
        raise ValueError(f"no name for parameter {left[0]}")
    return found


def _joined(params: Params, binding: Binding) -> np.ndarray:
    parts = [_slice(params, part) for part in binding.parts]
    return binding.form.to_theirs(parts[0] if len(parts) == 1 else np.stack(parts), binding.sizes)


def _slice(params: Params, part: Part) -> np.ndarray:
    leaf = params
    for name in part.path.split("/"):
        leaf = leaf[name]
    return np.asarray(leaf[part.index] if part.index else leaf)


# Settings of training, which no format needs to keep.
_TRAINING = frozenset(("dropout", "init", "load_balance", "router_z"))


def _maths(tree: Any) -> Any:
    """What a model computes, with defaults spelt out."""
    if isinstance(tree, ModelConfig):
        return _maths(tree.model_dump(mode="json"))
    if isinstance(tree, list):
        return [_maths(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kept = {name: _maths(value) for name, value in tree.items() if name not in _TRAINING}
    if "num_kv_heads" in kept:
        kept["num_kv_heads"] = kept["num_kv_heads"] or kept["num_heads"]
        kept["scale"] = round(kept["scale"] or kept["head_dim"] ** -0.5, 12)
    if kept.get("kind") == "rms":
        kept["bias"] = False
    if kept.get("kind") == "rope" and kept["fraction"] == 1.0:
        kept["pairing"] = "either"  # the tables reorder the channels
    return kept


def _difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in ours:
            below = _difference(ours[name], theirs.get(name), f"{path}.{name}" if path else name)
            if below:
                return below
        return None
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if below := _difference(a, b, f"{path}.{i}"):
                return below
        return None
    return None if ours == theirs else f"its {path} would be {_brief(theirs)}, not {_brief(ours)}"


def _brief(value: Any) -> str:
    return (
        repr(value)
        if not isinstance(value, dict | list)
        else value.get("kind", "set")
        if isinstance(value, dict)
        else "a list"
    )


# ---------------------------------------------------------------- config.json
def _read_model(format: Format, fields: Fields, found: Found) -> ModelConfig:
    try:
        model = format.read(fields, found)
    except UserError:
        raise
    except ValidationError as error:
        raise UserError(f"{fields.where}: no such model can be built: {'; '.join(explained(error))}") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{fields.where}: no such model can be built: {error}") from None
    fields.finish()
    return model


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' is not valid JSON ({error})") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror})") from None
    if not isinstance(values, dict):
        raise UserError(f"'{path}' does not hold a JSON object")
    return values


def _format(values: Mapping[str, Any], where: Path) -> tuple[Format, str]:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FORMATS:
        raise UserError(f"'{where}': model_type = {model_type!r} is not supported; there are: {', '.join(FORMATS)}")
    if "quantization_config" in values:
        method = (values["quantization_config"] or {}).get("quant_method")
        raise UserError(
            f"'{where}': quantization_config: quantized weights ({method}) are not supported: "
            "take the model they were made from"
        )
    format = FORMATS[model_type]
    listed = values.get("architectures") or [format.architectures[0]]
    if not isinstance(listed, list):
        raise UserError(f"'{where}': architectures = {listed!r} must be a list")
    given = listed[0]
    if given not in format.architectures:
        raise UserError(
            f"'{where}': architecture '{given}' of {model_type} is not supported; "
            f"there are: {', '.join(format.architectures)}"
        )
    return format, given


def _with_generation(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Token ids that generation_config.json, where there is one, sets over those of config.json."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return dict(values)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    given = _json(path)
    return dict(values) | {name: given[name] for name in names if given.get(name) is not None}
