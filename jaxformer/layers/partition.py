"""Splits a parameter tree into a trainable and a frozen part, and merges the two again.

Parameters are stacked over layers, so a part may hold only some rows of a leaf: if only the last of four layers is
trained, the trainable leaf has one row and the frozen leaf three. Both parts keep the paths of the full tree.
"""

import fnmatch
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.config import ModelConfig, ParameterSelector, RecurrentConfig
from jaxformer.errors import UserError
from jaxformer.layers.parameters import abstract_params
from jaxformer.typing import PyTree

Rows = np.ndarray
TakeRows = Callable[[Any, Rows], Any]


class Partition:
    """A fixed split of a model's parameters into trainable and frozen ones."""

    def __init__(self, model: ModelConfig, freeze: Sequence[ParameterSelector]) -> None:
        shapes = flatten_dict(abstract_params(model)[0], sep="/")
        self._frozen = {path: _frozen_rows(path, model, freeze) for path in shapes}
        _check(self._frozen, freeze, model)

    @property
    def freezes(self) -> bool:
        """Whether anything is frozen."""
        return any(rows.any() for rows in self._frozen.values())

    def split(self, tree: PyTree, take: TakeRows = lambda leaf, rows: leaf[rows]) -> tuple[PyTree, PyTree | None]:
        """The trainable and the frozen part; the latter is None if nothing is frozen.

        Args:
          take: function that selects rows of a leaf. Pass `abstract_rows` for trees of shapes, and `whole_leaf` for
            trees with one value per leaf, such as shardings and logical axes.
        """
        if not self.freezes:
            return tree, None
        trainable, frozen = {}, {}
        for path, leaf in flatten_dict(tree, sep="/").items():
            is_frozen = self._frozen[path]
            if not is_frozen.all():
                trainable[path] = leaf if not is_frozen.any() else take(leaf, np.flatnonzero(~is_frozen))
            if is_frozen.any():
                frozen[path] = leaf if is_frozen.all() else take(leaf, np.flatnonzero(is_frozen))
        return unflatten_dict(trainable, sep="/"), unflatten_dict(frozen, sep="/")

    def merge(self, trainable: PyTree, frozen: PyTree | None) -> PyTree:
        """The full tree of arrays, without the paths that neither part has."""
        if frozen is None:
            return trainable
        trained, fixed = flatten_dict(trainable, sep="/"), flatten_dict(frozen, sep="/")
        whole = {}
        for path, is_frozen in self._frozen.items():
            if path in trained and path in fixed:
                whole[path] = _interleave(trained[path], fixed[path], is_frozen)
            elif path in trained or path in fixed:
                whole[path] = trained[path] if path in trained else fixed[path]
        return unflatten_dict(whole, sep="/")


def abstract_rows(leaf: jax.ShapeDtypeStruct, rows: Rows) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(rows), *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)


def whole_leaf(leaf: Any, rows: Rows) -> Any:
    return leaf


def _frozen_rows(path: str, model: ModelConfig, freeze: Sequence[ParameterSelector]) -> np.ndarray:
    """One boolean per row of a leaf: whether it is frozen. A leaf outside the stacks counts as one row."""
    depths, num_layers = _depths(path, model)
    is_frozen = np.zeros(max(len(depths), 1), bool)
    for selector in freeze:
        if not fnmatch.fnmatchcase(path, selector.path):
            continue
        if selector.layers is None:
            is_frozen[:] = True
        elif depths:
            selected = range(num_layers)[slice(*selector.layers)]
            is_frozen |= np.array([depth in selected for depth in depths])
    return is_frozen


def _depths(path: str, model: ModelConfig) -> tuple[list[int], int]:
    """The layer index of each row of a leaf, and the number of layers in its stack."""
    side, _, rest = path.partition("/")
    stack = {"encoder": model.encoder, "decoder": model.decoder}.get(side)
    if stack is None:
        return [], 0
    entry = rest.partition("/")[0]
    if isinstance(stack, RecurrentConfig):
        names = [f"layers_{i}" for i in range(stack.num_layers)]
    else:
        names = [name for name, _ in stack.places]
    return [depth for depth, name in enumerate(names) if name == entry], stack.num_layers


def _interleave(trained: jnp.ndarray, fixed: jnp.ndarray, is_frozen: np.ndarray) -> jnp.ndarray:
    """The rows of both parts in the order of the full leaf; consecutive rows of one part are copied together."""
    parts, used = [], {True: 0, False: 0}
    for frozen, run in groupby(is_frozen.tolist()):
        count, start = len(list(run)), used[frozen]
        parts.append((fixed if frozen else trained)[start : start + count])
        used[frozen] += count
    return jnp.concatenate(parts)


def _check(frozen: dict[str, np.ndarray], freeze: Sequence[ParameterSelector], model: ModelConfig) -> None:
    for i, selector in enumerate(freeze):
        if not any(_frozen_rows(path, model, [selector]).any() for path in frozen):
            layers = "" if selector.layers is None else f" in layers {list(selector.layers)}"
            raise UserError(
                f"train.freeze.{i}: '{selector.path}'{layers} matches no parameter; parameters are, for example: "
                f"{', '.join(list(frozen)[:3])}"
            )
    if freeze and all(rows.all() for rows in frozen.values()):
        raise UserError("train.freeze: every parameter is selected; leave at least one trainable")
