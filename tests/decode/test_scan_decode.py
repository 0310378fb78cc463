"""Decoding that scans over layers, as on accelerators: the results of running layer by layer, with stacked caches."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Run, generate, search, stream
from jaxformer.config import ModelConfig
from jaxformer.decode.cache import FullCache, RingCache, make_caches
from jaxformer.decode.loop import Prompt, prefill, prefill_chunk, token_step
from jaxformer.layers import Runtime, Transformer, abstract_params
from jaxformer.models.llama import llama
from jaxformer.models.vaswani import vaswani
from jaxformer.ops.weights import is_quantized
from jaxformer.run import make_runtime, quantized_run
from jaxformer.typing import tokens_from_ids

CAPACITY = 24
IDS = np.random.default_rng(0).integers(3, 250, (4, 9)).astype(np.int32)
LENGTHS = np.array([9, 3, 6, 1], np.int32)
LATER = np.random.default_rng(1).integers(3, 250, (6, 4)).astype(np.int32)
PROMPTS = [[*IDS[i], *IDS[i]][:n] for i, n in enumerate((7, 3, 9, 5))] + [[8, 9]]

step = jax.jit(token_step, static_argnums=0)


def local_and_global(model: ModelConfig) -> ModelConfig:
    """A layer before the pattern, two repeats of a local and a global layer, and an incomplete last repeat."""
    stack = model.decoder
    first = (stack.pattern[1],)
    return model.model_copy(update={"decoder": stack.model_copy(update={"num_layers": 6, "first": first})})


@pytest.fixture(scope="module")
def pair_of(make_run, ring_run):
    """The same run twice: layer by layer, and with a scan."""

    @cache
    def make(kind: str, storage: str = "dtype", weights: str | None = None) -> tuple[Run, Run]:
        if kind == "decoder":
            run = make_run(local_and_global(ring_run.config.model))
        else:
            run = make_run(vaswani(num_layers=3, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=264))
        if weights is not None:
            run = quantized_run(run, weights)
        return tuple(_with_runtime(run, cache=storage, scan_decode=scans) for scans in (False, True))

    return make


def _with_runtime(run: Run, **changes) -> Run:
    return replace(run, model=run.model.clone(runtime=replace(run.model.runtime, **changes)))


KINDS = ["decoder", "encoder-decoder"]
STORAGE = [(kind, storage) for kind in KINDS for storage in ("dtype", "int8")]


def test_layers_of_complete_repeats_share_a_stacked_cache(pair_of):
    unrolled, scanned = (run.model for run in pair_of("decoder"))
    caches = jax.eval_shape(lambda: make_caches(scanned.config, 3, CAPACITY, scanned.runtime))
    assert [type(cache.attention) for cache in caches] == [FullCache, RingCache, FullCache, RingCache]
    shapes = [cache.attention.k.shape for cache in caches]
    assert shapes == [(3, 2, 24, 8), (2, 3, 2, 4, 8), (2, 3, 2, 24, 8), (3, 2, 4, 8)]
    assert len(make_caches(unrolled.config, 3, CAPACITY, unrolled.runtime)) == 6


def test_accelerators_scan_unless_the_config_unrolls_all_layers(ring_run):
    config = ring_run.config.train
    assert [make_runtime(config, platform).scan_decode for platform in ("cpu", "tpu", "gpu")] == [False, True, True]
    assert not make_runtime(config.model_copy(update={"unroll": "all"}), "tpu").scan_decode
    assert not Runtime().scan_decode


@pytest.mark.parametrize(("kind", "storage"), STORAGE)
def test_logits_are_those_of_running_layer_by_layer(pair_of, kind, storage):
    """A prefill in two chunks, then token by token; rows wrap around the ring."""
    source = tokens_from_ids(jnp.asarray(IDS[:, :5])) if kind == "encoder-decoder" else None
    results = []
    for run in pair_of(kind, storage):
        model, params = run.decoding
        prompt = Prompt(IDS[:, :5], np.minimum(LENGTHS, 5), source)
        state, logits_BV = prefill(model, params, prompt, capacity=CAPACITY)
        logits = [logits_BV]
        state, logits_BV = prefill_chunk(model, params, state, logits_BV, IDS[:, 5:], np.maximum(LENGTHS - 5, 0))
        for token_B in LATER:
            logits.append(logits_BV)
            state, logits_BV = step(model, params, state, token_B)
        results.append(np.stack([*logits, logits_BV]))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-5 * np.abs(results[0]).max())
    assert np.array_equal(state.lengths_B, LENGTHS + len(LATER))


@pytest.mark.parametrize(("kind", "storage"), STORAGE)
def test_slots_generate_the_same_tokens(pair_of, kind, storage):
    """Five prompts in two slots, so that rows are inserted into a running batch; sources have different lengths."""
    unrolled, scanned = (generate(run, PROMPTS, 8, batch_size=2) for run in pair_of(kind, storage))
    assert scanned == unrolled
    assert len({*map(tuple, scanned)}) > 1, "the outputs must differ for this test to be meaningful"


def test_samples_and_streams_are_the_same(pair_of):
    settings = {"temperature": 1.2, "top_k": 20, "seed": 3}
    unrolled, scanned = (generate(run, PROMPTS[:2], 6, num_samples=2, **settings) for run in pair_of("decoder"))
    assert scanned == unrolled
    unrolled, scanned = ("".join(stream(run, PROMPTS[0], max_new_tokens=6)) for run in pair_of("decoder"))
    assert scanned == unrolled


@pytest.mark.parametrize("kind", KINDS)
def test_beams_find_the_same_hypotheses(pair_of, kind):
    unrolled, scanned = (search(run, PROMPTS[:2], 5, num_beams=3) for run in pair_of(kind))
    for expected, actual in zip(unrolled, scanned, strict=True):
        assert [each.output for each in actual] == [each.output for each in expected]
        np.testing.assert_allclose([each.score for each in actual], [each.score for each in expected], atol=1e-5)


def test_programs_do_not_grow_with_depth():
    """Prefill and the step have as many instructions with 80 layers as with 8."""
    few, many = (_num_instructions(num_layers) for num_layers in (8, 80))
    assert all(m <= 1.5 * f for f, m in zip(few, many, strict=True)), f"prefill and step: {few} and {many}"
    unrolled = _num_instructions(8, scan_decode=False)
    assert all(u > 2 * f for f, u in zip(few, unrolled, strict=True)), "layer by layer, programs do grow"


def _num_instructions(num_layers: int, scan_decode: bool = True) -> list[int]:
    sizes = {"embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 16, "vocab_size": 32}
    config = llama(num_layers=num_layers, **sizes)
    model, params = Transformer(config, Runtime(scan_decode=scan_decode)), abstract_params(config)[0]
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    prompt = Prompt(jax.ShapeDtypeStruct((2, 4), jnp.int32), lengths)
    state, _ = jax.eval_shape(lambda p, prompt: prefill(model, p, prompt, capacity=8), params, prompt)
    programs = (prefill.lower(model, params, prompt, capacity=8), step.lower(model, params, state, lengths))
    return [program.compile().as_text().count(" = ") for program in programs]


@pytest.mark.slow
def test_int8_weights_generate_the_same_tokens(pair_of):
    pair = pair_of("decoder", "int8", "int8")
    assert all(is_quantized(run.decoding[1]) for run in pair)
    unrolled, scanned = (generate(run, PROMPTS, 8, batch_size=2) for run in pair)
    assert scanned == unrolled
