"""Accelerator slices by their usual names.

`v5e-256` has 256 chips. Names of v4, v5p and TPU7x count cores as Google does, so that `v5p-128` has 64 chips.
`h100-64` has 64 GPUs in hosts of 8.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jaxformer.chips import CHIPS, Chip, chip_of
from jaxformer.errors import UserError

GPUS_PER_HOST = 8
# Largest slices: a whole pod of the TPU type, and a cluster size for GPUs that users ask about.
MAX_CHIPS = {"v4": 4096, "v5e": 256, "v5p": 8960, "v6e": 256, "tpu7x": 9216}
MAX_GPUS = 16_384
# The TPU runtime keeps a 64th (it reports 15.75 of 16 GiB); CUDA, its libraries and NCCL's buffers need a few GB.
USABLE = {"tpu": 63 / 64, "gpu": 0.92}


@dataclass(frozen=True)
class Topology:
    name: str
    chip: Chip
    num_chips: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """TPUs: the torus; GPUs: hosts and GPUs of each."""
        if self.chip.platform == "gpu":
            per_host = min(self.num_chips, GPUS_PER_HOST)
            return (self.num_chips // per_host, per_host)
        return _torus(self.num_chips, self.chip.torus_dims)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.cores

    @property
    def usable_bytes(self) -> int:
        """Bytes of memory that programs can use on one device."""
        return int(self.chip.memory * USABLE[self.chip.platform] / self.chip.cores)

    def check_devices(self, kind: str, num_devices: int) -> None:
        """Raise unless these are the devices of the slice."""
        chip = chip_of(kind)
        if chip is not self.chip or num_devices != self.num_devices:
            raise UserError(
                f"mesh.topology={self.name} has {self.num_devices} {self.chip.kinds[0]} devices, but there are "
                f"{num_devices} {kind} devices: start the run there, or set mesh.topology=none"
            )


def parse_topology(name: str) -> Topology:
    """The topology of a name such as `v5e-256`; raises with the nearest names if there is none."""
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name.strip().lower())
    if match is None or match[1] not in CHIPS:
        raise UserError(f"topology {name!r} is unknown: {_suggest(name)}")
    chip, count = CHIPS[match[1]], int(match[2])
    num_chips, rest = divmod(count, chip.counted_cores)
    if rest or num_chips not in _slice_sizes(chip):
        raise UserError(f"topology {name!r}: there is no slice of {count} {chip.name}: {_suggest(name)}")
    return Topology(f"{chip.name}-{count}", chip, num_chips)


def topology_names(chip: Chip) -> list[str]:
    """The names of all slices of a chip, smallest first."""
    return [f"{chip.name}-{size * chip.counted_cores}" for size in _slice_sizes(chip)]


def larger_topologies(topology: Topology) -> list[Topology]:
    """The larger slices of the same chip, smallest first."""
    found = [parse_topology(name) for name in topology_names(topology.chip)]
    return [each for each in found if each.num_chips > topology.num_chips]


def _suggest(name: str) -> str:
    names = [each for chip in CHIPS.values() for each in topology_names(chip)]
    nearest = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    return f"{hint}`--topology list` prints all"


# ---------------------------------------------------------------- shapes
def _slice_sizes(chip: Chip) -> list[int]:
    limit = MAX_CHIPS.get(chip.name, MAX_GPUS)
    powers = [2**i for i in range(limit.bit_length()) if 2**i <= limit]
    if chip.platform == "gpu":
        return powers
    # TPU slices of 2 chips do not exist, and those of a 3D torus have at least the 4 chips of a host.
    return [n for n in powers if n >= 4 or (n == 1 and chip.torus_dims == 2)]


def _torus(num_chips: int, dims: int) -> tuple[int, ...]:
    """The torus with sides as equal as possible, shortest side first; that of one host is flat: 2x2x1."""
    if num_chips == 4:
        return (2, 2, 1)[:dims]
    return min(_factorisations(num_chips, dims), key=lambda sides: sides[-1] - sides[0])


def _factorisations(number: int, dims: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """All ways to write a power of two as a product of ascending powers of two."""
    if dims == 1:
        if number >= least:
            yield (number,)
        return
    for exponent in range(int(math.log2(number)) + 1):
        if 2**exponent >= least:
            for rest in _factorisations(number // 2**exponent, dims - 1, 2**exponent):
                yield (2**exponent, *rest)
