"""Decoding on a mesh of eight devices: the same tokens and scores as on one, with caches that are really sharded."""

from dataclasses import replace
from itertools import chain

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxformer import Request, Run, complete, embed, generate, score, search, stream
from jaxformer.config import MeshConfig
from jaxformer.decode.cache import RingCache
from jaxformer.decode.sampling import SamplingConfig
from jaxformer.decode.slots import DecodeRequest, Slots, make_shape
from jaxformer.layers import abstract_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani
from jaxformer.ops.weights import quantize_params
from jaxformer.sharding import make_mesh, param_shardings, path_name

MESHES = {
    "data=2 tensor=4": MeshConfig(data=2, tensor=4),
    "data=8": MeshConfig(data=8),
    "data=2 fsdp=2 tensor=2": MeshConfig(data=2, fsdp=2, tensor=2),
}
# One layer, and prompts of one padded length, because compiling for eight devices is slow.
SIZES = {"num_layers": 1, "embed_dim": 32, "num_heads": 4, "vocab_size": 264}
MODELS = {"decoder": lambda: gpt2(**SIZES, context_length=64), "encoder-decoder": lambda: vaswani(**SIZES, mlp_dim=64)}
PROMPTS = ["a", "def parse", "longer text", "b\nc", "five"]
NEW_TOKENS = 8
SETTINGS = [
    {"max_new_tokens": 3},
    {"temperature": 1.1, "seed": 5, "num_samples": 2},
    {"repetition_penalty": 1.5, "min_new_tokens": 4},
    {"temperature": 0.8, "top_k": 9},
    {"banned": [70, 71]},
]


@pytest.fixture(scope="module", params=["encoder-decoder", pytest.param("decoder", marks=pytest.mark.slow)])
def small_run(request, make_run) -> Run:
    return make_run(MODELS[request.param]())


def shard_run(mesh: Mesh | None, run: Run, weights: str | None = None, cache: str = "dtype") -> Run:
    """The same run with its parameters sharded over the mesh; without a mesh, on one device."""
    params, model = run.params, run.model.clone(runtime=replace(run.model.runtime, cache=cache))
    if mesh is not None:
        shapes, axes = abstract_params(model.config)
        params = jax.device_put(params, param_shardings(axes, shapes, mesh))
    if weights is not None:
        params = quantize_params(params, abstract_params(model.config)[1], mesh)
    return Run(run.config, model, params, run.tokenizer, 0, mesh)


@pytest.mark.parametrize(
    "sizes", [pytest.param(sizes, marks=() if "fsdp" in sizes else pytest.mark.slow) for sizes in MESHES]
)
def test_a_mesh_gives_the_results_of_one_device(small_run, sizes):
    both = shard_run(None, small_run), shard_run(make_mesh(MESHES[sizes], jax.devices()), small_run)
    _check_greedy(*both)
    _check_mixed(*both, atol=1e-5)
    _check_search(*both, atol=1e-5)
    _check_scores(*both, atol=1e-5)


@pytest.mark.slow
def test_int8_on_a_mesh_gives_the_results_of_one_device(small_run):
    """The tolerance is larger: another order of summation may round a value to the next int8 step."""
    storage = {"weights": "int8", "cache": "int8"}
    mesh = make_mesh(MESHES["data=2 fsdp=2 tensor=2"], jax.devices())
    both = shard_run(None, small_run, **storage), shard_run(mesh, small_run, **storage)
    _check_mixed(*both, atol=2e-3)
    _check_scores(*both, atol=2e-3)


def _check_greedy(one: Run, many: Run) -> None:
    """Five prompts in four slots, so that a slot is refilled; and one prompt as a stream."""
    ids = [one.tokenizer.encode(prompt) for prompt in PROMPTS]
    actual, expected = (generate(run, ids, NEW_TOKENS, batch_size=4) for run in (many, one))
    assert actual == expected
    assert len({*map(tuple, actual)}) > 1, "the outputs must differ for this test to be meaningful"
    assert "".join(stream(many, ids[2], max_new_tokens=NEW_TOKENS)) == one.tokenizer.decode(expected[2])


def _check_mixed(one: Run, many: Run, atol: float) -> None:
    """Greedy and sampled requests in one batch, one of them with two samples, all with different settings."""
    requests = [Request(prompt, log_probs=2, **own) for prompt, own in zip(PROMPTS, SETTINGS, strict=True)]
    actual, expected = (
        list(chain(*complete(run, requests, batch_size=4, max_new_tokens=NEW_TOKENS))) for run in (many, one)
    )
    assert [each.ids for each in actual] == [each.ids for each in expected]
    np.testing.assert_allclose(*(np.concatenate([c.log_probs for c in each]) for each in (actual, expected)), atol=atol)


