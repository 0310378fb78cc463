"""Writes a model and its parameters as a Hugging Face directory."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.convert import FORMATS
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import Format, ModelFiles
from jaxformer.convert.heads import default_labels
from jaxformer.convert.tables import Binding, Part, bindings, flat_shapes
from jaxformer.convert.weights import MAX_FILE_BYTES, TensorPlan, write_weights
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.typing import Params

CONFIG = "config.json"


def find_format(model: ModelConfig, model_type: str | None = None) -> tuple[Format, dict[str, Any]]:
    """Return the first format that can represent a model, and the fields of its config.json.

    A format can represent a model if reading the fields that it writes gives the same model. Training-only settings
    such as dropout may differ.
    """
    if model_type is not None and model_type not in FORMATS:
        raise UserError(f"unknown Hugging Face format '{model_type}'; supported: {', '.join(FORMATS)}")
    reasons = []
    for format in [FORMATS[model_type]] if model_type else FORMATS.values():
        if format.shape == model.shape:
            fields, reason = _try_format(format, model)
            if reason is None:
                return format, {"model_type": format.model_type, **fields}
            reasons.append(f"  {format.model_type}: {reason}")
    if not reasons:
        raise UserError(
            f"the Hugging Face format '{model_type}' cannot hold this model: the format is not {model.shape}"
        )
    raise UserError("no Hugging Face format can hold this model:\n" + "\n".join(reasons))


def _try_format(format: Format, model: ModelConfig) -> tuple[dict[str, Any], str | None]:
    """Return the fields that a format writes and the reason why it cannot represent the model, or None if it can."""
    if getattr(model.decoder, "kind", "transformer") != "transformer":
        return {}, "it has no recurrent layers"
    try:
        fields = format.write(model)
        architecture = fields["architectures"][0]
        names = frozenset(b.name for b in model_bindings(format, model, architecture))
        again = format.read(Fields(fields, CONFIG), ModelFiles(architecture, names))
    except (AttributeError, ValueError, TypeError) as error:
        # Formats access fields that only their own kind of model has, such as `block.mlp.dim`.
        return {}, f"its structure differs ({str(error).splitlines()[0]})"
    return fields, _difference(_computation(model), _computation(again))


def export_model(
    directory: Path,
    model: ModelConfig,
    params: Params,
    dtype: np.dtype,
    *,
    dtypes: Mapping[str, np.dtype] | None = None,
    model_type: str | None = None,
    max_bytes: int = MAX_FILE_BYTES,
) -> Format:
    """Write config.json and the weights into an existing directory.

    Args:
      dtypes: the dtypes that differ from `dtype`, by tensor name.
    """
    format, fields = find_format(model, model_type)
    plans = [
        TensorPlan(b.name, b.shape, (dtypes or {}).get(b.name, dtype), partial(_file_tensor, params, b))
        for b in model_bindings(format, model, fields["architectures"][0])
    ]
    write_weights(directory, sorted(plans, key=lambda tensor: tensor.name), max_bytes)
    (directory / CONFIG).write_text(json.dumps(fields | {"dtype": dtype.name}, indent=2) + "\n", encoding="utf-8")
    return format


def model_bindings(format: Format, model: ModelConfig, architecture: str) -> list[Binding]:
    """Return the tensors of a model's file; raise if the format has no tensor for a parameter."""
    shapes = flat_shapes(abstract_params(model)[0])
    bound = bindings(format.table(model), model, shapes, format.base_of(architecture))
    covered = {part.path for binding in bound for part in binding.parts}
    if missing := sorted(set(shapes) - covered):
        raise ValueError(f"it has no tensor for parameter {missing[0]}")
    return bound


def _file_tensor(params: Params, binding: Binding) -> np.ndarray:
    parts = [_slice(params, part) for part in binding.parts]
    return binding.layout.to_theirs(parts[0] if len(parts) == 1 else np.stack(parts), binding.sizes)


def _slice(params: Params, part: Part) -> np.ndarray:
    leaf = params
    for name in part.path.split("/"):
        leaf = leaf[name]
    return np.asarray(leaf[part.index] if part.index else leaf)


# ---------------------------------------------------------------- comparison of models
# Fields that only training uses: a format need not preserve them.
_TRAINING = frozenset(("dropout", "init", "load_balance", "router_z"))


def _computation(tree: Any) -> Any:
    """Return the fields that determine the model's output; defaults are filled in, so equivalent configs are equal."""
    if isinstance(tree, ModelConfig):
        return _computation(tree.model_dump(mode="json"))
    if isinstance(tree, list):
        return [_computation(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kept = {name: _computation(value) for name, value in tree.items() if name not in _TRAINING}
    if "num_kv_heads" in kept:
        kept["num_kv_heads"] = kept["num_kv_heads"] or kept["num_heads"]
        kept["scale"] = round(kept["scale"] or kept["head_dim"] ** -0.5, 12)
    if "labels" in kept and tuple(kept["labels"]) == default_labels(kept["num_classes"] or 0):
        kept["labels"] = []
    if kept.get("kind") == "rms":
        kept["bias"] = False
    if kept.get("kind") == "rope" and kept["fraction"] == 1.0:
        kept["pairing"] = "either"  # the tables convert between both pairings
    return kept


def _difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """Describe the first field in which two configs differ; None if they are equal."""
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
    return None if ours == theirs else f"its {path} would be {_summary(theirs)}, not {_summary(ours)}"


def _summary(value: Any) -> str:
    if isinstance(value, dict):
        return value.get("kind", "set")
    return "a list" if isinstance(value, list) else repr(value)
