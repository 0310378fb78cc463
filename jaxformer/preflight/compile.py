"""Compile the train step of a config for the devices of a topology, in a process of its own.

The compilers print to standard error, abort the process on some errors, and must not see XLA flags for other platforms.
`compile_step` starts `python -m jaxformer.preflight.compile`, which reads a job and writes its result as JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxformer.config import RunConfig, dump_config
from jaxformer.config.files import parse_config
from jaxformer.errors import UserError
from jaxformer.preflight.gpus import TARGETS
from jaxformer.preflight.hlo import Collective, Program
from jaxformer.topology import Topology, parse_topology

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    # Two compilers may run at once, and one that was killed leaves its lock file behind.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_FLAGS": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one step of one chip."""

    peak_bytes: int
    argument_bytes: int
    """The train state and the batch, or the parameters and caches of decoding."""
    mesh: dict[str, int]
    collectives: tuple[Collective, ...]
    attention: dict[str, str]
    """The kernel of each kind of attention, and why preferred ones were skipped."""
    compile_seconds: float
    ran_out_of_memory: bool = False
    """Whether the compiler gave up because of memory; then only `peak_bytes` is known."""


@dataclass(frozen=True)
class Job:
    config: RunConfig
    topology: Topology

    def to_json(self) -> str:
        return json.dumps({"config": dump_config(self.config), "topology": self.topology.name})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        job = json.loads(text)
        return cls(parse_config(json.dumps(job["config"]), "preflight"), parse_topology(job["topology"]))


def compile_step(config: RunConfig, topology: Topology) -> Compiled:
    """Compile the train step; raises `UserError` if the config does not suit the topology."""
    return run_compiler("jaxformer.preflight.compile", Job(config, topology).to_json(), topology)["step"]


def run_compiler(module: str, job: str, topology: Topology) -> dict[str, Compiled]:
    """Start a module that compiles programs, in a process of its own; returns what it wrote with `write_answer`."""
    check_compiler(topology)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        process = subprocess.run(
            [sys.executable, "-m", module, str(result)],
            input=job,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        if not result.exists():
            raise UserError(_explain_failure(process, topology))
        answer = json.loads(result.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UserError(answer["error"])
    return {name: _from_json(compiled) for name, compiled in answer.items()}


def _from_json(fields: dict[str, Any]) -> Compiled:
    return Compiled(**fields | {"collectives": tuple(Collective(**each) for each in fields["collectives"])})


def check_compiler(topology: Topology) -> None:
    """Raise if the compiler for the chips is not installed."""
    platform = topology.chip.platform
    module, extra = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_cuda13_plugin", "cuda")}[platform]
    if find_spec(module) is None:
        raise UserError(
            f"the compiler for {topology.name} is not installed: pip install 'jaxformer[{extra}]', also on a machine "
            f"without {platform.upper()}s"
        )


def _explain_failure(process: subprocess.CompletedProcess, topology: Topology) -> str:
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit status {process.returncode}"
    return f"the compiler for {topology.name} failed: {reason}"


# ---------------------------------------------------------------- in the process of the compiler
def main(result: str) -> None:
    job = Job.from_json(sys.stdin.read())

    def compile_job() -> dict[str, Compiled]:
        from jaxformer.train.program import train_program

        program = train_program(job.config, devices_of(job.topology))
        return {"step": compile_program(program.lower, program.mesh.shape)}

    write_answer(result, compile_job)


def write_answer(result: str, compile_job: Callable[[], dict[str, Compiled]]) -> None:
    """Write the compiled programs, or the error of the user, for `run_compiler`."""
    try:
        answer = {name: asdict(compiled) for name, compiled in compile_job().items()}
    except UserError as error:
        answer = {"error": str(error)}
    Path(result).write_text(json.dumps(answer), encoding="utf-8")


def compile_program(lower: Callable[[], Any], mesh: Mapping[str, int]) -> Compiled:
    """Lower and compile a program for a mesh with these axis sizes."""
    from jax.errors import JaxRuntimeError

    from jaxformer.ops.attention import record_choices

    started = time.perf_counter()
    with record_choices() as choices:
        lowered = lower()
    attention = {
        inputs: choice.kernel + "".join(f"; not {name}: {reason}" for name, reason in choice.skipped.items())
        for inputs, choice in choices.items()
    }
    facts = {"mesh": dict(mesh), "attention": attention}
    try:
        compiled = lowered.compile()
    except JaxRuntimeError as error:
        used = _used_memory(str(error))
        if used is None:
            raise
        seconds = time.perf_counter() - started
        return Compiled(used, 0, collectives=(), compile_seconds=seconds, ran_out_of_memory=True, **facts)
    return Compiled(
        **_memory(compiled.memory_analysis()),
        collectives=tuple(Program(compiled.as_text()).collectives(mesh)),
        compile_seconds=time.perf_counter() - started,
        **facts,
    )


def devices_of(topology: Topology) -> Sequence[Any]:
    """Devices that programs can be compiled for, although they are not attached."""
    from jax.experimental import topologies

    name, shape = topology.chip.name, "x".join(map(str, topology.shape))
    if topology.chip.platform == "gpu":
        options = {"target_config": TARGETS[name], "topology": f"1x{shape}"}
        return topologies.get_topology_desc(platform="cuda", topology_name=name, **options).devices
    # A v4 chip without this option is two devices.
    options = {"chip_config_name": "megacore"} if name == "v4" else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options).devices


def _memory(stats: Any) -> dict[str, int]:
    aliased = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = aliased + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    # Not every compiler reports the peak.
    peak = getattr(stats, "peak_memory_in_bytes", 0) or total
    return {"peak_bytes": peak, "argument_bytes": stats.argument_size_in_bytes}


def _used_memory(message: str) -> int | None:
    """The bytes that a program needs, from the error of the TPU compiler: `Used 23.36G of 15.75G hbm`."""
    match = re.search(r"Used ([\d.]+)([BKMGT]) of [\d.]+[BKMGT] hbm", message)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


if __name__ == "__main__":
    main(sys.argv[1])