def _check_search(one: Run, many: Run, atol: float) -> None:
    actual, expected = (list(chain(*search(run, PROMPTS[:3], 6, num_beams=3))) for run in (many, one))
    assert [each.output for each in actual] == [each.output for each in expected]
    np.testing.assert_allclose([each.score for each in actual], [each.score for each in expected], atol=atol)


def _check_scores(one: Run, many: Run, atol: float) -> None:
    inputs = PROMPTS[:3] if one.config.model.encoder is not None else None
    np.testing.assert_allclose(*(np.concatenate(score(run, PROMPTS[2:], inputs)) for run in (many, one)), atol=atol)
    if inputs is None:
        np.testing.assert_allclose(*(embed(run, PROMPTS[:3]) for run in (many, one)), atol=atol)


# ---------------------------------------------------------------- shardings
@pytest.mark.parametrize("weights", [None, "int8"])
def test_parameters_stay_sharded_in_the_decoding_layout(small_run, weights):
    """With layers unstacked and the embedding transposed, no device holds more than its shard of a matrix."""
    run = shard_run(make_mesh(MESHES["data=2 fsdp=2 tensor=2"], jax.devices()), small_run, weights)
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.decoding[1]):
        if leaf.size >= 1024:
            ways = 2 if "positions" in path_name(path) else 4  # only the embedding dimension of positions is sharded
            assert np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size // ways, path_name(path)


def _check_sharding(slots: Slots, ways: int, tensor: int) -> None:
    for layer in slots._state.model_state.caches:
        for leaf in jax.tree.leaves(layer):
            rows, heads, *rest = leaf.shape
            assert leaf.sharding.shard_shape(leaf.shape) == (rows // ways, heads // tensor, *rest)


@pytest.mark.parametrize(
    ("kind", "cache"),
    [("ring", "int8"), ("encoder-decoder", "dtype")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("ring", "dtype"), ("encoder-decoder", "int8"), ("decoder", "dtype"), ("decoder", "int8"))
    ],
)
def test_caches_are_sharded_by_rows_and_heads(kind, cache, make_run, ring_run):
    """After the prefill of a whole batch, after it advances, and after a slot is refilled."""
    run = ring_run if kind == "ring" else make_run(MODELS[kind]())
    run = shard_run(make_mesh(MeshConfig(data=4, tensor=2), jax.devices()), run, cache=cache)
    requests = [DecodeRequest([5 + i] * 9, SamplingConfig(max_new_tokens=2 + i)) for i in range(8)]
    slots = Slots(run, make_shape(run, requests, 8))
    slots.add(requests)
    _check_sharding(slots, ways=4, tensor=2)
    slots.advance(max_steps=3, until_done=8)
    _check_sharding(slots, ways=4, tensor=2)
    slots.release(slots.done[0])
    slots.add(requests[:1])
    _check_sharding(slots, ways=4, tensor=2)
    assert any(isinstance(layer.attention, RingCache) for layer in slots._state.model_state.caches) == (kind == "ring")


def test_the_cache_of_a_single_row_is_sharded_by_heads(make_run):
    """The loop carries it without a batch dimension."""
    run = shard_run(make_mesh(MeshConfig(data=1, tensor=4), jax.devices()[:4]), make_run(MODELS["decoder"]()))
    requests = [DecodeRequest([5] * 9, SamplingConfig(max_new_tokens=4))]
    slots = Slots(run, make_shape(run, requests, 1))
    slots.add(requests)
    slots.advance(max_steps=2, until_done=1)
    _check_sharding(slots, ways=1, tensor=4)


def test_caches_of_idle_slots_are_sharded(make_run):
    """The first request is added alone: the idle slots next to it must have the sharding of later requests."""
    run = shard_run(make_mesh(MeshConfig(data=2, tensor=4), jax.devices()), make_run(MODELS["decoder"]()))
    requests = [DecodeRequest([5] * 9, SamplingConfig(max_new_tokens=4))]
    slots = Slots(run, make_shape(run, requests, 8))
    slots.add(requests)
    _check_sharding(slots, ways=2, tensor=4)
    slots.advance(max_steps=9, until_done=8)
    _check_sharding(slots, ways=2, tensor=4)
    assert slots.done == [0]
