"""Bytes that one execution of a compiled program moves between a chip and its HBM, estimated from its HLO text.

Every instruction that runs reads its operands and writes its result once. A fusion that takes a slice of an operand
reads only the slice, and one that updates an array in place writes only the update. Arrays in other memories (the
layout names them: `S(1)` is the vector memory of a TPU) do not count.
"""

import math
import re
from functools import cached_property

from jaxformer.preflight.hlo import BYTES, Instruction, Program, split_tuple

# These neither read nor write: they name, group or reinterpret arrays, or wait for another instruction.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency", "domain", "iota",
}  # fmt: skip
# A kernel that gets the stacked caches of all layers and reads those of one, in a loop over layers.
_READS_ONE_LAYER = "paged_attention"
_SLICES = ("dynamic-slice", "slice", "gather")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")


def hbm_bytes(program: Program) -> int:
    """Bytes read and written by one execution of the program."""
    executions = program.executions.items()
    return int(sum(repeats * _Computation(program, name, repeats).traffic for name, repeats in executions))


class _Computation:
    """The instructions of a computation, and what each of them reads and writes."""

    def __init__(self, program: Program, name: str, repeats: int = 1) -> None:
        self.program, self.instructions, self.repeats = program, program.computations[name], repeats
        self.types = {each.name: each.type for each in self.instructions}

    @property
    def traffic(self) -> float:
        return sum(self._bytes(each) for each in self.instructions if not _is_free(each.opcode))

    def _bytes(self, instruction: Instruction) -> float:
        sizes = [array_bytes(self.types.get(name, "")) for name in instruction.operands]
        written = array_bytes(instruction.type)
        if instruction.opcode in _SLICES:
            return 2 * written
        if instruction.opcode == "dynamic-update-slice":
            return 2 * sizes[1]
        if instruction.opcode.endswith("-start"):
            return sum(sizes) + written / 2  # its type names operands and results
        called = instruction.reference("calls")
        if instruction.opcode == "fusion" and called in self.program.computations:
            fusion = _Fusion(self.program, called)
            if not fusion.updates:
                sizes, written = _without_aliases(instruction, sizes)
            return fusion.bytes(sizes, written)
        if _READS_ONE_LAYER in instruction.line:
            return sum(sizes) / self.repeats + written
        return sum(sizes) + written


class _Fusion(_Computation):
    def bytes(self, operands: list[float], written: float) -> float:
        """Bytes of a fusion with operands and a result of these sizes."""
        updated = {each.operands[0]: array_bytes(self.types[each.operands[1]]) for each in self.updates}
        for parameter, index in self._parameters.items():
            users = [each for each in self.instructions if parameter in each.operands]
            if index >= len(operands) or not operands[index]:
                continue
            if parameter in updated:
                operands[index], written = updated[parameter], written - operands[index] + updated[parameter]
            elif users and all(each.opcode in _SLICES and each.operands[0] == parameter for each in users):
                operands[index] = min(operands[index], sum(array_bytes(each.type) for each in users))
        return sum(operands) + max(written, 0)

    @cached_property
    def _parameters(self) -> dict[str, int]:
        """The index of each parameter of the fused computation."""
        return {
            each.name: int(re.search(r"parameter\((\d+)\)", each.line)[1])
            for each in self.instructions
            if each.opcode == "parameter"
        }

    @property
    def updates(self) -> list[Instruction]:
        return [each for each in self.instructions if each.opcode == "dynamic-update-slice" and len(each.operands) > 1]


def _without_aliases(fusion: Instruction, sizes: list[float]) -> tuple[list[float], float]:
    """Sizes of the operands and of the result of a fusion without those that it only passes on.

    The TPU compiler passes the buffers of asynchronous collectives through the fusions that they overlap with.
    """
    results = split_tuple(fusion.type) if fusion.type.startswith("(") else [fusion.type]
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", fusion.line)
    for result, operand in re.findall(r"\{(\d*)\}: \((\d+)", aliases[1] if aliases else ""):
        results[int(result or 0)] = ""
        sizes = [0.0 if i == int(operand) else size for i, size in enumerate(sizes)]
    return sizes, sum(map(array_bytes, results))


def array_bytes(type_: str) -> float:
    """Size of the arrays of an HLO type that are in HBM."""
    return sum(
        (1 if dtype.startswith("f8") else BYTES.get(dtype, 0)) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims, layout in _ARRAY.findall(type_)
        if not re.search(r"S\([1-9]\d*\)", layout)
    )


def _is_free(opcode: str) -> bool:
    return opcode in FREE or opcode.endswith(("-done", "-update"))
