"""Shardings of the train state."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.config import MeshConfig, OptimConfig
from jaxformer.errors import UserError
from jaxformer.sharding import check_batch, path_name
from jaxformer.train.program import train_program

EXPECTED = {
    "embedding/tokens": P("tensor", "fsdp"),
    "embedding/positions": P(None, "fsdp"),
    "decoder/final_norm/scale": P(None),
    "decoder/blocks_0/attention/q/kernel": P(None, "fsdp", "tensor", None),
    "decoder/blocks_0/attention/q/bias": P(None, "tensor", None),
    "decoder/blocks_0/attention/out/kernel": P(None, "tensor", None, "fsdp"),
    "decoder/blocks_0/mlp/up/kernel": P(None, "fsdp", "tensor"),
    "decoder/blocks_0/mlp/down/kernel": P(None, "tensor", "fsdp"),
    "decoder/blocks_0/mlp/down/bias": P(None, "fsdp"),
}


def _specs(config, **mesh):
    program = train_program(config.replace(mesh=MeshConfig(**mesh)), jax.devices())
    return {path_name(path): s.spec for path, s in jax.tree_util.tree_leaves_with_path(program.shardings)}


def test_parameters_ema_and_moments_have_the_same_sharding(make_config):
    specs = _specs(make_config(optim=OptimConfig(ema_decay=0.9)), data=2, fsdp=2, tensor=2)
    for path, spec in EXPECTED.items():
        assert specs[f"params/{path}"] == spec, path
        assert specs[f"ema/{path}"] == spec, path
        moments = [s for p, s in specs.items() if p.startswith("opt_state") and p.endswith(path)]
        assert moments == [spec, spec], path


def test_the_state_is_replicated_on_a_data_parallel_mesh(make_config):
    for path, spec in _specs(make_config(), data=8).items():
        assert all(entry is None for entry in spec), path


@pytest.mark.parametrize("kind", ["adafactor", "lion", "muon"])
def test_moments_of_every_optimizer_are_sharded(kind, make_config):
    """Including Adafactor: matrices this small are below its threshold for factoring."""
    specs = _specs(make_config(optim=OptimConfig(algorithm={"kind": kind})), fsdp=4, tensor=2, data=1)
    moments = [s for p, s in specs.items() if p.startswith("opt_state") and p.endswith("mlp/up/kernel")]
    assert P(None, "fsdp", "tensor") in moments


def test_each_of_eight_devices_holds_an_eighth_of_the_state(make_config):
    state = train_program(make_config(mesh=MeshConfig(data=1, fsdp=4, tensor=2)), jax.devices()).init()
    kernel = state.params["decoder"]["blocks_0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    assert state.opt_state[1].mu["decoder"]["blocks_0"]["mlp"]["up"]["kernel"].sharding == kernel.sharding


def test_an_indivisible_batch_size_raises(make_config):
    config = make_config(data={"batch_size": 12})
    with pytest.raises(UserError, match=r"data.batch_size=12.*multiple of 8"):
        check_batch(config, num_devices=8)


def test_a_mesh_that_does_not_fit_the_devices_raises(make_config):
    config = make_config(mesh=MeshConfig(data=3))
    with pytest.raises(UserError, match=r"data=3.*8 devices"):
        check_batch(config, num_devices=8)
