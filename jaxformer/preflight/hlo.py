"""The collectives of a compiled program, read from its optimised HLO text.

The text names every instruction once, also in the body of a loop. Counts and bytes here are those of one execution of
the program: the bodies of loops are multiplied by their number of iterations.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8} | {
    f"{sign}{bits}": bits // 8 for sign in "su" for bits in (8, 16, 32, 64)
}

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """All executions of one kind of collective along the same mesh axes, on one chip and in one step."""

    kind: str
    """Its HLO opcode."""
    axis: str
    """Mesh axes joined by `+`."""
    count: int
    bytes: int
    """Size of the whole arrays: what an all-gather returns, what a reduce-scatter reads."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that a ring of chips sends per chip, for rings with many chips."""
        return self.bytes * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    line: str

    @cached_property
    def operands(self) -> list[str]:
        """Names of the operands."""
        start = self.line.index(f" {self.opcode}(") + len(self.opcode) + 2
        return re.findall(r"%([\w.\-]+)", self.line[start : _closing(self.line, start)])

    def reference(self, attribute: str) -> str | None:
        """The computation that an attribute such as `body=%name` refers to."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.line)
        return match and match[1]


class Program:
    """The computations of an HLO module."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] | None = None
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self.computations[match["name"]] = []
                if match["entry"]:
                    self.entry = match["name"]
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current.append(Instruction(match["name"], match["type"], match["opcode"], line))

    def collectives(self, mesh: Mapping[str, int]) -> list[Collective]:
        """The collectives of one execution, largest first; the program's devices are those of the mesh in order."""
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for instruction, computation, repeats in self.executed:
            # The TPU compiler also writes a reduce-scatter as a fusion with an all-reduce, of which it keeps one part.
            kind = "reduce-scatter" if "all-reduce-scatter" in computation else _kind(instruction)
            key = (kind, _axes(instruction.line, mesh))
            counts[key] += repeats
            sizes[key] += repeats * _array_bytes(instruction, mesh)
        found = [Collective(*key, counts[key], sizes[key]) for key in counts if key[1]]
        return sorted(found, key=lambda each: -each.wire_bytes)

    @cached_property
    def executed(self) -> list[tuple[Instruction, str, int]]:
        """Every collective instruction, with the name of its computation and the number of its executions."""
        return [found for found in self._walk(self.entry, 1) if _kind(found[0]) is not None]

    @cached_property
    def executions(self) -> Counter[str]:
        """How often every computation is executed; those inside a fusion are not listed."""
        counts: Counter[str] = Counter({self.entry: 1})
        for instruction, _, repeats in self._walk(self.entry, 1):
            if instruction.opcode == "while":
                counts[instruction.reference("body")] += repeats * self._num_trips(instruction)
            elif instruction.opcode == "call":
                counts[instruction.reference("to_apply")] += repeats
            elif instruction.opcode == "conditional":
                counts[self._branch(instruction)] += repeats
        return counts

    def _walk(self, name: str, repeats: int) -> Iterator[tuple[Instruction, str, int]]:
        for instruction in self.computations[name]:
            yield instruction, name, repeats
            if instruction.opcode == "while":
                trips = self._num_trips(instruction)
                yield from self._walk(instruction.reference("body"), repeats * trips)
            elif instruction.opcode in ("fusion", "call", "async-start"):
                called = instruction.reference("calls") or instruction.reference("to_apply")
                if called in self.computations and not (instruction.opcode == "fusion" and self._continues(called)):
                    yield from self._walk(called, repeats)
            elif instruction.opcode == "conditional":
                yield from self._walk(self._branch(instruction), repeats)

    def _branch(self, conditional: Instruction) -> str:
        """The branch that does the work: the true one, or the last; never are both executed."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", conditional.line)
        return branches[1].split(",")[-1].strip(" %") if branches else conditional.reference("true_computation")

    def _continues(self, name: str) -> bool:
        """Whether a fused computation only continues or ends a collective that another one starts.

        The TPU compiler splits a collective into fusions with matrix products, each of which names it again.
        """
        lines = [instruction.line for instruction in self.computations[name]]
        has_collective = any(_kind(instruction) for instruction in self.computations[name])
        starts = any('custom_call_target="AsyncCollectiveStart"' in line for line in lines)
        return has_collective and not starts and "reduce-scatter" not in name

    def _num_trips(self, loop: Instruction) -> int:
        """The number of iterations of a `while`: the constant that its condition compares the counter with."""
        if match := re.search(r'known_trip_count":\{"n":"(\d+)"\}', loop.line):
            return int(match[1])
        condition = self.computations[loop.reference("condition")]
        limits = [m for each in condition if (m := re.search(r"constant\((\d+)\)", each.line))]
        return int(limits[0][1]) if len(limits) == 1 else 1


def _kind(instruction: Instruction) -> str | None:
    """The kind of a collective; None for other instructions and for those that wait for a collective."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in KINDS else None


def _array_bytes(instruction: Instruction, mesh: Mapping[str, int]) -> int:
    """Size of the whole arrays of a collective."""
    type_ = instruction.type
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        type_ = split_tuple(type_)[1]  # (operands, results, ...)
    size = sum(_shape_bytes(*match) for match in _SHAPE.findall(type_))
    if _kind(instruction) == "reduce-scatter":
        size *= len(_groups(instruction.line, math.prod(mesh.values()))[0])
    return int(size)


def _shape_bytes(dtype: str, dims: str) -> float:
    itemsize = 1 if dtype.startswith("f8") else BYTES.get(dtype, 0)
    return itemsize * math.prod(int(n) for n in dims.split(",") if n)


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one before `start`."""
    depth = 1
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


def split_tuple(text: str) -> list[str]:
    """The elements of a tuple type, of which some may be tuples."""
    parts, depth, start = [], 0, 1
    for i, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if (character == "," and depth == 1) or (character == ")" and depth == 0):
            parts.append(text[start:i].strip())
            start = i + 1
    return parts


# ---------------------------------------------------------------- mesh axes
def _axes(line: str, mesh: Mapping[str, int]) -> str:
    """The mesh axes along which the devices of a group differ, joined by `+`; empty for groups of one device."""
    sizes = tuple(mesh.values())
    positions = np.stack(np.unravel_index(_groups(line, math.prod(sizes)), sizes), axis=-1)
    differs = (positions != positions[:, :1]).any(axis=(0, 1))
    return "+".join(axis for axis, varies in zip(mesh, differs, strict=True) if varies)


def _groups(line: str, num_devices: int) -> np.ndarray:
    """The groups of devices of a collective, [groups, devices]."""
    if match := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", line):
        return np.array([[int(i) for i in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)\}", match[1])])
    if match := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", line):
        return np.array([[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])])
    # For example [2,8]<=[4,4]T(1,0): the devices as an array [4, 4], transposed, in 2 groups of 8.
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = ([int(n) for n in each.split(",")] if each else None for each in match.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices if order is None else devices.transpose(order)).reshape(shape)
    return np.arange(num_devices)[None]
