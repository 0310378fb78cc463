"""Tables that map the tensors of a Hugging Face file to jaxformer parameters, with their different axis orders.

One `Entry` covers the same tensor in all layers and experts; `bindings` expands the entries for one model. Import and
export share the bindings, so they always agree on names and layouts.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxformer.config import ModelConfig, Rope, StackConfig
from jaxformer.typing import PyTree


@dataclass(frozen=True)
class Rearrangement:
    """An einops-style pattern from the axes of a tensor in the file to those of a parameter: `(N H) D -> D N H`.

    A number is an axis of that length. A 1 that occurs only on the file's side is squeezed.
    """

    text: str

    @cached_property
    def theirs(self) -> list[list[str]]:
        """The letters of each axis of the tensor in the file; `(N H)` is one axis with two letters."""
        return _groups(self.text.partition("->")[0])

    @cached_property
    def ours(self) -> list[list[str]]:
        """The letters of each axis of the parameter."""
        return _groups(self.text.partition("->")[2])

    def sizes(self, shape: tuple[int, ...], num_parts: int) -> dict[str, int]:
        """Return the size of every letter, given the shape of the parameter."""
        lengths = shape if num_parts == 1 else (num_parts, *shape)
        sizes = {letter: int(letter) for group in self.theirs for letter in group if letter.isdigit()}
        for group, length in zip(self.ours, lengths, strict=True):
            unknown = [letter for letter in group if letter not in sizes]
            known = math.prod(sizes[letter] for letter in group if letter in sizes)
            assert len(unknown) <= 1, f"{self.text}: the lengths of {unknown} do not follow from {shape}"
            if length % known or (not unknown and length != known):
                raise ValueError(f"a dimension of {length} cannot be split into axes {' '.join(group)}")
            sizes |= {letter: length // known for letter in unknown}
        return sizes

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return _shape(self.theirs, sizes)

    def to_ours(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Convert a tensor of the file to a parameter; a view, unless letters that are not adjacent are merged."""
        kept = [letter for letter in itertools.chain(*self.theirs) if letter in self._order]
        split = array.reshape([sizes[letter] for letter in kept])
        return split.transpose([kept.index(letter) for letter in self._order]).reshape(_shape(self.ours, sizes))

    def to_theirs(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        kept = [letter for letter in itertools.chain(*self.theirs) if letter in self._order]
        split = array.reshape([sizes[letter] for letter in self._order])
        return split.transpose([self._order.index(letter) for letter in kept]).reshape(self.file_shape(sizes))

    def with_neighbour_pairs(self) -> "Rearrangement":
        """The same layout for a model whose RoPE pairs channels `2i, 2i + 1`; files pair `i, i + head_dim / 2`."""
        theirs, _, ours = self.text.partition("->")
        return Rearrangement(
            f"{theirs.replace('H', '2 h' if '(' in theirs else '(2 h)')}->{ours.replace('H', '(h 2)')}"
        )

    @cached_property
    def _order(self) -> list[str]:
        return list(itertools.chain(*self.ours))


def _groups(side: str) -> list[list[str]]:
    return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", side)]


def _shape(groups: list[list[str]], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[letter] for letter in group) for group in groups)


class Entry(NamedTuple):
    """A tensor name, or one name pattern for all layers and experts.

    `name` may hold `{base}` (see `Format.base`), `{layer}` and `{expert}`; `paths` may hold `{block}`. A fused tensor
    has several paths, and `layout` stacks their parameters along a leading axis P.
    """

    name: str
    paths: tuple[str, ...]
    layout: Rearrangement


class Part(NamedTuple):
    """A parameter, or its slice for one layer or expert; `index` addresses the leading axes."""

    path: str
    index: tuple[int, ...]


class Binding(NamedTuple):
    """One tensor of a file, and the parameters or slices that it stores."""

    name: str
    parts: tuple[Part, ...]
    layout: Rearrangement
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    sizes: Mapping[str, int]


def entry(name: str, paths: str | tuple[str, ...], layout: str) -> Entry:
    return Entry(name, (paths,) if isinstance(paths, str) else paths, Rearrangement(layout))


def bindings(
    entries: Iterable[Entry], model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], base: str
) -> list[Binding]:
    """Expand the table into every tensor of a model's file, skipping entries for parameters that the model lacks.

    Raises ValueError if the model has only some of the parameters of a fused tensor.

    Args:
      shapes: the shape of every parameter, by path.
      base: the value of `{base}` in tensor names.
    """
    expanded = []
    for row in entries:
        for layer, (block, depth) in enumerate(_blocks(row, model)):
            paths = [path.format(block=block) for path in row.paths]
            present = [path in shapes for path in paths]
            if not any(present):
                continue
            if not all(present):
                raise ValueError(f"it stores {' and '.join(paths)} as one tensor, but the model has only some of them")
            layout = row.layout.with_neighbour_pairs() if _pairs_neighbours(model, paths, layer) else row.layout
            lead = (depth,) if block else ()
            experts = range(shapes[paths[0]][len(lead)]) if "{expert}" in row.name else (None,)
            for expert in experts:
                index = lead if expert is None else (*lead, expert)
                sizes = layout.sizes(shapes[paths[0]][len(index) :], len(paths))
                name = row.name.format(base=base, layer=layer, expert=expert)
                parts = tuple(Part(path, index) for path in paths)
                expanded.append(Binding(name, parts, layout, layout.file_shape(sizes), sizes))
    return expanded


def _pairs_neighbours(model: ModelConfig, paths: Sequence[str], layer: int) -> bool:
    """Whether the parameter is a query or key projection or norm whose RoPE pairs neighbouring channels."""
    if not re.search(r"/attention/(q|k|q_norm|k_norm)/", paths[0]):
        return False
    position = getattr(model, paths[0].partition("/")[0]).block(layer).attention.position
    neighbours = isinstance(position, Rope) and position.pairing == "neighbours"
    if neighbours and len(paths) > 1:
        raise ValueError("RoPE with pairing='neighbours' is not supported for fused query-key-value tensors")
    return neighbours


def _blocks(row: Entry, model: ModelConfig) -> tuple[tuple[str, int], ...]:
    """For every layer of the entry's stack: the block name, and the layer's index in the stacked parameters.

    An entry without `{layer}` has a single block with an empty name.
    """
    if "{layer}" not in row.name:
        return (("", 0),)
    stack: StackConfig = getattr(model, row.paths[0].partition("/")[0])
    return stack.places


def flat_shapes(shapes: PyTree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Flatten a tree of (abstract) arrays into a dict from parameter path to shape."""
    flat: dict[str, tuple[int, ...]] = {}
    for name, value in shapes.items():
        path = f"{prefix}{name}"
        flat |= flat_shapes(value, f"{path}/") if isinstance(value, Mapping) else {path: tuple(value.shape)}
    return flat
