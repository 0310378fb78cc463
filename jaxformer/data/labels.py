"""Labels of examples: names to ids and numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.config import PoolerConfig
from jaxformer.errors import UserError


def encode_label(label: Any, pooler: PoolerConfig) -> np.ndarray:
    """A class id for single_label, 1 or 0 for every class for multi_label, numbers for regression."""
    if pooler.problem == "regression":
        return np.array([float(each) for each in np.atleast_1d(label)], np.float32)
    if pooler.problem == "multi_label":
        ids = [label_id(each, pooler.labels) for each in label]
        return np.isin(np.arange(pooler.num_classes), ids).astype(np.float32)
    return np.array([label_id(label, pooler.labels)], np.int32)


def encode_tags(tags: Sequence[str], words: Sequence[str], pooler: PoolerConfig) -> list[int]:
    """The id of the tag of every word."""
    if len(tags) != len(words):
        raise UserError(f"an example has {len(words)} words but {len(tags)} tags: give one tag per word")
    return [label_id(tag, pooler.labels) for tag in tags]


def label_id(label: Any, labels: Sequence[str]) -> int:
    if str(label) not in labels:
        raise UserError(f"label {label!r} is not one of the labels of the model: {', '.join(labels)}")
    return labels.index(str(label))
