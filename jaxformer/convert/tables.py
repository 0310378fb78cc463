"""Tables of tensor names: which tensor of a Hugging Face file is which parameter of ours, and how their shapes differ.

One `Entry` stands for a tensor of every layer and of every expert; `bindings` spells them out for one model. The same
bindings serve import and export, so that neither can know a name that the other does not.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.typing import PyTree


@dataclass(frozen=True)
class Rearrangement:
    """Axes regrouped and reordered, written like `(N H) D -> D N H`: theirs, then ours; empty leaves them alone."""

    text: str

    @cached_property
    def theirs(self) -> list[list[str]]:
        """Letters of each axis of the tensor in the file."""
        return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", self.text.partition("->")[0])]

    @cached_property
    def ours(self) -> list[str]:
        return self.text.partition("->")[2].split()

    def sizes(self, shape: tuple[int, ...], num_parts: int) -> dict[str, int]:
        """Length of every letter, from the shape of a parameter of ours."""
        lengths = shape if num_parts == 1 else (num_parts, *shape)
        return dict(zip(self.ours, lengths, strict=True)) | {"1": 1}

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.theirs)

    def to_ours(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        flat = list(itertools.chain(*self.theirs))
        spread = array.reshape([sizes[letter] for letter in flat])
        kept = [letter for letter in flat if letter != "1"]
        spread = spread.reshape([sizes[letter] for letter in kept])
        return spread.transpose([kept.index(letter) for letter in self.ours])

    def to_theirs(self, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        kept = [letter for group in self.theirs for letter in group if letter != "1"]
        return array.transpose([self.ours.index(letter) for letter in kept]).reshape(self.file_shape(sizes))


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
            lead = (depth,) if place else ()
            experts = range(shapes[paths[0]][len(lead)]) if "{expert}" in row.name else (None,)
            for expert in experts:
                index = lead if expert is None else (*lead, expert)
                sizes = row.form.sizes(shapes[paths[0]][len(index) :], len(paths))
                name = row.name.format(base=base, layer=layer, expert=expert)
                parts = tuple(Part(path, index) for path in paths)
                found.append(Binding(name, parts, row.form, row.form.file_shape(sizes), sizes))
    return found


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
