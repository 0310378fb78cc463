"""Accelerator chips: memory, peak speed, bandwidth and links, from the vendors' documentation.

Sources: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} and jax-ml.github.io/scaling-book (speed of a link in one
direction) for TPUs; the data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 for GPUs, without sparsity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GB, TERA = 10**9, 10**12


@dataclass(frozen=True)
class Chip:
    """One chip; speeds are in FLOP/s (operations/s for int8) and bytes/s, for dense operands."""

    name: str
    platform: Literal["tpu", "gpu"]
    kinds: tuple[str, ...]
    """`device_kind` of JAX devices that are this chip."""
    memory: float
    """Bytes of HBM."""
    memory_speed: float
    bf16: float
    int8: float
    fp8: float | None
    """None: the chip has no fp8 arithmetic."""
    link_speed: float
    """Of one link of a TPU in one direction; of all NVLinks of a GPU in one direction."""
    network_speed: float
    """Per chip, between slices of TPUs or hosts of GPUs."""
    torus_dims: int = 0
    """Dimensions of the torus of links. 0: all GPUs of a host are connected to each other."""
    cores: int = 1
    """JAX devices per chip."""
    counted_cores: int = 1
    """Cores per chip in the name of a slice: v4-512 has 256 chips."""


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", "tpu", ("TPU v4",), 32 * 2**30, 1200 * GB, 275 * TERA, 275 * TERA, None,
            link_speed=45 * GB, network_speed=6.25 * GB, torus_dims=3, counted_cores=2,
        ),
        Chip(
            "v5e", "tpu", ("TPU v5 lite", "TPU v5e"), 16 * 2**30, 800 * GB, 197 * TERA, 393 * TERA, None,
            link_speed=45 * GB, network_speed=3.1 * GB, torus_dims=2,
        ),
        Chip(
            "v5p", "tpu", ("TPU v5", "TPU v5p"), 95 * 2**30, 2765 * GB, 459 * TERA, 918 * TERA, None,
            link_speed=90 * GB, network_speed=6.25 * GB, torus_dims=3, counted_cores=2,
        ),
        Chip(
            "v6e", "tpu", ("TPU v6 lite", "TPU v6e"), 32 * 2**30, 1600 * GB, 918 * TERA, 1836 * TERA, None,
            link_speed=90 * GB, network_speed=12.5 * GB, torus_dims=2,
        ),
        Chip(
            "tpu7x", "tpu", ("TPU7x",), 192 * 2**30, 7370 * GB, 2307 * TERA, 2307 * TERA, 4614 * TERA,
            link_speed=90 * GB, network_speed=12.5 * GB, torus_dims=3, cores=2, counted_cores=2,
        ),
        Chip(
            "a100", "gpu", ("NVIDIA A100-SXM4-80GB",), 80 * GB, 2039 * GB, 312 * TERA, 624 * TERA, None,
            link_speed=300 * GB, network_speed=25 * GB,
        ),
        Chip(
            "h100", "gpu", ("NVIDIA H100 80GB HBM3",), 80 * GB, 3350 * GB, 989 * TERA, 1979 * TERA, 1979 * TERA,
            link_speed=450 * GB, network_speed=50 * GB,
        ),
        Chip(
            "h200", "gpu", ("NVIDIA H200",), 141 * GB, 4800 * GB, 989 * TERA, 1979 * TERA, 1979 * TERA,
            link_speed=450 * GB, network_speed=50 * GB,
        ),
        Chip(
            "b200", "gpu", ("NVIDIA B200",), 180 * GB, 7700 * GB, 2250 * TERA, 4500 * TERA, 4500 * TERA,
            link_speed=900 * GB, network_speed=50 * GB,
        ),
    )
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a JAX device; None if it is not in the table."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)


def known_chips(platform: str | None = None) -> Sequence[str]:
    """Names of the chips, of one platform or of all."""
    return [chip.name for chip in CHIPS.values() if platform in (None, chip.platform)]
