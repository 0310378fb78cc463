"""Tables of tensor names: which tensor of a Hugging Face file is which parameter of ours, and how their shapes differ.

One `Entry` stands for a tensor of every layer and of every expert; `bindings` spells them out for one model. The same
bindings serve import and export, so that neither can know a name that the other does not.
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
    """Axes regrouped and reordered, written like `(N H) D -> D N H`: theirs, then ours.

    A number is an axis of that length. A 1 on their side alone is dropped.
    """

    text: str

    @cached_property
    def theirs(self) -> list[list[str]]:
        """Letters of each axis of the tensor in the file."""
        return _groups(self.text.partition("->")[0])

    @cached_property
    def ours(self) -> list[list[str]]:
        return _groups(self.text.partition("->")[2])

    def sizes(self, shape: tuple[int, ...], num_parts: int) -> dict[str, int]:
        """Length of every letter, from the shape of a parameter of ours."""
        lengths = shape if num_parts == 1 else (num_parts, *shape)
        sizes = {letter: int(letter) for group in self.theirs for letter in group if letter.isdigit()}
        for group, length in zip(self.ours, lengths, strict=True):
            open_letters = [letter for letter in group if letter not in sizes]
            known = math.prod(sizes[letter] for letter in group if letter in sizes)
            assert len(open_letters) <= 1, f"{self.text}: the lengths of {open_letters} cannot be told from {shape}"
            if length % known or (not open_letters and length != known):
                raise ValueError(f"a dimension of {length} is not made of {' '.join(group)}")
            sizes |= {letter: length // known for letter in open_letters}
        return sizes

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return _shape(self.theirs, sizes)

    def to_ours(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """A view, unless letters that were apart become one axis."""
        kept = [letter for letter in itertools.chain(*self.theirs) if letter in self._order]
        spread = array.reshape([sizes[letter] for letter in kept])
        return spread.transpose([kept.index(letter) for letter in self._order]).reshape(_shape(self.ours, sizes))

    def to_theirs(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        kept = [letter for letter in itertools.chain(*self.theirs) if letter in self._order]
        spread = array.reshape([sizes[letter] for letter in self._order])
        return spread.transpose([self._order.index(letter) for letter in kept]).reshape(self.file_shape(sizes))

    def neighbours(self) -> "Rearrangement":
        """For a head whose channels turn in pairs `2i, 2i + 1` here and `i, i + half` there, as in all these files."""
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

    `name` may hold `{base}` (the prefix of the bare model), `{layer}` and `{expert}`; `paths` may hold `{place}`.
    Several paths are the parts of a fused tensor, which the form lists along a leading axis P.
    """

    name: str
    paths: tuple[str, ...]
    form: Rearrangement


class Part(NamedTuple):
    """A parameter of ours, or a slice of it: `index` leads over layers and experts."""

    path: str
    index: tuple[int, ...]


class Binding(NamedTuple):
    """One tensor of a file and what it is here."""

    name: str
    parts: tuple[Part, ...]
    form: Rearrangement
    shape: tuple[int, ...]
    """Of the tensor in the file."""
    sizes: Mapping[str, int]


def entry(name: str, paths: str | tuple[str, ...], form: str) -> Entry:
    return Entry(name, (paths,) if isinstance(paths, str) else paths, Rearrangement(form))


def bindings(
    entries: Iterable[Entry], model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], base: str
) -> list[Binding]:
    """Every tensor of a model's file; an entry whose parameters the model does not have stands for none."""
    found = []
    for row in entries:
        for layer, (place, depth) in enumerate(_places(row, model)):
            paths = [path.format(place=place) for path in row.paths]
            present = [path in shapes for path in paths]
            if not any(present):
                continue
            assert all(present), f"{row.name}: of {paths} the model has only some"
            form = row.form.neighbours() if _by_neighbours(model, paths, layer) else row.form
            lead = (depth,) if place else ()
            experts = range(shapes[paths[0]][len(lead)]) if "{expert}" in row.name else (None,)
            for expert in experts:
                index = lead if expert is None else (*lead, expert)
                sizes = form.sizes(shapes[paths[0]][len(index) :], len(paths))
                name = row.name.format(base=base, layer=layer, expert=expert)
                parts = tuple(Part(path, index) for path in paths)
                found.append(Binding(name, parts, form, form.file_shape(sizes), sizes))
    return found


def _by_neighbours(model: ModelConfig, paths: Sequence[str], layer: int) -> bool:
    """Whether the parameter's head channels are rotated by position in neighbouring pairs."""
    if not re.search(r"/attention/(q|k|q_norm|k_norm)/", paths[0]):
        return False
    position = getattr(model, paths[0].partition("/")[0]).block(layer).attention.position
    neighbours = isinstance(position, Rope) and position.pairing == "neighbours"
    if neighbours and len(paths) > 1:
        raise ValueError("neighbouring channels turn together, and one tensor holds query, key and value")
    return neighbours


def _places(row: Entry, model: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Where the layers of the entry's stack keep their parameters; one empty place if it is not about layers."""
    if "{layer}" not in row.name:
        return (("", 0),)
    stack: StackConfig = getattr(model, row.paths[0].partition("/")[0])
    return stack.places


def flat_shapes(shapes: PyTree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Path to shape of every parameter, from a tree of shapes."""
    flat: dict[str, tuple[int, ...]] = {}
    for name, value in shapes.items():
        path = f"{prefix}{name}"
        flat |= flat_shapes(value, f"{path}/") if isinstance(value, Mapping) else {path: tuple(value.shape)}
    return flat
