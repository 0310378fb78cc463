"""Mapping of logical axes to mesh axes: how arrays are split, and errors instead of silent replication."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from jaxformer.config import MeshConfig
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.models import PRESETS, preset
from jaxformer.sharding import (
    MESH_AXES,
    RULES,
    constrain,
    make_mesh,
    mesh_shape,
    param_shardings,
    partition_spec,
    path_name,
)


def abstract_mesh(**sizes: int) -> AbstractMesh:
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


# ---------------------------------------------------------------- the mesh
def test_an_axis_of_minus_one_uses_the_remaining_devices():
    assert mesh_shape(MeshConfig(fsdp=2), 8) == dict.fromkeys(MESH_AXES, 1) | {"data": 4, "fsdp": 2}
    assert mesh_shape(MeshConfig(data=1, fsdp=-1, tensor=2), 8)["fsdp"] == 4
    assert mesh_shape(MeshConfig(data=2, fsdp=2, tensor=2), 8)["data"] == 2


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (MeshConfig(data=3), "data=3"),
        (MeshConfig(data=2, fsdp=2), "data=2 x fsdp=2"),
        (MeshConfig(tensor=3), "data=-1 x tensor=3"),
        (MeshConfig(data=16), "data=16"),
        (MeshConfig(data=1), "all axes 1"),
    ],
)
def test_a_mesh_that_does_not_use_all_devices(config, shown):
    with pytest.raises(UserError, match=f"mesh: {shown} does not fit 8 devices: .*set one axis to -1"):
        mesh_shape(config, 8)


def test_a_mesh_has_every_axis_with_type_auto():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())
    assert mesh.axis_names == MESH_AXES
    assert mesh.size == 8
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_rules_name_mesh_axes():
    assert {axis for axes in RULES.values() for axis in axes} <= set(MESH_AXES)


# ---------------------------------------------------------------- one array
def test_mesh_axes_of_size_one_do_not_appear_in_specs():
    mesh = abstract_mesh(fsdp=4, tensor=2)
    assert partition_spec(("batch", "length", None), (8, 5, 3), mesh) == P("fsdp", None, None)
    assert partition_spec(("embed", "heads", "head_dim"), (16, 4, 8), mesh) == P("fsdp", "tensor", None)
    assert partition_spec(("embed", "heads", "head_dim"), (15, 3, 7), abstract_mesh(data=8)) == P(None, None, None)


def test_batches_are_split_over_two_mesh_axes():
    assert partition_spec(("batch",), (8,), abstract_mesh(data=2, fsdp=4)) == P(("data", "fsdp"))


def test_a_size_that_does_not_divide_names_tensor_and_both_sizes():
    with pytest.raises(UserError, match=r"block/q: dimension 'heads' of size 3 .* mesh tensor=2: change"):
        partition_spec(("embed", "heads"), (8, 3), abstract_mesh(fsdp=4, tensor=2), "block/q")
    with pytest.raises(UserError, match=r"dimension 'batch' of size 4 .* mesh data=2 x fsdp=4: change"):
        partition_spec(("batch",), (4,), abstract_mesh(data=2, fsdp=4))


def test_a_mesh_axis_used_twice_names_tensor_and_both_dimensions():
    with pytest.raises(UserError, match=r"block/x: mesh axis 'tensor' would split both 'heads' and 'mlp'.*RULES"):
        partition_spec(("heads", "mlp"), (4, 4), abstract_mesh(tensor=2), "block/x")
    assert partition_spec(("heads", "mlp"), (4, 4), abstract_mesh(fsdp=2)) == P(None, None), "no conflict on size 1"


def test_an_unknown_logical_axis_is_rejected():
    with pytest.raises((KeyError, ValueError), match="colour"):
        partition_spec(("colour",), (4,), abstract_mesh(fsdp=2))


def test_axes_that_do_not_match_the_shape():
    with pytest.raises(ValueError, match=r"block/q: logical axes \('embed',\) do not match shape \(4, 4\)"):
        partition_spec(("embed",), (4, 4), abstract_mesh(), "block/q")


# ---------------------------------------------------------------- activations
def test_without_a_mesh_nothing_is_constrained():
    x = jnp.ones((3, 5))
    assert constrain(x, "batch", "vocab") is x
    text = str(jax.make_jaxpr(lambda x: constrain(x, "batch", "vocab"))(x))
    assert "sharding_constraint" not in text


def test_activations_are_split_by_the_rules_of_the_mesh():
    mesh = make_mesh(MeshConfig(data=4, tensor=2), jax.devices())
    with jax.set_mesh(mesh):
        x = jax.jit(lambda x: constrain(x, "batch", "vocab"))(np.ones((4, 6), np.float32))
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "tensor")), 2)
        with pytest.raises(UserError, match="activation: dimension 'batch' of size 3"):
            jax.jit(lambda x: constrain(x, "batch", "vocab"))(np.ones((3, 6), np.float32))


# ---------------------------------------------------------------- every published model
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_sharded_or_the_error_names_a_tensor(name):
    mesh = abstract_mesh(fsdp=4, tensor=2)
    shapes, axes = abstract_params(preset(name))
    sizes = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    indivisible = {path: shape for path, shape in sizes.items() if _is_indivisible(path, shape, axes)}
    if indivisible:
        with pytest.raises(UserError, match="is not divisible by mesh") as caught:
            param_shardings(axes, shapes, mesh)
        tensor = str(caught.value).partition(":")[0]
        assert tensor in indivisible
        return
    shardings = param_shardings(axes, shapes, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(shapes)
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
    ):
        # Large parameters are split over all eight devices; biases, norms and routers need not be.
        if leaf.size // _num_layers(path_name(path), leaf.shape) >= 2**20:
            local = sharding.shard_shape(leaf.shape)
            assert np.prod(local) * 8 == leaf.size, path_name(path)


def _num_layers(path: str, shape: tuple[int, ...]) -> int:
    return shape[0] if "/blocks_" in path or "/first_" in path else 1


def test_presets_with_divisible_sizes_are_sharded():
    """Otherwise the test above would also pass if every preset raised an error."""
    mesh = abstract_mesh(fsdp=4, tensor=2)
    for name in ("llama2-7b", "llama2-70b", "llama3-8b", "vaswani-base"):
        shapes, axes = abstract_params(preset(name))
        param_shardings(axes, shapes, mesh)


def test_both_vocabularies_are_sharded():
    model = preset("marian-opus-en-de").replace(vocab_size=4096, source_vocab_size=6144, special={})
    shapes, axes = abstract_params(model)
    shardings = param_shardings(axes, shapes, abstract_mesh(fsdp=4, tensor=2))["embedding"]
    assert shardings["source_tokens"].spec == shardings["tokens"].spec
    assert shardings["source_tokens"].shard_shape((6144, 512)) == (3072, 128)
    shapes, axes = abstract_params(model.replace(source_vocab_size=6145))
    with pytest.raises(UserError, match=r"embedding/source_tokens: .*6145"):
        param_shardings(axes, shapes, abstract_mesh(fsdp=4, tensor=2))


def _is_indivisible(path, shape, axes) -> bool:
    for part in path.split("/"):
        axes = axes[part]
    ways = {"embed": 4, "heads": 2, "kv_heads": 2, "mlp": 2, "vocab": 2}
    return any(size % ways.get(axis, 1) for axis, size in zip(axes, shape, strict=True))
