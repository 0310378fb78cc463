"""Runs with int8 weights, loaded from a run directory: every function of the API."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer import Run
from jaxformer.checkpoint import Checkpoints
from jaxformer.decode.loop import Prompt, prefill, token_step
from jaxformer.errors import UserError
from jaxformer.ops.weights import Int8Matrix, is_quantized
from jaxformer.rundir import RunDir
from jaxformer.typing import tokens_from_ids

TEXTS = ["a", "def parse(", "b\nc"]
IDS = np.random.default_rng(0).integers(3, 250, (3, 12)).astype(np.int32)


@pytest.fixture(scope="module", params=["encoder-decoder", pytest.param("rope", marks=pytest.mark.slow)])
def pair(request, run_of, tmp_path_factory) -> tuple[Run, Run]:
    """A run, and the same run loaded from its directory with int8 weights."""
    run, directory = run_of(request.param), tmp_path_factory.mktemp("run")
    with Checkpoints(RunDir(directory), run.config) as checkpoints:
        checkpoints.save(5, {"params": run.params}, run.config, {"step": 5})
    run.tokenizer.save(directory)
    RunDir(directory).write_config(run.config)
    return run, jf.load(directory, weights="int8")


def _inputs(run: Run) -> np.ndarray | None:
    return IDS[:, :9] if run.config.model.encoder is not None else None


def test_a_run_directory_loads_with_int8_weights(pair):
    run, quantized = pair
    assert is_quantized(quantized.params)
    assert quantized.step == 5
    before, after = (sum(leaf.nbytes for leaf in jax.tree.leaves(each.params)) for each in pair)
    assert after < 0.35 * before
    kernel = quantized.params["decoder"]["blocks_0"]["attention"]["out"]["kernel"]
    assert isinstance(kernel, Int8Matrix)
    layers, heads, width, embed_dim = run.params["decoder"]["blocks_0"]["attention"]["out"]["kernel"].shape
    assert kernel.values.shape == (layers, embed_dim, heads, width)
    assert kernel.scales.shape == (layers, embed_dim)


def test_logits_and_scores_are_close_to_those_of_float_weights(pair):
    """Logits change by about 2% of their standard deviation on average, with weights larger than trained ones."""
    plain, quantized = (np.asarray(jf.forward(run, IDS, inputs=_inputs(run))) for run in pair)
    assert 0.0 < np.abs(quantized - plain).mean() / plain.std() < 0.05
    inputs = TEXTS if pair[0].config.model.encoder is not None else None
    plain, quantized = (np.concatenate(jf.score(run, TEXTS, inputs)) for run in pair)
    assert 0.0 < np.nanmean(np.abs(quantized - plain)) < 0.1  # the first token of a decoder has no score


def test_cached_int8_logits_equal_the_full_forward(pair):
    """Activations are quantized row by row, so that a row does not depend on the other rows of a matmul."""
    run = pair[1]
    wanted_BTV = np.asarray(jf.forward(run, IDS, inputs=_inputs(run)))
    source = None if _inputs(run) is None else tokens_from_ids(jnp.asarray(_inputs(run)))
    rows, logits_BV = prefill(*run.decoding, Prompt(IDS[:, :7], np.array([5, 2, 7], np.int32), source), capacity=16)
    step = jax.jit(token_step, static_argnums=0)
    for _ in range(5):
        lengths_B = np.asarray(rows.lengths_B)
        # Another order of summation may change an activation by one step, 1 / 32258 of the largest of its row.
        np.testing.assert_allclose(logits_BV, wanted_BTV[np.arange(3), lengths_B - 1], rtol=0, atol=1e-3)
        rows, logits_BV = step(*run.decoding, rows, IDS[np.arange(3), lengths_B])


def test_generate_stream_search_and_embed(pair):
    run = pair[1]
    prompts = IDS[:, :9].tolist()
    together = jf.generate(run, prompts, 8)
    assert together == [jf.generate(run, [row], 8)[0] for row in prompts]
    assert "".join(jf.stream(run, prompts[1], max_new_tokens=8)) == run.tokenizer.decode(together[1])
    for hypotheses in jf.search(run, TEXTS, 6, num_beams=3):
        scores = [each.score for each in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert np.isfinite(scores).all()
    if run.config.model.encoder is None:
        plain, quantized = (jf.embed(each, TEXTS) for each in pair)
        assert (plain * quantized).sum(axis=1).min() > 0.99, "the vectors must have nearly the same direction"


def test_unknown_weight_formats_are_rejected(tmp_path):
    with pytest.raises(UserError, match=r"weights='int4': must be 'int8' or none"):
        jf.load(tmp_path, weights="int4")
