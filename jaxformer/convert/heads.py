"""Heads in config.json: the name of the model class, the names of the classes and the kind of classification."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxformer.config import ModelConfig, PoolerConfig, Problem
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import ModelFiles
from jaxformer.errors import UserError

HeadKind = Literal["vocabulary", "classes", "tags", "none"]
CLASSES, TAGS = "ForSequenceClassification", "ForTokenClassification"
_PROBLEMS: Mapping[str, Problem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}


def default_labels(num_classes: int) -> tuple[str, ...]:
    """The names that transformers gives to classes without names."""
    return tuple(f"LABEL_{i}" for i in range(num_classes))


def head_kind(model: ModelConfig) -> HeadKind:
    """What a model predicts; `none` if it returns hidden states or sentence vectors."""
    if model.pooler is not None and model.pooler.num_classes is not None:
        return "tags" if model.pooler.pooling == "none" else "classes"
    return "none" if model.head is None else "vocabulary"


# ---------------------------------------------------------------- reading
def read_classes(fields: Fields, files: ModelFiles, num_labels: int = 2) -> dict[str, Any]:
    """Return the builder's parameters of a classifier or tagger; none for other architectures.

    Args:
      num_labels: the number of classes if config.json does not have it.
    """
    if files.architecture.endswith(TAGS):
        num_classes, labels = _read_labels(fields, num_labels)
        return {"num_tags": num_classes, "labels": labels}
    if files.architecture.endswith(CLASSES):
        num_classes, labels = _read_labels(fields, num_labels)
        return {"num_classes": num_classes, "labels": labels, "problem": _read_problem(fields, num_classes)}
    return {}


def _read_labels(fields: Fields, num_labels: int) -> tuple[int, tuple[str, ...]]:
    """Return the number of classes, and their names unless they are the default ones."""
    names = fields.take("id2label", None)
    if names is None:
        return fields.take("num_labels", fields.take("_num_labels", num_labels)), ()
    ids = [str(i) for i in range(len(names))]
    if not isinstance(names, dict) or not names or set(map(str, names)) != set(ids):
        raise UserError(f"{fields.where}: id2label = {names!r} must map the ids 0, 1, 2, ... to names")
    by_id = {str(id): str(name) for id, name in names.items()}
    labels = tuple(by_id[id] for id in ids)
    return len(labels), () if labels == default_labels(len(labels)) else labels


def _read_problem(fields: Fields, num_classes: int) -> Problem:
    value = fields.take("problem_type", None)
    if value is None:
        return _default_problem(num_classes)
    if value not in _PROBLEMS:
        raise UserError(f"{fields.where}: problem_type = {value!r} is not supported; supported: {', '.join(_PROBLEMS)}")
    return _PROBLEMS[value]


def _default_problem(num_classes: int) -> Problem:
    """The problem if `problem_type` is null; transformers then regards a single class as a number to predict."""
    return "regression" if num_classes == 1 else "single_label"


# ---------------------------------------------------------------- writing
def write_head(model: ModelConfig, architectures: Mapping[HeadKind, str]) -> dict[str, Any]:
    """Return the fields `architectures` and those of the classes; raise if the format has no model with this head."""
    kind = head_kind(model)
    if kind not in architectures:
        raise ValueError(f"it has no model with {_NAMES[kind]}")
    fields: dict[str, Any] = {"architectures": [architectures[kind]]}
    return fields | _write_classes(model.pooler) if kind in ("classes", "tags") else fields


_NAMES: Mapping[HeadKind, str] = {
    "vocabulary": "logits over the vocabulary",
    "classes": "classes of texts",
    "tags": "classes of tokens",
    "none": "no head",
}


def decoder_architectures(stem: str) -> dict[HeadKind, str]:
    return {"vocabulary": f"{stem}ForCausalLM", "classes": f"{stem}{CLASSES}", "tags": f"{stem}{TAGS}"}


def _write_classes(pooler: PoolerConfig) -> dict[str, Any]:
    labels = pooler.labels or default_labels(pooler.num_classes)
    names = {problem: name for name, problem in _PROBLEMS.items()}
    is_default = pooler.pooling == "none" or pooler.problem == _default_problem(pooler.num_classes)
    if pooler.problem == "single_label" and not is_default:
        raise ValueError("transformers regards a single class as a regression: set pooler.problem or add a class")
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": None if is_default else names[pooler.problem],
    }
