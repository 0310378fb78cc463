"""Safetensors files: sharded files with an index, round trips of every dtype, and peak memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxformer.cli import main
from jaxformer.convert.export import export_model
from jaxformer.convert.weights import TensorPlan, Weights, parse_size, write_weights
from jaxformer.errors import UserError
from jaxformer.exchange import export_run, import_run
from jaxformer.layers import abstract_params
from jaxformer.models.llama import llama
from jaxformer.run import load

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": np.dtype("float32"), "float16": np.dtype("float16"), "bfloat16": BF16}


def _all_tensors(directory: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def _assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert {n: (t.dtype, t.shape) for n, t in one.items()} == {n: (t.dtype, t.shape) for n, t in other.items()}
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.fixture(scope="module")
def run_dir(sample_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "llama"
    import_run(sample_dir("llama"), path)
    return path


# ---------------------------------------------------------------- several files
def test_many_small_files(run_dir, sample_dir, tmp_path):
    export_run(run_dir, tmp_path / "out", max_bytes=20_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = load_file(sample_dir("llama") / "model.safetensors")
    assert index["weight_map"].keys() == stored.keys()
    size = sum(tensor.nbytes for tensor in stored.values())
    assert index["metadata"] == {"total_parameters": size // 4, "total_size": size}
    _assert_same(_all_tensors(tmp_path / "out"), stored)
    again = load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again.params, load(run_dir).params)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(theirs[name].numpy(), tensor)


def test_tensor_larger_than_max_bytes_gets_its_own_file(run_dir, sample_dir, tmp_path):
    export_run(run_dir, tmp_path / "out", max_bytes=1)
    stored = load_file(sample_dir("llama") / "model.safetensors")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(stored)
    _assert_same(_all_tensors(tmp_path / "out"), stored)


def test_shard_size_on_the_command_line(run_dir, sample_dir, tmp_path):
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--shard-size", "20KB"]) == 0
    theirs = transformers.LlamaForCausalLM.from_pretrained(sample_dir("llama"))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours, wanted = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("out", "theirs")
    )
    assert ours["metadata"] == wanted["metadata"]
    assert ours["weight_map"].keys() == wanted["weight_map"].keys()
    assert main(["export", str(run_dir), str(tmp_path / "whole")]) == 0
    assert [file.name for file in (tmp_path / "whole").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("200MB", 2 * 10**8), ("1.5 kb", 1500), ("7B", 7), ("2tb", 2 * 10**12)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "0GB", "0.1B", "-1GB", "5 G", "5GiB", "1e3MB", "nanGB"])
def test_invalid_sizes(text, tmp_path, run_dir, capsys):
    with pytest.raises(UserError, match="must be a positive number with a unit"):
        parse_size(text)
    assert main(["export", str(run_dir), str(tmp_path / "out"), f"--shard-size={text}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: shard size '{text}': must be")
    assert not list(tmp_path.iterdir())


def test_load_files_sharded_by_transformers(sample_run, tmp_path, sample_dir):
    model = transformers.LlamaForCausalLM.from_pretrained(sample_dir("llama"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).params, sample_run("llama").params)


def test_tensors_are_aligned(tmp_path):
    """Wider dtypes come first: after a float16 tensor of odd length, a float32 tensor would not be aligned."""
    rng = np.random.default_rng(0)
    arrays = {"a": rng.standard_normal(3).astype("float16"), "b": rng.standard_normal((2, 5)).astype("float32")}
    write_weights(tmp_path, [TensorPlan(name, x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()])
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.offset_keys() == ["b", "a"]
    weights = Weights(tmp_path)
    assert weights.tensors["b"].start % 8 == 0
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights.read(name), array)


# ---------------------------------------------------------------- dtypes
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_round_trip(dtype, copy_sample, tmp_path):
    source = copy_sample("smollm2")
    source.put({name: tensor.astype(DTYPES[dtype]) for name, tensor in source.tensors().items()})
    import_run(source.path, tmp_path / "run")
    run = load(tmp_path / "run")
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(run.params))
    message = export_run(tmp_path / "run", tmp_path / "out")
    assert f" in {dtype} to " in message
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == source.weights.read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("name", ["smollm2", "bert", "gpt2"])
def test_mixed_dtypes_round_trip(name, copy_sample, tmp_path):
    """Norms in float32 and the rest in bfloat16, as in some published models; GPT-2 without the tensor name prefix."""
    source = copy_sample(name)
    mixed = {key: tensor if tensor.ndim == 1 else tensor.astype(BF16) for key, tensor in source.tensors().items()}
    source.put({key.removeprefix("transformer."): tensor for key, tensor in mixed.items()})
    import_run(source.path, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    _assert_same(_all_tensors(tmp_path / "out"), mixed)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    export_run(tmp_path / "run", tmp_path / "wide", dtype="float32")
    assert {tensor.dtype for tensor in _all_tensors(tmp_path / "wide").values()} == {np.dtype("float32")}


def test_export_in_another_dtype(run_dir, sample_dir, tmp_path):
    for dtype in ("bfloat16", "float16"):
        export_run(run_dir, tmp_path / dtype, dtype=dtype)
        wanted = load_file(sample_dir("llama") / "model.safetensors")
        _assert_same(_all_tensors(tmp_path / dtype), {n: t.astype(DTYPES[dtype]) for n, t in wanted.items()})
    with pytest.raises(UserError, match=r"dtype=float8: unknown dtype; there are: float32, float16, bfloat16"):
        export_run(run_dir, tmp_path / "never", dtype="float8")
    assert not (tmp_path / "never").exists()


def test_float16_overflow_names_the_tensor(copy_sample, tmp_path):
    source = copy_sample("smollm2")
    source.put(source.tensors() | {"model.norm.weight": np.full(32, 1e5, np.float32)})
    import_run(source.path, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"'model.norm.weight' holds 100000, and the largest float16 is 65504: export as bfl"
    ):
        export_run(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source"]


def test_load_in_another_dtype(sample_dir):
    run = load(sample_dir("smollm2"), dtype="bfloat16")
    assert all(leaf.dtype == BF16 for leaf in jax.tree.leaves(run.params))


# ---------------------------------------------------------------- memory
FILE_BYTES = 64 * 2**20
# Measures resident memory, which includes memory-mapped pages of the files. A tiny model is loaded first, both at once
# and layer by layer, so that imports and compilation are not measured. Writing 5 to clear_refs resets the peak; see
# proc(5).
MEASURED = """
import sys
from pathlib import Path
import jax, numpy as np
from jaxformer.convert import directory
from jaxformer.convert.export import export_model
from jaxformer.run import load

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

