"""Prefill and the token step compiled for accelerators that are not attached."""

import pytest

from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, MeshConfig, ModelConfig, RunConfig
from jaxformer.layers import num_params
from jaxformer.models.llama import llama
from jaxformer.models.t5 import t5
from jaxformer.preflight.compile import Compiled
from jaxformer.preflight.decode import DecodeJob, compile_decode
from jaxformer.topology import parse_topology

SIZES = {"num_layers": 2, "embed_dim": 256, "num_heads": 8, "mlp_dim": 512, "vocab_size": 1024}
DECODER = llama(**SIZES, num_kv_heads=4, head_dim=128, tied=False)
BATCH, LENGTH = 32, 512


def compile_for(topology: str, model: ModelConfig, mesh: dict[str, int], cache: str = "dtype") -> dict[str, Compiled]:
    if not topology.startswith("h100"):
        pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    data = DataConfig(train=MemorySource(documents=("unused",)), tokenizer=ByteTokenizer(), length=256)
    config = RunConfig(model=model, data=data, mesh=MeshConfig(**mesh))
    return compile_decode(DecodeJob(config, parse_topology(topology), BATCH, 256, LENGTH, cache))


def cache_bytes(chips: int, bytes_per_vector: int = 2 * 128) -> int:
    """Bytes per chip of the keys and values of `DECODER`."""
    return SIZES["num_layers"] * 2 * BATCH * 4 * LENGTH * bytes_per_vector // chips


def test_decoding_on_tpus_updates_sharded_caches_in_place():
    programs = compile_for("v5e-16", DECODER, {"data": 4, "tensor": 4})
    prefill, token = programs["prefill"], programs["token"]
    params = 2 * num_params(DECODER) / 4
    assert token.argument_bytes == pytest.approx(params + cache_bytes(16), rel=0.02)
    # A copy of the keys of all layers would be half of the caches.
    assert token.peak_bytes - token.argument_bytes < cache_bytes(16) / 4
    assert {(each.kind, each.axis) for each in token.collectives if each.bytes > 8_000} == {("all-reduce", "tensor")}
    assert prefill.attention == {"causal, 256 queries, 256 keys": "splash"}
    assert token.attention == {"causal, 1 queries, 512 keys": "paged; not splash: it does not read a KV cache"}


@pytest.mark.slow
def test_int8_caches_on_tpus_are_updated_in_place():
    token = compile_for("v5e-16", DECODER, {"data": 4, "fsdp": 2, "tensor": 2}, "int8")["token"]
    whole = cache_bytes(16, 128 + 4)
    assert token.argument_bytes == pytest.approx(2 * num_params(DECODER) / 4 + whole, rel=0.02)
    assert token.peak_bytes - token.argument_bytes < whole / 2


@pytest.mark.slow
def test_encoder_decoders_decode_on_a_3d_torus():
    model = t5(num_layers=2, embed_dim=256, num_heads=4, head_dim=64, mlp_dim=512, vocab_size=1024, dropout=0.0)
    programs = compile_for("v4-32", model, {"data": 4, "tensor": 4})
    assert "both ways, BucketedBias, 256 queries, 256 keys" in programs["prefill"].attention
    assert "both ways, 1 queries, 256 keys" in programs["token"].attention


@pytest.mark.gpu_aot
def test_decoding_on_gpus_updates_sharded_caches_in_place():
    programs = compile_for("h100-8", DECODER, {"data": 2, "tensor": 4})
    prefill, token = programs["prefill"], programs["token"]
    # The reference kernel copies the keys and values of one of the two layers at a time out of the stack.
    assert token.peak_bytes - token.argument_bytes < 0.6 * cache_bytes(8)
    assert prefill.attention["causal, 256 queries, 256 keys"].startswith("cudnn")
