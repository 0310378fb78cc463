"""Train steps compiled for TPUs that are not attached: kernels and collectives are those that one expects.

Shapes are small multiples of a TPU's tiles: with smaller ones, the compiler may replace a reduce-scatter.
"""

import pytest

from jaxformer.config import (
    ByteTokenizer,
    DataConfig,
    MemorySource,
    MeshConfig,
    ModelConfig,
    RunConfig,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.errors import UserError
from jaxformer.layers import num_params
from jaxformer.models.llama import llama
from jaxformer.models.t5 import t5
from jaxformer.preflight.compile import Compiled, compile_step
from jaxformer.topology import parse_topology

DECODER = llama(
    num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=4, head_dim=128, mlp_dim=512, vocab_size=1024, tied=False
)

# Bytes of the gradients that are scattered, in bfloat16: all but those of the token table, which are exchanged.
SCATTERED = 2 * (num_params(DECODER) - DECODER.vocab_size * DECODER.embed_dim)


pytestmark = pytest.mark.usefixtures("tpu_compiler")


def compile_for(topology: str, model: ModelConfig, mesh: dict[str, int], accumulate: int = 1, **data) -> Compiled:
    topology = parse_topology(topology)
    config = RunConfig(
        model=model,
        data=DataConfig(
            train=MemorySource(documents=("unused",)),
            tokenizer=ByteTokenizer(),
            length=256,
            batch_size=accumulate * topology.num_devices,
            **data,
        ),
        train=TrainConfig(remat="full", accumulate=accumulate),
        mesh=MeshConfig(**mesh),
    )
    return compile_step(config, topology)


def sizes(compiled: Compiled) -> dict[tuple[str, str], int]:
    return {(each.kind, each.axis): each.bytes for each in compiled.collectives}


def test_fsdp_gathers_and_scatters():
    compiled = compile_for("v5e-16", DECODER, {"data": 1, "fsdp": 16})
    found = sizes(compiled)
    assert set(found) == {(kind, "fsdp") for kind in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")}
    assert found["all-reduce", "fsdp"] < 20_000, "only norm scales and sums"
    # Over two torus axes, a quarter is left for the second one.
    assert found["reduce-scatter", "fsdp"] == pytest.approx(1.25 * SCATTERED, rel=0.02)
    assert compiled.attention == {"causal, 256 queries, 256 keys": "splash"}
    assert compiled.peak_bytes > compiled.argument_bytes > 3 * 4 * num_params(DECODER) / 16


def test_accumulated_gradients_are_reduced_over_data_once():
    """Over `fsdp`, they are scattered in every micro-batch, so that the accumulator holds a shard of each."""
    compiled = compile_for("v5e-16", DECODER, {"data": 4, "fsdp": 4}, 2)
    found = {(each.kind, each.axis): each for each in compiled.collectives}
    reduced = found["all-reduce", "data"]
    assert reduced.count == 1
    assert reduced.bytes == pytest.approx(4 * num_params(DECODER) / 4, rel=0.02), "float32 shards"
    scattered = found["reduce-scatter", "fsdp"]
    assert scattered.bytes == pytest.approx(2 * SCATTERED, rel=0.02)
    assert scattered.count % 2 == 0
    # What else is reduced: gradients of norm scales, and sums for the loss and the norms of all gradients.
    others = [each for axes, each in found.items() if axes[0] == "all-reduce" and axes[1] != "data"]
    assert sum(each.bytes for each in others) < 20_000
    assert ("reduce-scatter", "data") not in found
    assert ("all-gather", "data") not in found


def test_tensor_parallelism_gathers_no_weights():
    found = sizes(compile_for("v6e-16", DECODER, {"data": 1, "fsdp": 8, "tensor": 2}))
    assert ("all-gather", "tensor") not in found
    assert {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "tensor")} <= set(found)


def test_encoder_decoders_gather_and_scatter_on_a_3d_torus():
    model = t5(num_layers=1, embed_dim=256, num_heads=4, head_dim=64, mlp_dim=512, vocab_size=1024, dropout=0.0)
    compiled = compile_for("v4-32", model, {"data": 1, "fsdp": 16}, objective=Seq2Seq(input_length=256))
    found = sizes(compiled)
    assert found["reduce-scatter", "fsdp"] > found["all-reduce", "fsdp"] * 10
    kernels = {inputs: choice.split(";")[0] for inputs, choice in compiled.attention.items()}
    assert kernels == {
        "both ways, BucketedBias, 256 queries, 256 keys": "scanned",
        "causal, BucketedBias, 256 queries, 256 keys": "scanned",
        "both ways, 256 queries, 256 keys": "splash",
    }


def test_errors_of_the_config_are_errors_of_preflight():
    with pytest.raises(UserError, match="mesh: fsdp=3 does not fit 16 devices"):
        compile_for("v5e-16", DECODER, {"data": 1, "fsdp": 3})
