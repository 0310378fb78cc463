"""`jaxformer preflight`: compiles a config for a topology and collects what is known about its programs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.config import RunConfig
from jaxformer.errors import UserError
from jaxformer.preflight.compile import Compiled, compile_step
from jaxformer.preflight.decode import DecodeJob, compile_decode
from jaxformer.preflight.roofline import Roofline, model_flops_utilization, roofline
from jaxformer.preflight.suggest import Suggestion, suggest
from jaxformer.rundir import write_file
from jaxformer.topology import Topology, parse_topology
from jaxformer.train.metrics import step_flops

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What preflight found about one program; all numbers are those of one device and one execution."""

    program: str
    """`train step`, `prefill` or `token step`."""
    config: RunConfig
    topology: Topology
    compiled: Compiled
    tokens: float
    """Tokens that one execution processes per device: of targets or texts, of prompts, or one per row."""
    model_flops: float
    """FLOPs without recomputation."""
    suggestions: Sequence[Suggestion] = ()
    """Changes that were compiled because the config does not fit; only the last one can fit."""

    @property
    def hbm_bytes(self) -> int:
        """Bytes that a program can use on one device."""
        return self.topology.usable_bytes

    @property
    def fits(self) -> bool:
        return self.compiled.fits(self.topology)

    @property
    def roofline(self) -> Roofline:
        compiled = self.compiled
        return roofline(compiled.flops, compiled.hbm_traffic, compiled.collectives, self.topology)

    @property
    def mfu(self) -> float:
        return model_flops_utilization(self.model_flops, self.roofline.step_seconds, self.topology)

    def to_json(self) -> dict[str, Any]:
        compiled, bound = self.compiled, self.roofline
        collectives = [
            {"kind": each.kind, "axis": each.axis, "count": each.count, "bytes": each.bytes}
            for each in compiled.collectives
        ]
        return {
            "program": self.program,
            "topology": self.topology.name,
            "mesh": compiled.mesh,
            "fits": self.fits,
            "peak_bytes": compiled.peak_bytes,
            "hbm_bytes": self.hbm_bytes,
            "memory": compiled.memory,
            "flops": compiled.flops,
            "model_flops": self.model_flops,
            "hbm_traffic": compiled.hbm_traffic,
            "collectives": collectives,
            "wire_bytes": compiled.wire_bytes,
            "step_seconds": bound.step_seconds,
            "tokens_per_second": self.tokens / bound.step_seconds,
            "mfu": self.mfu,
            "bound_by": bound.bound_by,
            "attention": compiled.attention,
            "undersharded": compiled.undersharded,
            "compile_seconds": compiled.compile_seconds,
            "suggestions": [each.to_json() for each in self.suggestions],
        }


def preflight(config: RunConfig, topology: str | None, announce: Announce = print) -> Report:
    """Compile the train step of a config for a topology, by default that of the config.

    Args:
      announce: called with what is compiled next.
    """
    target = _target(config, topology)
    announce(f"compiling the train step for {target.name}")
    try:
        compiled = compile_step(config, target)
    except UserError as error:
        _suggest_division(config, target, error, announce)
        raise
    found = [] if compiled.fits(target) else suggest(config, target, compiled.peak_bytes, announce)
    tokens = config.data.batch_size * config.batch_layout.length / target.num_devices
    return Report("train step", config, target, compiled, tokens, step_flops(config) / target.num_devices, found)


def preflight_decode(config: RunConfig, topology: str | None, announce: Announce = print) -> list[Report]:
    """Compile prefill and the token step of a config for batches of `data.batch_size` rows of `data.length` tokens.

    The last `evaluate.max_new_tokens` of a row are generated; an encoder-decoder generates all and reads a source.
    """
    target, layout, rows = _target(config, topology), config.batch_layout, config.data.batch_size
    prompt = layout.source_length or layout.length - config.evaluate.max_new_tokens
    if prompt < 1:
        raise UserError(
            f"evaluate.max_new_tokens={config.evaluate.max_new_tokens} leaves no prompt in rows of "
            f"data.length={layout.length} tokens: set it lower"
        )
    announce(f"compiling prefill and the token step for {target.name}")
    compiled = compile_decode(DecodeJob(config, target, rows, prompt, layout.length))
    tokens = {"prefill": rows * prompt, "token": rows}
    names = {"prefill": "prefill", "token": "token step"}
    return [
        Report(names[key], config, target, each, tokens[key] / target.num_devices, each.flops)
        for key, each in compiled.items()
    ]


def _target(config: RunConfig, topology: str | None) -> Topology:
    if config.data is None:
        raise UserError("data: preflight needs the length and the batch size of a run, set data")
    if topology is None and config.mesh.topology is None:
        raise UserError("topology: none is given, pass --topology NAME or set mesh.topology (`--topology list`)")
    return parse_topology(topology or config.mesh.topology)


def _suggest_division(config: RunConfig, topology: Topology, error: UserError, announce: Announce) -> None:
    """Raise with a mesh that divides the devices and the batch, if the config has none."""
    if not str(error).startswith(("mesh", "data.batch_size")):
        return
    for found in suggest(config, topology, None, announce):
        if found.fits:
            raise UserError(f"{error}; compiled and fits: {' '.join(found.overrides)}") from error


def check_json_path(path: str) -> None:
    """Raise, before minutes of compilation, if the report cannot be written there."""
    if path != "-" and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise UserError(f"--json {path}: not a file in an existing directory, create the directory or name a file")


def write_json(reports: Sequence[Report], path: str) -> None:
    """Write the report, or several by program, to a file; `-` is standard output."""
    content = reports[0].to_json() if len(reports) == 1 else _by_program(reports)
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        print(text, end="")
        return
    try:
        write_file(Path(path), text.encode())
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from error


def _by_program(reports: Sequence[Report]) -> dict[str, Any]:
    programs = {report.program.replace(" ", "_"): report.to_json() for report in reports}
    return {"fits": all(report.fits for report in reports)} | programs
