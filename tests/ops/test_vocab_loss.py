"""The loss over vocabulary chunks on eight devices against `cross_entropy` of all logits on one."""

import re
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, MeshConfig, RunConfig, TrainConfig
from jaxformer.models.gpt2 import gpt2
from jaxformer.ops.elementwise import apply_softcap
from jaxformer.ops.losses import LossOptions, cross_entropy
from jaxformer.ops.sharded import Fsdp, ShardedKernel, ShardedTable
from jaxformer.ops.vocab_loss import output_matrix, vocab_loss
from jaxformer.sharding import batch_spec, make_mesh, on_devices, partition_spec, sum_devices
from jaxformer.train.program import train_program

B, T, D, V = 8, 3, 16, 44  # with a tensor axis of 2, every device has 22 columns, which 3 chunks do not divide
SPECIAL = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 1.5, "tied": True, "bias": True}
ALONE = [{}, *({name: value} for name, value in SPECIAL.items())]
MESHES = [
    {"data": 1, "fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"data": 1, "fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


@cache
def arrays():
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(V, D)), "bias": rng.normal(size=V), "features": rng.normal(size=(B, T, D))}
    params = {name: a.astype(np.float32) for name, a in params.items()}
    return params, rng.integers(0, V, (B, T)), rng.integers(0, 3, (B, T)).astype(np.float32)


def expected(label_smoothing=0.0, z_loss=0.0, softcap=None, tied=False, bias=False):
    params, targets, weights = arrays()

    def loss(params):
        logits = apply_softcap(params["features"] @ params["table"].T + bias * params["bias"], softcap)
        results = cross_entropy(logits, targets, weights, label_smoothing=label_smoothing, z_loss=z_loss)
        return 3 * results[0].loss, results

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def actual(sizes, chunks=3, gathers_once=False, label_smoothing=0.0, z_loss=0.0, softcap=None, tied=False, bias=False):
    mesh, (params, targets, weights) = make_mesh(MeshConfig(**sizes), jax.devices()), arrays()
    fsdp = Fsdp((sizes["fsdp"],), gathers_head_once=gathers_once)
    options = LossOptions(label_smoothing, z_loss, vocab_chunks=chunks)
    axes = ("vocab", "embed") if tied else ("embed", "vocab")
    output = params["table"] if tied else params["table"].T
    specs = {"output": partition_spec(axes, output.shape, mesh), "bias": partition_spec(("vocab",), (V,), mesh)}
    rows = batch_spec(mesh)

    def local(weight, features, targets, weights):
        def loss(weight, features):
            shard = weight["output"]
            matrix = ShardedTable(shard, fsdp) if tied else ShardedKernel(shard, axes, fsdp)
            matrix = output_matrix(matrix, weight["bias"] if bias else None, softcap)
            results = vocab_loss(matrix, features, targets, weights, options)
            return 3 * results[0].loss, results

        (value, (sums, tokens)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weight, features)
        grads[0]["output"] = sum_devices(grads[0]["output"], ("data",))
        grads[0]["bias"] = sum_devices(grads[0]["bias"])
        return sum_devices((value, sums)), tokens, grads

    outputs = (PartitionSpec(), rows, (specs, rows))
    run = jax.jit(on_devices(local, mesh, (specs, rows, rows, rows), outputs))
    with jax.set_mesh(mesh):
        weight = {"output": output, "bias": params["bias"]}
        (value, sums), tokens, (d_weight, d_features) = run(weight, params["features"], targets, weights)
    d_table = d_weight["output"] if tied else d_weight["output"].T
    return (value, (sums, tokens)), {"table": d_table, "bias": d_weight["bias"], "features": d_features}


def check(sizes, options, **how):
    ours, theirs = actual(sizes, **how, **options), expected(**options)
    if not options.get("bias"):
        assert not np.asarray(theirs[1]["bias"]).any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("options", ALONE, ids=lambda options: next(iter(options), "plain"))
def test_every_option_alone(options):
    check({"data": 1, "fsdp": 4, "tensor": 2}, options)


@pytest.mark.parametrize("how", [{"chunks": 3}, {"chunks": 5, "gathers_once": True}], ids=["chunks", "gathered once"])
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(f"{a}{n}" for a, n in sizes.items()))
def test_all_options_together(sizes, how):
    check(sizes, SPECIAL, **how)


def test_a_single_chunk_of_an_untied_head():
    check({"data": 2, "fsdp": 4}, SPECIAL | {"tied": False}, chunks=1)


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize(
    "sizes",
    [{"data": 1, "fsdp": 8}, {"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=lambda sizes: "x".join(f"{a}{n}" for a, n in sizes.items()),
)
def test_logits_never_exist_whole(sizes):
    """The largest array of the compiled step with a dimension of the vocabulary is a chunk of logits or a parameter."""
    rows, length, vocab_size, chunks = 4, 64, 1024, 4
    config = RunConfig(
        model=gpt2(num_layers=1, embed_dim=16, num_heads=2, vocab_size=vocab_size, context_length=length),
        data=DataConfig(
            train=MemorySource(documents=("unused",)), tokenizer=ByteTokenizer(), length=length, batch_size=8 * rows
        ),
        train=TrainConfig(loss_chunks=chunks, label_smoothing=0.1, z_loss=0.01),
        mesh=MeshConfig(**sizes),
    )
    text = train_program(config, jax.devices()).lower().compile().as_text()
    local_rows = 8 * rows // (sizes["data"] * sizes.get("fsdp", 1))
    logits = local_rows * length * vocab_size // sizes.get("tensor", 1) // chunks
    arrays = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)}
    largest = max(int(np.prod(shape)) for shape in arrays)
    assert logits <= largest < 2 * logits, [shape for shape in arrays if np.prod(shape) == largest]
