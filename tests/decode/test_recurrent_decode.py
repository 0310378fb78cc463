"""The decode loop with recurrent models: states instead of KV caches, and the results of the full forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import forward, generate, score
from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, NormalInit, RunConfig
from jaxformer.data import Bytes
from jaxformer.decode.cache import make_caches
from jaxformer.decode.loop import Prompt, prefill, token_step
from jaxformer.layers import Runtime, Transformer, init_params
from jaxformer.models.rnn import rnn
from jaxformer.ops.recurrence import RecurrentState
from jaxformer.run import Run

PROMPTS = ["a", "def parse(", "some longer text", "b\nc"]
WIDTH = 32


@pytest.fixture(scope="module", params=[pytest.param("elman", marks=pytest.mark.slow), "lstm"])
def recurrent_run(request) -> Run:
    """An untrained run with weights so large that rounding does not decide which token is most likely."""
    model = rnn(cell=request.param, num_layers=2, embed_dim=24, dim=32, vocab_size=264, dropout=0.1)
    init = model.init.model_copy(update={"kernel": NormalInit(stddev=0.3), "embedding": NormalInit(stddev=0.5)})
    model = model.model_copy(update={"init": init})
    data = DataConfig(train=MemorySource(documents=("x",)), tokenizer=ByteTokenizer(), length=32)
    config = RunConfig(model=model, data=data)
    return Run(config, Transformer(model), init_params(model, jax.random.key(7)), Bytes(), step=0)


def test_recurrent_caches_are_states_without_a_length_dimension(recurrent_run):
    model = recurrent_run.config.model
    caches = make_caches(model, 3, 1000, Runtime(jnp.bfloat16))
    assert len(caches) == 2
    assert all(isinstance(state, RecurrentState) for state in caches)
    leaves = jax.tree.leaves(caches)
    assert len(leaves) == {"elman": 2, "lstm": 4}[model.decoder.cell]
    assert {(a.shape, a.dtype) for a in leaves} == {((3, 32), jnp.dtype("float32"))}


def test_states_give_the_logits_of_the_full_forward(recurrent_run):
    """Three rows of different lengths, fed token by token after a prefill."""
    run, rng = recurrent_run, np.random.default_rng(0)
    ids, lengths = rng.integers(3, 250, (3, 12)).astype(np.int32), np.array([5, 2, 7], np.int32)
    expected = forward(run, ids)
    model, params = run.decoding
    rows, logits_BV = prefill(model, params, Prompt(ids[:, :7], lengths), capacity=12)
    step = jax.jit(token_step, static_argnums=0)
    for _ in range(5):
        for i in range(3):
            np.testing.assert_allclose(logits_BV[i], expected[i, rows.lengths_B[i] - 1], atol=1e-5)
        token_B = jnp.asarray(ids)[jnp.arange(3), rows.lengths_B]
        rows, logits_BV = step(model, params, rows, token_B)


def test_greedy_is_the_argmax_of_the_full_forward(recurrent_run):
    prompts = [[1, *recurrent_run.tokenizer.encode(text)] for text in PROMPTS]
    outputs = generate(recurrent_run, prompts, max_new_tokens=12)
    assert outputs == [_greedy_by_forward(recurrent_run, row, 12) for row in prompts]
    assert len({tuple(row) for row in outputs}) > 1, "the outputs must differ for this test to be meaningful"


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"temperature": 1.2, "top_k": 20, "top_p": 0.9}]
)
def test_a_recurrent_row_does_not_depend_on_its_batch(recurrent_run, settings):
    together = generate(recurrent_run, PROMPTS, max_new_tokens=12, seed=3, **settings)
    assert together == [generate(recurrent_run, [text], max_new_tokens=12, seed=3, **settings)[0] for text in PROMPTS]


def test_scores_are_those_of_the_full_forward(recurrent_run):
    run, ids = recurrent_run, [[65, 66, 67, 68], [70, 71]]
    for row, values in zip(ids, score(run, ids, add_bos=True), strict=True):
        logits = forward(run, np.array([[run.tokenizer.bos_id, *row[:-1]]], np.int32))[0]
        expected = jax.nn.log_softmax(logits, axis=-1)[np.arange(len(row)), row]
        np.testing.assert_allclose(values, expected, atol=1e-5)


def _greedy_by_forward(run: Run, row: list[int], count: int) -> list[int]:
    new: list[int] = []
    for _ in range(count):
        ids, length = np.zeros((1, WIDTH), np.int32), len(row) + len(new)
        ids[0, :length] = row + new
        logits = forward(run, ids, mask=(np.arange(WIDTH) < length)[None])[0, length - 1]
        new.append(int(np.argmax(logits[: run.tokenizer.vocab_size])))
        if new[-1] == run.tokenizer.eos_id:
            return new[:-1]
    return new
