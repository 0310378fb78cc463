"""TrainProgram: abstract state and batch, lowering without arrays, and devices that are passed in."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer
from jaxformer.config import MeshConfig, TrainConfig, dump_config
from jaxformer.sharding import global_batch
from jaxformer.train.program import train_program

PACKAGE = Path(jaxformer.__file__).parent
# Entry points of commands may ask JAX for the attached devices; all other modules get devices as arguments.
ENTRY_POINTS = {
    "cli.py",
    "train/loop.py",
    "show.py",
    "bench/train.py",
    "bench/decode.py",
    "evaluate/report.py",
    "run.py",
}
LOOK_UPS = {"devices", "device_count", "local_devices", "local_device_count", "default_backend"}


@pytest.mark.parametrize("shape", ["decoder-only", "encoder-decoder"])
def test_abstract_state_and_batch_match_the_arrays(shape, make_config, make_batch):
    config = make_config(shape, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    if shape == "encoder-decoder":
        config = config.replace(data=config.data.replace(objective={"kind": "seq2seq", "input_length": 32}))
    program = train_program(config, jax.devices())
    abstract = (program.abstract_state, program.abstract_batch)
    arrays = (program.init(), global_batch(make_batch(config), program.mesh))
    assert jax.tree.structure(abstract) == jax.tree.structure(arrays)
    for expected, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(arrays), strict=True):
        assert (expected.shape, expected.dtype) == (array.shape, array.dtype)
        assert expected.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_the_lowered_step_equals_the_jitted_step(make_config, make_batch):
    config = make_config(mesh=MeshConfig(data=4, tensor=2))
    program = train_program(config, jax.devices())
    batch = global_batch(make_batch(config), program.mesh)
    compiled = program.lower().compile()
    _, ahead = compiled(program.init(), batch)
    state = program.init()
    with jax.set_mesh(program.mesh):
        _, metrics = program.step(state, batch)
    for name in metrics:
        np.testing.assert_allclose(ahead[name], metrics[name], rtol=1e-6, err_msg=name)


COMPILE_FOR_TPU = """
import sys
from jax.experimental import topologies
from jaxformer.config import parse_config
from jaxformer.train.program import train_program

program = train_program(
    parse_config(sys.stdin.read(), "test"),
    topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices,
)
assert program.model.runtime.platform == "tpu"
memory = program.lower().compile().memory_analysis()
assert memory.argument_size_in_bytes > 0
assert memory.host_temp_size_in_bytes > 0, "offloaded activations"
"""


@pytest.mark.usefixtures("tpu_compiler")
def test_a_program_for_devices_that_are_not_attached(make_config):
    """A program for a TPU topology description compiles without TPUs, also with activations in host memory."""
    config = make_config(mesh=MeshConfig(data=2, fsdp=2), train=TrainConfig(remat="offload"))
    # In a separate process, because libtpu aborts on the XLA flags for CPUs that the tests set.
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # a killed process leaves a lock file behind
    command = [sys.executable, "-c", COMPILE_FOR_TPU]
    text = json.dumps(dump_config(config))
    result = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_only_entry_points_look_up_devices():
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                looks_up = node.value.id == "jax" and node.attr in LOOK_UPS
                assert not looks_up or name in ENTRY_POINTS, f"{name}:{node.lineno} calls jax.{node.attr}"
