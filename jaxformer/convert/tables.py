"""Tables of tensor names: which tensor of a Hugging Face file is which parameter here, and how their shapes differ.

One `Entry` stands for a tensor of every layer and expert; `bindings` expands the entries for one model. Import and
export use the same bindings, so neither can know a name that the other does not.
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
    """How the axes of a tensor in a file become those of a parameter, written like `(N H) D -> D N H`.

    A number is an axis of that length. A 1 that only the file has is dropped.
    """

    text: str

    @cached_property
    def theirs(self) -> list[list[str]]:
        """The letters of each axis of the tensor in the file."""
        return _groups(self.text.partition("->")[0])

    @cached_property
    def ours(self) -> list[list[str]]:
        """The letters of each axis of the parameter."""
        return _groups(self.text.partition("->")[2])

    def sizes(self, shape: tuple[int, ...], num_parts: int) -> dict[str, int]:
        """The length of every letter, from the shape of the parameter."""
        lengths = shape if num_parts == 1 else (num_parts, *shape)
        sizes = {letter: int(letter) for group in self.theirs for letter in group if letter.isdigit()}
        for group, length in zip(self.ours, lengths, strict=True):
            unknown = [letter for letter in group if letter not in sizes]
            known = math.prod(sizes[letter] for letter in group if letter in sizes)
            assert len(unknown) <= 1, f"{self.text}: the lengths of {unknown} do not follow from {shape}"
            if length % known or (not unknown and length != known):
                raise ValueError(f"a dimension of {length} is not made of {' '.join(group)}")
            sizes |= {letter: length // known for letter in unknown}
        return sizes

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return _shape(self.theirs, sizes)

    def to_ours(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """A view of the tensor, or a copy where letters that were not adjacent become one axis."""
        kept = [letter for letter in itertools.chain(*self.theirs) if letter in self._order]
        spread = array.reshape([sizes[letter] for letter in kept])
        return spread.transpose([kept.index(letter) for letter in self._order]).reshape(_shape(self.ours, sizes))

    def to_theirs(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        kept = [letter for letter in itertools.chain(*self.theirs) if letter in self._order]
        spread = array.reshape([sizes[letter] for letter in self._order])
        return spread.transpose([self._order.index(letter) for letter in kept]).reshape(self.file_shape(sizes))

    def with_neighbour_pairs(self) -> "Rearrangement":
        """The same for a head whose rotary pairs are channels `2i, 2i + 1` here; in files they are `i, i + half`."""
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
    """One tensor, or one per layer and expert.

    `name` may hold `{base}` (the prefix that a bare model lacks), `{layer}` and `{expert}`; `paths` may hold `{block}`.
    Several paths are the parts of a fused tensor, which `layout` has along a leading axis P.
    """

    name: str
    paths: tuple[str, ...]
    layout: Rearrangement


class Part(NamedTuple):
    """A parameter, or the slice of it for one layer or expert, whose `index` is along the leading axes."""

    path: str
    index: tuple[int, ...]


class Binding(NamedTuple):
    """One tensor of a file, and the parameters or slices of parameters that it holds."""

    name: str
    parts: tuple[Part, ...]
    layout: Rearrangement
    shape: tuple[int, ...]
    """Of the tensor in the file."""
    sizes: Mapping[str, int]


def entry(name: str, paths: str | tuple[str, ...], layout: str) -> Entry:
    return Entry(name, (paths,) if isinstance(paths, str) else paths, Rearrangement(layout))


def bindings(
    entries: Iterable[Entry], model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], base: str
) -> list[Binding]:
    """Every tensor of a model's file. Entries for parameters that the model does not have are skipped.

    Args:
      shapes: of the parameters, by path.
      base: the prefix of tensor names, which replaces `{base}`.
    """
    expanded = []
    for row in entries:
        for layer, (block, depth) in enumerate(_blocks(row, model)):
            paths = [path.format(block=block) for path in row.paths]
            present = [path in shapes for path in paths]
            if not any(present):
                continue
            assert all(present), f"{row.name}: of {paths} the model has only some"
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
    """Whether RoPE rotates neighbouring channels of the parameter's heads together."""
    if not re.search(r"/attention/(q|k|q_norm|k_norm)/", paths[0]):
        return False
    position = getattr(model, paths[0].partition("/")[0]).block(layer).attention.position
    neighbours = isinstance(position, Rope) and position.pairing == "neighbours"
    if neighbours and len(paths) > 1:
        raise ValueError("RoPE rotates neighbouring channels, and one tensor holds query, key and value")
    return neighbours


def _blocks(row: Entry, model: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Per layer of the entry's stack, its block's name and the index in its stacked parameters.

    An entry that does not stand for layers has one empty block.
    """
    if "{layer}" not in row.name:
        return (("", 0),)
    stack: StackConfig = getattr(model, row.paths[0].partition("/")[0])
    return stack.places


def flat_shapes(shapes: PyTree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by path, from a tree of arrays or abstract arrays."""
    flat: dict[str, tuple[int, ...]] = {}
    for name, value in shapes.items():
        path = f"{prefix}{name}"
        flat |= flat_shapes(value, f"{path}/") if isinstance(value, Mapping) else {path: tuple(value.shape)}
    return flat
