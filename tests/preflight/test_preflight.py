"""`jaxformer preflight` with a stand-in for the compiler: verdicts, suggestions, JSON, exit codes and errors."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxformer.cli import main
from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, RunConfig, TrainConfig
from jaxformer.errors import UserError
from jaxformer.models.llama import llama
from jaxformer.preflight import report as report_module, suggest as suggest_module
from jaxformer.preflight.compile import Compiled, used_memory
from jaxformer.preflight.hlo import Collective
from jaxformer.preflight.memory import memory_of_training
from jaxformer.preflight.report import preflight
from jaxformer.preflight.roofline import roofline
from jaxformer.sharding import check_batch
from jaxformer.topology import parse_topology
from jaxformer.train.program import train_program

CONFIG = """
from jaxformer.config import DataConfig, MeshConfig, RunConfig, TextSource, TrainConfig
from jaxformer.models.llama import llama

def config():
    return RunConfig(
        model=llama(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=4, mlp_dim=64, vocab_size=320),
        data=DataConfig(train=TextSource(paths="no such file"), length=16, batch_size=64),
        train=TrainConfig(remat="none"),
        mesh=MeshConfig(data=-1),
    )
"""
COMPILED = Compiled(
    peak_bytes=2**30,
    argument_bytes=2**28,
    memory={"parameters": 2**28, "optimizer": 2**29, "gradients": 0, "activations": 0, "temporaries": 2**28},
    flops=1.97e12,
    hbm_traffic=8 * 10**8,
    undersharded={"embedding/table": 2**21},
    mesh={"data": 1, "fsdp": 16, "tensor": 1},
    collectives=(Collective("all-gather", "fsdp", 3, 9 * 10**8), Collective("all-reduce", "data", 1, 450)),
    attention={"causal, 16 queries, 16 keys": "splash"},
    compile_seconds=1.5,
)


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in that needs more memory than a chip has until the run is sharded and accumulates."""
    calls = []

    def compile_step(config, topology):
        calls.append((config, topology))
        check_batch(config, topology.num_devices)
        saved = 1 + (config.mesh.fsdp > 1) * 4 + (config.train.remat == "full") * 2 + config.train.accumulate
        return replace(COMPILED, peak_bytes=100 * 2**30 // saved)

    for module in (report_module, suggest_module):
        monkeypatch.setattr(module, "compile_step", compile_step)
    return calls


def test_a_fitting_config_exits_with_0_and_writes_json(config_file, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report_module, "compile_step", lambda config, topology: COMPILED)
    path = tmp_path / "report.json"
    assert main(["preflight", str(config_file), "--topology", "v5e-16", "--json", str(path)]) == 0
    page = capsys.readouterr().out
    for part in (
        "fits: train step on v5e-16",
        "fsdp=16",
        "splash",
        "all-gather",
        "bound by",
        "embedding/table",
        "compiled in 2 s",
    ):
        assert part in page
    written = json.loads(path.read_text())
    promised = {
        "fits", "peak_bytes", "hbm_bytes", "memory", "flops", "collectives", "wire_bytes", "step_seconds", "mfu",
        "bound_by", "attention", "compile_seconds",
    }  # fmt: skip
    assert promised <= set(written)
    assert written["wire_bytes"] == 9 * 10**8 + 2 * 450
    assert written["collectives"][0] == {"kind": "all-gather", "axis": "fsdp", "count": 3, "bytes": 9 * 10**8}
    assert sum(written["memory"].values()) == written["peak_bytes"]


@pytest.mark.parametrize("path", ["missing/report.json", "."])
def test_where_the_report_cannot_be_written_is_an_error_before_compilation(config_file, compiler, path, capsys):
    assert main(["preflight", str(config_file), "--topology", "v5e-16", "--json", path]) == 1
    assert f"--json {path}: not a file in an existing directory" in capsys.readouterr().err
    assert not compiler


def test_json_on_standard_output_is_all_of_it(config_file, monkeypatch, capsys):
    monkeypatch.setattr(report_module, "compile_step", lambda config, topology: COMPILED)
    assert main(["preflight", str(config_file), "mesh.topology=v5e-16", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"] == "v5e-16"


def test_decoding_has_a_report_of_prefill_and_of_the_token_step(config_file, monkeypatch, capsys, tmp_path):
    jobs = []

    def compile_decode(job):
        jobs.append(job)
        return {"prefill": COMPILED, "token": replace(COMPILED, peak_bytes=2**40)}

    monkeypatch.setattr(report_module, "compile_decode", compile_decode)
    path = tmp_path / "report.json"
    arguments = ["preflight", str(config_file), "--decode", "--topology", "v5e-16", "--json", str(path)]
    assert main([*arguments, "evaluate.max_new_tokens=6"]) == 3
    assert (jobs[0].batch_size, jobs[0].prompt_length, jobs[0].max_length) == (64, 10, 16)
    out = capsys.readouterr().out
    assert "fits: prefill on v5e-16" in out
    assert "does not fit: token step on v5e-16" in out
    written = json.loads(path.read_text())
    assert not written["fits"]
    assert written["prefill"]["fits"]
    assert written["token_step"]["peak_bytes"] == 2**40
    assert main([*arguments, "evaluate.max_new_tokens=16"]) == 1
    assert "leaves no prompt in rows of data.length=16" in capsys.readouterr().err


def test_suggestions_are_compiled_in_turn_until_one_fits(config_file, compiler, capsys):
    assert main(["preflight", str(config_file), "--topology", "v5e-16"]) == 3
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "mesh.data=1 mesh.fsdp=16 mesh.tensor=1 train.remat=full" in out.replace("\n", " ")
    assert len(compiler) == 3, "as it is, sharded, and with rematerialisation"
    assert compiler[-1][0].train.remat == "full"


def test_what_saves_nothing_is_not_kept(compiler, monkeypatch):
    monkeypatch.setattr(suggest_module, "compile_step", lambda config, topology: replace(COMPILED, peak_bytes=2**40))
    config = make_config(batch_size=64)
    found = suggest_module.suggest(config, parse_topology("v5e-16"), 2**39, print)
    assert len(found) == suggest_module.MAX_COMPILES
    assert found[1].overrides == ("train.remat=full",), "without the mesh that did not help"


def test_a_batch_that_does_not_divide_is_an_error_with_a_mesh_that_compiles(config_file, monkeypatch, capsys):
    def compile_step(config, topology):
        check_batch(config, topology.num_devices)
        return COMPILED

    for module in (report_module, suggest_module):
        monkeypatch.setattr(module, "compile_step", compile_step)
    assert main(["preflight", str(config_file), "data.batch_size=24", "--topology", "v5e-16"]) == 1
    error = capsys.readouterr().err
    assert "do not divide evenly into 16 shards" in error
    assert "compiled and fits: mesh.data=1 mesh.fsdp=16 mesh.tensor=1 data.batch_size=32" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5e-255"], "did you mean v5e-256"),
        (["--topology", "v5p-3"], "there is no slice of 3 v5p"),
        ([], "pass --topology NAME or set mesh.topology"),
    ],
)
def test_topologies_that_do_not_exist_are_errors(config_file, arguments, message, capsys):
    assert main(["preflight", str(config_file), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_all_topologies_are_listed(capsys):
    assert main(["preflight", "--topology", "list"]) == 0
    out = capsys.readouterr().out
    assert "v5e-256" in out
    assert "b200-16384" in out


def test_the_slowest_resource_bounds_the_step():
    topology = parse_topology("v5e-16")
    bound = roofline(1.97e12, 8 * 10**8, COMPILED.collectives, topology)
    assert bound.compute_seconds == pytest.approx(0.01)
    assert bound.memory_seconds == pytest.approx(0.001)
    assert bound.network_seconds == pytest.approx(0.01, rel=1e-3), "9e8 bytes in both directions of a 45 GB/s link"
    assert roofline(1.0, 8 * 10**8, (), topology).bound_by == "memory"


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("Ran out of memory in memory space hbm. Used 23.36G of 15.75G hbm. Exceeded hbm capacity by", 23.36),
        ("the total memory required for HLO temporaries (54.62G) exceeds available HBM (15.75G).", 54.62),
        ("Ran out of memory in memory space vmem", None),
    ],
)
def test_the_memory_that_is_missing_is_read_from_the_error(message, size):
    assert used_memory(message) == (size and int(size * 2**30))


def test_a_config_without_data_is_an_error():
    config = RunConfig(model=llama(num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=4, mlp_dim=64, vocab_size=64))
    with pytest.raises(UserError, match="set data"):
        preflight(config, "v5e-16")


@pytest.mark.parametrize("remat", ["none", "full"])
def test_memory_by_kind_adds_up_to_the_peak(remat):
    program = train_program(make_config(batch_size=2, remat=remat), jax.devices()[:1])
    num_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.params))
    kinds = memory_of_training(program, program.trace(), 10**9)
    assert sum(kinds.values()) == 10**9
    assert kinds["parameters"] == kinds["gradients"] == num_bytes
    assert kinds["optimizer"] == pytest.approx(2 * num_bytes, rel=1e-3)
    block_inputs = 4 * 3 * 2 * 16 * 32  # 3 layers, 2 rows of 16 tokens of width 32 in float32
    assert (kinds["activations"] == block_inputs) if remat == "full" else (kinds["activations"] > 4 * block_inputs)


def make_config(batch_size: int, remat: str = "none") -> RunConfig:
    return RunConfig(
        model=llama(num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=4, mlp_dim=64, vocab_size=320),
        data=DataConfig(
            train=MemorySource(documents=("unused",)), tokenizer=ByteTokenizer(), length=16, batch_size=batch_size
        ),
        train=TrainConfig(remat=remat),
    )
