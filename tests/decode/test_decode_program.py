"""The decode program on simulated devices: sharded caches, donated states, and the tokens of `generate`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import generate
from jaxformer.config import MeshConfig, ModelConfig, RunConfig
from jaxformer.decode.program import DecodeProgram, DecodeShape, decode_program
from jaxformer.decode.slots import prefill_length
from jaxformer.errors import UserError
from jaxformer.models.bert import bert
from jaxformer.models.gpt2 import gpt2
from jaxformer.ops.attention import record_choices

MESH = MeshConfig(data=2, tensor=2, fsdp=2)
SIZES = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 48, "vocab_size": 264}


def make_program(model: ModelConfig, devices, mesh: MeshConfig = MESH, **shape) -> DecodeProgram:
    shape = DecodeShape(**{"batch_size": 4, "prompt_length": 5, "max_length": 16} | shape)
    return decode_program(RunConfig(model=model, mesh=mesh), devices, shape)


def test_the_program_decodes_greedily_with_sharded_caches(ring_run):
    program = make_program(ring_run.config.model, jax.devices())
    ids = np.random.default_rng(0).integers(3, 250, (4, 5)).astype(np.int32)
    params = jax.device_put(ring_run.params, jax.tree.map(lambda leaf: leaf.sharding, program.abstract_params))
    prompt = program.abstract_prompt._replace(ids=ids, lengths=np.full(4, 5, np.int32))
    with jax.set_mesh(program.mesh):
        state, logits_BV = program.prefill(params, prompt)
        tokens = [jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)]
        for _ in range(3):
            state, token_B = program.step(params, state, tokens[-1])
            tokens.append(token_B)
    assert np.stack(tokens, axis=1).tolist() == generate(ring_run, ids.tolist(), 4)
    for leaf, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)
        if leaf.ndim == 4:
            assert leaf.sharding.shard_shape(leaf.shape) == (1, 1, *leaf.shape[2:]), "rows and KV heads"


def test_building_a_program_traces_no_attention_that_it_does_not_run(ring_run):
    program = make_program(ring_run.config.model, jax.devices())
    with record_choices() as choices:
        program.trace_step().lower()
    assert set(choices) == {"causal, window 4, 1 queries, 4 keys", "causal, 1 queries, 16 keys"}
    with record_choices() as choices:
        program.trace_prefill().lower()
    assert set(choices) == {"causal, window 4, 5 queries, 5 keys", "causal, 5 queries, 5 keys"}


def test_accelerators_prefill_more_tokens_at_a_time(ring_run):
    model = ring_run.model
    assert prefill_length(model, 4, 10_000) == 512
    model = model.clone(runtime=replace(model.runtime, platform="tpu"))
    assert [prefill_length(model, rows, 10_000) for rows in (1, 32, 1024)] == [10_000, 4096, 512]


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (gpt2(**SIZES), {"batch_size": 6}, "6 rows does not divide evenly into 4 shards"),
        (gpt2(**SIZES), {"prompt_length": 16}, "16 tokens of prompt and output leave no room after a prompt of 16"),
        (gpt2(**SIZES, context_length=8), {}, "more than the 8 that the model has positions for"),
        (gpt2(**SIZES, num_kv_heads=1), {}, "kv_heads"),
        (bert(**SIZES), {}, "model: encoder-only"),
    ],
)
def test_shapes_that_do_not_fit_are_named(model, shape, message):
    with pytest.raises(UserError, match=message):
        make_program(model, jax.devices(), **shape)
