"""Parameters straight into a mesh: the right shards, the same numbers, and no more read or held than they need."""

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
# Both ways a shard reaches its device: small ones at once, large ones layer by layer.
WHOLE, BY_LAYERS = directory.STAGED_BYTES, 0


@pytest.mark.parametrize(
    ("name", "over", "staged"),
    [
        ("llama", "data and tensor", WHOLE),
        ("mixtral", "fsdp and tensor", WHOLE),
        ("modernbert", "fsdp and tensor", WHOLE),
        ("bart", "tensor", WHOLE),
        ("gpt2", "fsdp and tensor", BY_LAYERS),
    ],
    ids=str,
)
def test_a_mesh_holds_the_same_numbers_in_shards(name, over, staged, saved, loaded, monkeypatch):
    monkeypatch.setattr(directory, "STAGED_BYTES", staged)
    mesh = make_mesh(MESHES[over], jax.devices())
    run, single = load(saved(name), mesh=mesh), loaded(name)
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


def test_large_blocks_on_one_device(saved, loaded, monkeypatch):
    monkeypatch.setattr(directory, "STAGED_BYTES", BY_LAYERS)
    jax.tree.map(np.testing.assert_array_equal, load(saved("qwen3-moe")).params, loaded("qwen3-moe").params)
    assert {leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded("qwen3-moe").params)} == {True}


def test_no_device_ever_holds_a_whole_split_tensor(saved, monkeypatch):
    """Counted where arrays go to devices: each gets blocks of the size of its shards, and nothing larger."""
    put, sizes = jax.device_put, []

    def counted(array, device):
        sizes.append((array.shape, device))
        return put(array, device)

    mesh = make_mesh(MESHES["fsdp and tensor"], jax.devices())
    monkeypatch.setattr(directory.jax, "device_put", counted)
    params = load(saved("llama"), mesh=mesh).params
    allowed = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)}
    assert {shape for shape, _ in sizes} <= allowed
    assert {device for _, device in sizes} == set(mesh.devices.flat)


class Marking:
    """A tensor of counts: how often each number was taken."""

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts

    def __getitem__(self, where: tuple[slice, ...]) -> np.ndarray:
        self.counts[where] += 1
        return self.counts[where]


@pytest.mark.parametrize("over", ["fsdp and tensor", "data and tensor"])
def test_every_number_is_read_once(over, saved, monkeypatch):
    """Also from a fused tensor of which each device takes parts, and for what several devices hold alike."""
    counts: dict[str, np.ndarray] = {}

    def part(self, binding, number):
        tensor = counts.setdefault(binding.name, np.zeros(binding.shape, np.int32))
        array = binding.layout.to_ours(tensor, binding.sizes)
        return Marking(array if len(binding.parts) == 1 else array[number])

    monkeypatch.setattr(directory.HuggingFaceDirectory, "_read_part", part)
    load(saved("gpt2"), mesh=make_mesh(MESHES[over], jax.devices()))
    assert counts.keys() == Weights(saved("gpt2")).tensors.keys()
    assert {name for name, count in counts.items() if (count != 1).any()} == set()