def peak(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    result = work()
    return result, (kilobytes("VmHWM") - before) * 1024

source, tiny, out = map(Path, sys.argv[1:])
load(tiny)
staged, directory.STAGED_BYTES = directory.STAGED_BYTES, 0
tiny_run = load(tiny)
directory.STAGED_BYTES = staged
(out / "tiny").mkdir()
export_model(out / "tiny", tiny_run.config.model, tiny_run.params, np.dtype("float32"))
run, loading = peak(lambda: load(source))
assert sum(leaf.nbytes for leaf in jax.tree.leaves(run.params))
_, writing = peak(lambda: export_model(out, run.config.model, run.params, np.dtype("float32"), max_bytes=64 * 2**20))
print(loading, writing)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_of_loading_and_writing(dtype, tmp_path):
    """Loading needs the parameters plus at most 1.2 times the largest file, which is less than one stacked kernel.
    Writing needs only a few tensors at a time, at most 1.2 times the size of a file."""
    model = llama(
        num_layers=24, embed_dim=512, num_heads=8, num_kv_heads=8, mlp_dim=2048, vocab_size=4000, context_length=64
    )
    tiny = llama(num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=2, mlp_dim=8, vocab_size=16, context_length=64)
    for name, config in (("source", model), ("tiny", tiny)):
        rng = np.random.default_rng(0)
        shapes, _ = abstract_params(config)
        params = jax.tree.map(lambda leaf, rng=rng: rng.standard_normal(leaf.shape, np.float32), shapes)
        (tmp_path / name).mkdir()
        export_model(tmp_path / name, config, params, DTYPES[dtype], max_bytes=FILE_BYTES)
    files = [file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors")]
    size = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(model)[0])) * 4
    assert size > 380 * 2**20
    assert len(files) > 2
    (tmp_path / "out").mkdir()
    environment = os.environ | {"XLA_FLAGS": ""}
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, *(str(tmp_path / name) for name in ("source", "tiny", "out"))],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    loading, writing = map(int, result.stdout.split())
    print(f"parameters {size:,}, largest file {max(files):,}, loading {loading:,}, writing {writing:,}")
    assert size <= loading <= size + 1.2 * max(files)
    assert writing <= 1.2 * FILE_BYTES
