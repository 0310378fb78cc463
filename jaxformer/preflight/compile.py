"""Compile the train step of a config for the devices of a topology, in a separate process.

The compilers print to standard error, abort the process on some errors, and must not see XLA flags for other platforms.
`compile_step` starts `python -m jaxformer.preflight.compile`, which reads a job and writes its result as JSON.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.config import RunConfig, dump_config
from jaxformer.config.files import parse_config
from jaxformer.errors import UserError
from jaxformer.preflight.gpus import TARGETS
from jaxformer.preflight.hlo import Collective, Program
from jaxformer.preflight.traffic import hbm_bytes
from jaxformer.topology import Topology, parse_topology

if TYPE_CHECKING:  # the parent process does not need JAX
    from jax.stages import Compiled as Compilation, Traced

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    # Two compilers may run at once, and one that was killed leaves its lock file behind.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one step of one chip."""

    peak_bytes: int
    argument_bytes: int
    """The train state and the batch, or the parameters and caches of decoding."""
    memory: dict[str, int]
    """`peak_bytes` by what it holds (see `preflight.memory`)."""
    flops: float
    """FLOPs that are executed, including recomputation."""
    hbm_traffic: int
    """Bytes read from and written to HBM; 0 if the compiler gives no program text."""
    mesh: dict[str, int]
    collectives: tuple[Collective, ...]
    attention: dict[str, str]
    """The kernel of each kind of attention, and why preferred ones were skipped."""
    compile_seconds: float
    ran_out_of_memory: bool = False
    """Whether the compiler gave up because of memory; then traffic and collectives are unknown."""
    undersharded: dict[str, int] = field(default_factory=dict)
    """Parameters of which every chip holds more than its share, and their bytes on each chip."""

    @property
    def wire_bytes(self) -> int:
        return sum(each.wire_bytes for each in self.collectives)

    def fits(self, topology: Topology) -> bool:
        return not self.ran_out_of_memory and self.peak_bytes <= topology.usable_bytes


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
    """Start a module that compiles programs, in a separate process; returns what it wrote with `write_answer`."""
    check_compiler(topology)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        process = subprocess.run(
            [sys.executable, "-m", module, str(result)],
            input=job,
            env=os.environ | ENVIRONMENT | {"XLA_FLAGS": f"--xla_dump_to={directory} --xla_dump_hlo_as_text"},
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
        from jaxformer.preflight.flops import visible_keys
        from jaxformer.preflight.memory import memory_of_training, undersharded
        from jaxformer.train.program import train_program

        program = train_program(job.config, devices_of(job.topology))
        memory = partial(memory_of_training, program)
        visible = visible_keys(job.config.model, job.config.batch_layout.length)
        compiled = compile_program(program.trace, program.mesh.shape, visible, memory)
        return {"step": replace(compiled, undersharded=undersharded(program.abstract_params, program.mesh.shape))}

    write_answer(result, job.topology, compile_job)


def write_answer(result: str, topology: Topology, compile_job: Callable[[], dict[str, Compiled]]) -> None:
    """Write the compiled programs, or the error of the user, for `run_compiler`."""
    from jax.errors import JaxRuntimeError

    try:
        answer = {name: asdict(compiled) for name, compiled in compile_job().items()}
    except UserError as error:
        answer = {"error": str(error)}
    except JaxRuntimeError as error:
        answer = {"error": f"the compiler for {topology.name} failed: {str(error).splitlines()[0]}"}
    Path(result).write_text(json.dumps(answer), encoding="utf-8")


def compile_program(
    trace: Callable[[], "Traced"],
    mesh: Mapping[str, int],
    visible: float,
    memory: Callable[["Traced", int], dict[str, int]],
) -> Compiled:
    """Trace and compile a program for a mesh with these axis sizes.

    Args:
      visible: the mean fraction of keys that a query sees, for fused attention kernels.
      memory: splits the peak of the traced program by what it holds.
    """
    from jax.errors import JaxRuntimeError

    from jaxformer.ops.attention import record_choices
    from jaxformer.preflight.flops import count_flops

    started = time.perf_counter()
    with record_choices() as choices:
        traced = trace()
    attention = {
        inputs: choice.kernel + "".join(f"; not {name}: {reason}" for name, reason in choice.skipped.items())
        for inputs, choice in choices.items()
    }
    flops = count_flops(traced.jaxpr.jaxpr, visible, math.prod(mesh.values()))
    facts = {"mesh": dict(mesh), "attention": attention, "flops": flops}
    lowered = traced.lower()
    try:
        compiled = lowered.compile()
    except JaxRuntimeError as error:
        used = used_memory(str(error))
        if used is None:
            raise
        return Compiled(
            peak_bytes=used,
            argument_bytes=0,
            memory=memory(traced, used),
            hbm_traffic=0,
            collectives=(),
            compile_seconds=time.perf_counter() - started,
            ran_out_of_memory=True,
            **facts,
        )
    seconds = time.perf_counter() - started
    sizes, text = _memory(compiled.memory_analysis()), Program(_optimized_text(compiled))
    return Compiled(
        **sizes,
        memory=memory(traced, sizes["peak_bytes"]),
        hbm_traffic=hbm_bytes(text),
        collectives=tuple(text.collectives(mesh)),
        compile_seconds=seconds,
        **facts,
    )


def _optimized_text(compiled: "Compilation") -> str:
    """The HLO text of a compiled program.

    The TPU compiler cannot always return it (it fails on asynchronous fusions of v5p and v6e), but writes it to a file.
    """
    directory = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    files = Path(directory[1]).glob("*.after_codegen.txt") if directory else ()
    latest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
    return compiled.as_text() if latest is None else latest.read_text(encoding="utf-8")


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


def used_memory(message: str) -> int | None:
    """The bytes that a program needs, from an error of the TPU compiler; None if it is about something else.

    It says `Used 23.36G of 15.75G hbm`, or `HLO temporaries (54.62G) exceeds available HBM (15.75G)`.
    """
    number = r"([\d.]+)([BKMGT])"
    match = re.search(rf"Used {number} of \S+ hbm|required for \D*\({number}\) exceeds available HBM", message)
    if match is None:
        return None
    size, unit = (group for group in match.groups() if group is not None)
    return int(float(size) * _UNITS[unit])


if __name__ == "__main__":
    main(sys.argv[1])
