"""Changes of a config with which it fits a topology, in the keys of the config; each one is compiled."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxformer.config import RunConfig, apply_overrides
from jaxformer.errors import UserError
from jaxformer.preflight.compile import compile_step
from jaxformer.topology import Topology, larger_topologies

MAX_COMPILES = 6


@dataclass(frozen=True)
class Suggestion:
    overrides: tuple[str, ...]
    topology: str
    peak_bytes: int
    fits: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "overrides": list(self.overrides),
            "topology": self.topology,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def suggest(
    config: RunConfig, topology: Topology, peak_bytes: int | None, announce: Callable[[str], None]
) -> list[Suggestion]:
    """Compile changes, each on top of those before that saved memory, until one fits.

    Args:
      peak_bytes: what the config needs without changes; None if it does not compile.
    """
    tried: list[Suggestion] = []
    kept: dict[str, str] = {}
    for target, change in _changes(config, topology):
        overrides = kept | change
        words = tuple(f"{key}={value}" for key, value in overrides.items())
        announce(f"trying {' '.join(words)}" + (f" on {target.name}" if target is not topology else ""))
        try:
            compiled = compile_step(apply_overrides(config, words), target)
        except UserError:  # the change does not suit the model, for example heads that do not divide
            continue
        tried.append(Suggestion(words, target.name, compiled.peak_bytes, compiled.fits(target)))
        if tried[-1].fits or len(tried) == MAX_COMPILES:
            break
        if peak_bytes is None or compiled.peak_bytes < peak_bytes:
            kept, peak_bytes = overrides, compiled.peak_bytes
    return tried


def _changes(config: RunConfig, topology: Topology) -> Iterator[tuple[Topology, dict[str, str]]]:
    """Changes in the order in which they should be tried: those that cost least time come first."""
    devices, accumulate = topology.num_devices, config.train.accumulate
    rows = config.data.batch_size
    sharded = {"mesh.data": "1", "mesh.fsdp": str(devices), "mesh.tensor": "1"}
    if rows % (devices * accumulate):
        sharded["data.batch_size"] = str(-(-rows // (devices * accumulate)) * devices * accumulate)
        rows = int(sharded["data.batch_size"])
    if any(str(getattr(config.mesh, key.removeprefix("mesh."), None)) != value for key, value in sharded.items()):
        yield topology, sharded
    if config.train.remat != "full":
        yield topology, {"train.remat": "full"}
    if rows // devices > accumulate:
        yield topology, {"train.accumulate": str(rows // devices)}
    for ways in (4, 8):
        if devices % ways == 0 and devices > ways:
            yield topology, sharded | {"mesh.fsdp": str(devices // ways), "mesh.tensor": str(ways)}
    for larger in larger_topologies(topology)[:2]:
        batch = {"data.batch_size": str(max(rows, larger.num_devices * accumulate))}
        yield larger, sharded | batch | {"mesh.fsdp": str(larger.num_devices), "mesh.topology": larger.name}
