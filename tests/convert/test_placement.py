"""Loading parameters into a mesh: correct shards, equal values, and no more read or held in memory than necessary."""

import jax
import numpy as np
import pytest

from jaxformer.config import MeshConfig
from jaxformer.convert import directory
from jaxformer.convert.weights import Weights
from jaxformer.layers import abstract_params
from jaxformer.run import load
from jaxformer.sharding import make_mesh, param_shardings

MESHES = {
    "fsdp and tensor": MeshConfig(data=1, fsdp=4, tensor=2),
    "data and tensor": MeshConfig(data=4, tensor=2),
    "tensor": MeshConfig(data=4, fsdp=1, tensor=2),
}
# Small shards are copied to their device at once, large ones layer by layer.
WHOLE, BY_LAYERS = directory.STAGED_BYTES, 0


@pytest.mark.parametrize(
    ("name", "mesh_name", "staged"),
    [
        ("llama", "data and tensor", WHOLE),
        ("mixtral", "fsdp and tensor", WHOLE),
        ("modernbert", "fsdp and tensor", WHOLE),
        ("bart", "tensor", WHOLE),
        ("gpt2", "fsdp and tensor", BY_LAYERS),
    ],
    ids=str,
)
def test_sharded_parameters_equal_unsharded(name, mesh_name, staged, sample_dir, sample_run, monkeypatch):
    monkeypatch.setattr(directory, "STAGED_BYTES", staged)
    mesh = make_mesh(MESHES[mesh_name], jax.devices())
    run, single = load(sample_dir(name), mesh=mesh), sample_run(name)
    shapes, axes = abstract_params(single.config.model)
    wanted = param_shardings(axes, shapes, mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, run.params) == wanted
    jax.tree.map(np.testing.assert_array_equal, run.params, single.params)
    num_split = 0
    for leaf in jax.tree.leaves(run.params):
        num_split += not leaf.is_fully_replicated
        part = leaf.sharding.shard_shape(leaf.shape)
        assert all(shard.data.shape == part for shard in leaf.addressable_shards)
    assert num_split > 5


def test_layer_by_layer_copy_to_one_device(sample_dir, sample_run, monkeypatch):
    monkeypatch.setattr(directory, "STAGED_BYTES", BY_LAYERS)
    jax.tree.map(np.testing.assert_array_equal, load(sample_dir("qwen3-moe")).params, sample_run("qwen3-moe").params)
    assert {leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(sample_run("qwen3-moe").params)} == {True}


def test_no_device_receives_more_than_its_shard(sample_dir, monkeypatch):
    """Records the shapes of all `device_put` calls: every array has the shape of a shard."""
    device_put, calls = jax.device_put, []

    def record(array, device):
        calls.append((array.shape, device))
        return device_put(array, device)

    mesh = make_mesh(MESHES["fsdp and tensor"], jax.devices())
    monkeypatch.setattr(directory.jax, "device_put", record)
    params = load(sample_dir("llama"), mesh=mesh).params
    allowed = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)}
    assert {shape for shape, _ in calls} <= allowed
    assert {device for _, device in calls} == set(mesh.devices.flat)


class ReadCounter:
    """Stands in for a tensor and counts how often each element is read."""

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts

    def __getitem__(self, where: tuple[slice, ...]) -> np.ndarray:
        self.counts[where] += 1
        return self.counts[where]


@pytest.mark.parametrize("mesh_name", ["fsdp and tensor", "data and tensor"])
def test_every_element_is_read_once(mesh_name, sample_dir, monkeypatch):
    """Also for fused tensors, of which a device reads only parts, and for shards that several devices share."""
    counts: dict[str, np.ndarray] = {}

    def part(self, binding, number):
        tensor = counts.setdefault(binding.name, np.zeros(binding.shape, np.int32))
        array = binding.layout.to_ours(tensor, binding.sizes)
        return ReadCounter(array if len(binding.parts) == 1 else array[number])

    monkeypatch.setattr(directory.HuggingFaceDirectory, "_read_part", part)
    load(sample_dir("gpt2"), mesh=make_mesh(MESHES[mesh_name], jax.devices()))
    assert counts.keys() == Weights(sample_dir("gpt2")).tensors.keys()
    assert {name for name, count in counts.items() if (count != 1).any()} == set()
