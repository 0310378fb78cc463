"""Data, FSDP and tensor parallelism, alone and combined, give the loss and the gradients of a single device.

Dropout, packed rows, accumulation, label smoothing, z-loss and chunks of the loss are on everywhere.
"""

from functools import cache

import jax
import numpy as np
import pytest

from jaxformer.bench.train import random_batch
from jaxformer.config import (
    ByteTokenizer,
    Classify,
    DataConfig,
    Masked,
    MemorySource,
    MeshConfig,
    ModelConfig,
    RunConfig,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.layers import init_params
from jaxformer.models.bart import bart
from jaxformer.models.bert import bert
from jaxformer.models.gemma import gemma2
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.mixtral import mixtral
from jaxformer.models.rnn import rnn
from jaxformer.models.t5 import t5
from jaxformer.sharding import global_batch
from jaxformer.train.program import train_program
from jaxformer.train.step import gradient_sums
from jaxformer.typing import Batch, Params

SIZES = {"num_layers": 2, "embed_dim": 32, "num_heads": 8, "mlp_dim": 64, "vocab_size": 272, "context_length": 32}
DROPOUT = {"dropout": 0.2}
CASES = {
    "gpt2": (lambda: gpt2(**{k: v for k, v in SIZES.items() if k != "mlp_dim"}, **DROPOUT), {}),
    "gemma2": (lambda: gemma2(**SIZES, num_kv_heads=2, head_dim=8, window=8, attention_dropout=0.2, **DROPOUT), {}),
    "experts": (lambda: with_dropout(mixtral(**SIZES, num_kv_heads=8, num_experts=4, top_k=2)), {}),
    "lstm": (lambda: rnn(cell="lstm", num_layers=2, embed_dim=32, dim=64, vocab_size=272, **DROPOUT), {}),
    "bert": (lambda: bert(**SIZES, masked_lm=True, **DROPOUT), {"objective": Masked()}),
    "classifier": (lambda: bert(**SIZES, num_classes=2, **DROPOUT), {"objective": Classify()}),
    "bart": (lambda: bart(**SIZES, **DROPOUT), {"objective": Seq2Seq(input_length=32)}),
    "t5": (lambda: t5(**SIZES, head_dim=8, **DROPOUT), {"objective": Seq2Seq(input_length=32)}),
}
KINDS = {"decoder-only": "gpt2", "encoder-decoder": "t5", "encoder-only": "bert", "mixture of experts": "experts"}
MESHES = {
    "data": {"data": 8},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 1, "tensor": 8},
    "data x fsdp": {"data": 2, "fsdp": 4},
    "data x tensor": {"data": 4, "tensor": 2},
    "fsdp x tensor": {"data": 1, "fsdp": 4, "tensor": 2},
    "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
}


def with_dropout(model: ModelConfig) -> ModelConfig:
    """A model of blocks of one kind with dropout, for builders that have none."""
    (block,) = model.decoder.pattern
    block = block.replace(attention=block.attention.replace(**DROPOUT), **DROPOUT)
    return model.replace(decoder=model.decoder.replace(pattern=(block,)))


def make_config(name: str, sizes: dict[str, int], remat: str = "dots") -> RunConfig:
    build, data = CASES[name]
    return RunConfig(
        model=build(),
        data=DataConfig(
            train=MemorySource(documents=("unused",)), tokenizer=ByteTokenizer(), length=16, batch_size=16, **data
        ),
        train=TrainConfig(accumulate=2, label_smoothing=0.1, z_loss=0.01, loss_chunks=2, remat=remat),
        mesh=MeshConfig(**sizes),
    )


@cache
def inputs(name: str) -> tuple[Params, Batch]:
    config = make_config(name, {})
    batch = random_batch(config)
    weights = np.random.default_rng(1).integers(0, 2, batch.weights.shape).astype(np.float32)
    return init_params(config.model, jax.random.key(1)), batch._replace(weights=weights)


def gradients(name: str, sizes: dict[str, int], num_devices: int = 8, remat: str = "dots"):
    program = train_program(make_config(name, sizes, remat), jax.devices()[:num_devices])
    params, batch = inputs(name)
    params = jax.device_put(params, program.shardings.params)
    batch = global_batch(batch, program.mesh)
    with jax.set_mesh(program.mesh):
        return jax.jit(lambda *args: gradient_sums(*args, program.parts))(params, None, batch, jax.random.key(2))


@cache
def gradients_of_one_device(name: str):
    return jax.device_get(gradients(name, {}, num_devices=1))


def check(name: str, sizes: dict[str, int], remat: str = "dots") -> None:
    expected, expected_sums = gradients_of_one_device(name)
    actual, sums = gradients(name, sizes, remat=remat)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))

    def close(path, a, b):
        # Some gradients, such as those of key biases, would be zero without rounding.
        atol = 1e-5 * max(np.abs(b).max(), 1e-3 * largest)
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, actual, expected)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_eight_devices_equal_one(kind, mesh):
    check(KINDS[kind], MESHES[mesh])


OTHERS = [name for name in CASES if name not in KINDS.values()]


@pytest.mark.parametrize("name", OTHERS)
def test_all_axes_at_once(name):
    check(name, MESHES["data x fsdp x tensor"])


@pytest.mark.parametrize("remat", ["none", "full", "attention", "offload"])
def test_rematerialisation_with_sharded_weights(remat):
    check("gpt2", MESHES["data x fsdp"], remat)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh.count("x") < 2])
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_on_other_meshes(name, mesh):
    sizes = MESHES[mesh]
    if name == "gemma2" and mesh == "tensor":
        sizes = {"data": 4, "tensor": 2}  # it has two key-value heads
    check(name, sizes)
