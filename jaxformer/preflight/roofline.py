"""The least time that a step can take on a chip: its FLOPs, its HBM traffic or its communication, whichever is slowest.

The three are assumed to overlap perfectly and to run at the speeds in `chips`, so real steps are slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxformer.preflight.hlo import Collective
from jaxformer.topology import Topology


@dataclass(frozen=True)
class Roofline:
    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def step_seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

    @property
    def bound_by(self) -> str:
        times = {"compute": self.compute_seconds, "memory": self.memory_seconds, "network": self.network_seconds}
        return max(times, key=times.__getitem__)


def roofline(flops: float, hbm_traffic: int, collectives: Sequence[Collective], topology: Topology) -> Roofline:
    """From the FLOPs, the traffic and the collectives of one device and one step."""
    chip = topology.chip
    return Roofline(
        compute_seconds=flops * chip.cores / chip.bf16,
        memory_seconds=hbm_traffic * chip.cores / chip.memory_speed,
        network_seconds=sum(each.wire_bytes for each in collectives) / ring_speed(topology),
    )


def ring_speed(topology: Topology) -> float:
    """Bytes/s at which a device sends in a ring collective."""
    chip = topology.chip
    if chip.platform == "tpu":
        return 2 * chip.link_speed / chip.cores  # both directions of one torus axis
    # A ring through several hosts enters and leaves each of them once, so it can use the network cards of all GPUs.
    hosts, gpus = topology.shape
    return chip.link_speed if hosts == 1 else min(chip.link_speed, gpus * chip.network_speed)


def model_flops_utilization(model_flops: float, step_seconds: float, topology: Topology) -> float:
    """MFU: the model FLOPs of one device as a share of what it could compute in the time of a step."""
    peak = topology.chip.bf16 / topology.chip.cores
    return model_flops / (step_seconds * peak) if step_seconds and math.isfinite(step_seconds) else 0.0
