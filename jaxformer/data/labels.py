"""Labels of examples: the names found in the training data, and names to ids and numbers.

The names of a model's classes are stored in its config (`model.pooler.labels`), in the order of their ids.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from jaxformer.config import PoolerConfig, RunConfig
from jaxformer.config.overrides import explained
from jaxformer.data.sources import Documents, open_split
from jaxformer.errors import UserError

SHOWN = 10  # names in an error message


def complete_labels(config: RunConfig) -> RunConfig:
    """Fill in the names of the classes from the training data, if the objective predicts classes without names."""
    head, pooler = config.data.objective.head, config.model.pooler
    if head == "vocabulary" or pooler.labels or pooler.problem == "regression":
        return config
    labels = find_labels(open_split(config.data, "train"), "tags" if head == "tags" else "label")
    if len(labels) != pooler.num_classes:
        to_numbers = ", or model.pooler.problem=regression to predict numbers" if all(map(_is_number, labels)) else ""
        raise UserError(
            f"data.train has {len(labels)} label{'s' * (len(labels) != 1)} ({_shown(labels)}), but "
            f"model.pooler.num_classes={pooler.num_classes}: set model.pooler.num_classes={len(labels)}, or name all "
            f"classes in model.pooler.labels{to_numbers}"
        )
    try:
        return config.replace(model=config.model.replace(pooler=pooler.replace(labels=labels)))
    except ValidationError as error:  # the labels decide, for example, which values a metric reports
        where = f"with the labels of data.train ({_shown(labels)}): "
        raise UserError("\n".join(where + line for line in explained(error))) from None


def find_labels(documents: Documents, field: str) -> tuple[str, ...]:
    """All labels in the data, sorted; numbers are sorted by their value."""
    if field not in documents[0]:
        raise UserError(
            f"data.train has {' and '.join(documents[0])}, but the objective needs {field}: name the field or column "
            f"with {field}= of the source"
        )
    names = {name for example in documents for name in label_names(example[field])}
    return tuple(sorted(names, key=lambda name: (not _is_number(name), float(name) if _is_number(name) else 0.0, name)))


def label_names(label: Any) -> list[str]:
    """The names in a label, which is one name or number, or a list of names."""
    return [str(each) for each in label] if isinstance(label, list | tuple) else [str(label)]


def encode_label(label: Any, pooler: PoolerConfig) -> np.ndarray:
    """A class id for single_label, 1 or 0 for every class for multi_label, numbers for regression."""
    if pooler.problem == "regression":
        return _numbers(label, pooler.num_classes)
    ids = [label_id(name, pooler.labels) for name in label_names(label)]
    if pooler.problem == "multi_label":
        return np.isin(np.arange(pooler.num_classes), ids).astype(np.float32)
    if len(ids) != 1:
        raise UserError(f"label {label!r} has {len(ids)} names, but model.pooler.problem=single_label: set multi_label")
    return np.array(ids, np.int32)


def encode_tags(tags: Sequence[str], words: Sequence[str], pooler: PoolerConfig) -> list[int]:
    """The id of the tag of every word."""
    if len(tags) != len(words):
        raise UserError(f"{len(words)} words but {len(tags)} tags: give one tag per word")
    return [label_id(tag, pooler.labels) for tag in tags]


def label_id(name: str, labels: Sequence[str]) -> int:
    if name not in labels:
        raise UserError(
            f"label {name!r} is not one of model.pooler.labels ({_shown(labels)}): correct it, or train a model that "
            "has this label"
        )
    return labels.index(name)


def _numbers(label: Any, num_classes: int) -> np.ndarray:
    values = list(label) if isinstance(label, list | tuple) else [label]
    try:
        numbers = np.array([float(value) for value in values], np.float32)
    except ValueError:
        raise UserError(f"label {label!r} is not a number, which model.pooler.problem=regression needs") from None
    if not np.isfinite(numbers).all() or len(numbers) != num_classes:
        raise UserError(f"label {label!r} must be {num_classes} finite numbers (model.pooler.num_classes)")
    return numbers


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _shown(labels: Sequence[str]) -> str:
    return ", ".join([*labels[:SHOWN], *["..."] * (len(labels) > SHOWN)])
