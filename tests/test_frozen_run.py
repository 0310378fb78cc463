"""Runs are immutable, and the weights that decoding derives from parameters are not used with other parameters."""

from dataclasses import FrozenInstanceError, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer import Run
from jaxformer.config import RunConfig
from jaxformer.layers import Runtime, Transformer, init_params
from jaxformer.models.llama import llama
from jaxformer.ops.cpu import OutputMajor
from jaxformer.run import quantized_run

MODEL = llama(num_layers=2, embed_dim=32, num_heads=4, vocab_size=50, mlp_dim=48, tied=True)
PROMPTS = [[5, 9, 20, 7], [7, 3]]


def run_of(seed: int, platform: str = "cpu") -> Run:
    params = jax.tree.map(lambda a: 5.0 * a, init_params(MODEL, jax.random.key(seed)))
    return Run(RunConfig(model=MODEL), Transformer(MODEL, Runtime(platform=platform)), params, None, 0)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batch", "one row"])
def test_decoding_uses_the_parameters_of_a_replaced_run(prompts):
    first, second = run_of(0), run_of(1)
    before, expected = (jf.generate(run, prompts, max_new_tokens=8) for run in (first, second))
    assert before != expected
    with pytest.raises(FrozenInstanceError):
        first.params = second.params
    assert jf.generate(replace(first, params=second.params), prompts, max_new_tokens=8) == expected
    assert jf.generate(first, prompts, max_new_tokens=8) == before


def test_only_the_layout_used_last_is_kept():
    run = run_of(0)
    model, params = run.decoding
    assert run.decoding[1] is params
    alone = run.decoding_alone[1]
    assert isinstance(alone["decoder"]["blocks_0"][0]["mlp"]["up"]["kernel"], OutputMajor)
    assert run.decoding_alone[1] is alone
    assert run.decoding[1] is not params
    assert not model.config.head.tied, "on a CPU, a copy of the embedding table is faster"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_cpu_layouts_are_only_used_if_the_platform_is_cpu(platform):
    """The platform is that of the runtime, not that of the attached devices."""
    run = run_of(0, platform)
    assert run.decoding_alone[1] is run.decoding[1]
    model, params = run.decoding
    assert model.config.head.tied
    assert isinstance(params["decoder"]["blocks_0"][0]["mlp"]["up"]["kernel"], jax.Array)


def test_quantized_weights_keep_their_layout():
    run = quantized_run(run_of(0), "int8")
    assert run.decoding_alone[1] is run.decoding[1]
    ids = jnp.asarray(PROMPTS[:1])
    np.testing.assert_allclose(jf.forward(run, ids), jf.forward(run_of(0), ids), atol=0.5)
