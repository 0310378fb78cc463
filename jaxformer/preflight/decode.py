"""Compile prefill and the token step of a config for the devices of a topology (see `preflight.compile`)."""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial

from jaxformer.config import RunConfig, dump_config
from jaxformer.config.files import parse_config
from jaxformer.preflight.compile import Compiled, compile_program, devices_of, run_compiler, write_answer
from jaxformer.topology import Topology, parse_topology


@dataclass(frozen=True)
class DecodeJob:
    config: RunConfig
    topology: Topology
    batch_size: int
    prompt_length: int
    """Tokens of each prompt; those of the source in an encoder-decoder."""
    max_length: int
    """Tokens of prompt and output together; of the output in an encoder-decoder."""
    cache: str = "dtype"
    """Storage of the KV cache: "dtype" or "int8"."""

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in ("batch_size", "prompt_length", "max_length", "cache")}
        return json.dumps({"config": dump_config(self.config), "topology": self.topology.name, **fields})

    @classmethod
    def from_json(cls, text: str) -> "DecodeJob":
        job = json.loads(text)
        config = parse_config(json.dumps(job.pop("config")), "preflight")
        return cls(config, parse_topology(job.pop("topology")), **job)


def compile_decode(job: DecodeJob) -> dict[str, Compiled]:
    """The programs `prefill` and `token`; raises `UserError` if the config does not suit the topology."""
    return run_compiler("jaxformer.preflight.decode", job.to_json(), job.topology)


# ---------------------------------------------------------------- in the process of the compiler
def main(result: str) -> None:
    job = DecodeJob.from_json(sys.stdin.read())

    def compile_job() -> dict[str, Compiled]:
        from jaxformer.decode.program import DecodeShape, decode_program
        from jaxformer.preflight.flops import visible_keys
        from jaxformer.preflight.memory import memory_of_decoding, undersharded

        shape = DecodeShape(job.batch_size, job.prompt_length, job.max_length)
        program = decode_program(job.config, devices_of(job.topology), shape, job.cache)
        memory, visible = partial(memory_of_decoding, program), visible_keys(job.config.model, job.prompt_length)
        programs = {"prefill": (program.trace_prefill, visible), "token": (program.trace_step, 1.0)}
        sharded = undersharded(program.abstract_params, program.mesh.shape)
        return {
            name: replace(compile_program(trace, program.mesh.shape, visible, memory), undersharded=sharded)
            for name, (trace, visible) in programs.items()
        }

    write_answer(result, job.topology, compile_job)


if __name__ == "__main__":
    main(sys.argv[1])
