"""Decoding with caches equals the full forward pass for every family, of jaxformer and of transformers.

Rows of different lengths are prefilled together and continue token by token, until every window has wrapped around
twice. The full forward pass reads the same tokens right-padded, left-padded, and packed.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.config import ModelConfig, NormalInit, RunConfig
from jaxformer.convert import SAMPLES
from jaxformer.convert.sample import VOCAB
from jaxformer.decode.cache import RingCache, make_caches
from jaxformer.decode.loop import ModelState, Prompt, prefill, token_step
from jaxformer.layers import Runtime, Transformer, init_params
from jaxformer.models import FAMILIES
from jaxformer.models.rnn import rnn
from jaxformer.models.vaswani import vaswani
from jaxformer.run import Run
from jaxformer.typing import Tokens

OWN = {
    "vaswani": lambda: vaswani(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=VOCAB),
    "lstm": lambda: rnn(cell="lstm", num_layers=2, embed_dim=24, dim=32, vocab_size=VOCAB),
    "elman": lambda: rnn(cell="elman", num_layers=2, embed_dim=24, dim=32, vocab_size=VOCAB),
}
DECODERS = ("LMHeadModel", "CausalLM", "Generation", "MTModel")
DECODING = [name for name, sample in SAMPLES.items() if sample.architecture.endswith(DECODERS)]
# These decode with the same code as another sample, which is not slow.
SLOW = {"gemma", "gemma3", "qwen2.5", "qwen3", "qwen3-moe", "t5v1.1", "mt5", "marian", "smollm2", "mistral", "elman"}
# Models with the same blocks as another one: their layouts are not compared again.
SIBLINGS = {"smollm2", "qwen3", "mt5", "marian"}
WINDOWED = {"mistral", "gemma2", "gemma3"}
PROMPT_LENGTHS, NEW_TOKENS = (3, 13, 8, 1), 20
CAPACITY = 16 + NEW_TOKENS
PACKED = ((0, 2, 3), (1,))  # which documents share a row
WIDTH = 72  # of rows in the full forward pass: fits three documents, and is more than one block of attention


class Case(NamedTuple):
    """Documents whose first tokens are the prompt, and the source of each document for an encoder-decoder."""

    documents: list[list[int]]
    prompt_lengths: list[int]
    sources: list[list[int]] | None


def case_of(run: Run) -> Case:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB - 1, length).tolist() for length in PROMPT_LENGTHS]
    new = rng.integers(3, VOCAB - 1, (len(prompts), NEW_TOKENS)).tolist()
    if run.config.model.shape == "encoder-decoder":
        return Case([[5, *tokens] for tokens in new], [1] * len(prompts), prompts)
    return Case([a + b for a, b in zip(prompts, new, strict=True)], list(PROMPT_LENGTHS), None)


@pytest.fixture(scope="module")
def run_of(pair_of):
    def get(name: str) -> Run:
        return pair_of(name).run if name in SAMPLES else _untrained(OWN[name]())

    return get


def _untrained(model: ModelConfig) -> Run:
    init = model.init.model_copy(update={"kernel": NormalInit(stddev=0.3), "embedding": NormalInit(stddev=0.5)})
    model = model.model_copy(update={"init": init})
    return Run(RunConfig(model=model), Transformer(model), init_params(model, jax.random.key(7)), None, 0)


def test_every_family_that_decodes_is_compared():
    compared = {SAMPLES[name].preset for name in DECODING}
    decoders = {family for family, module in FAMILIES.items() if _first_preset(module).decoder is not None}
    families = {family for family in decoders for row in FAMILIES[family].ZOO_ROWS if compared & set(row.presets)}
    assert decoders - families == {"vaswani", "rnn"}  # not in transformers; they are in OWN


def _first_preset(module) -> ModelConfig:
    return next(iter(module.ZOO_ROWS[0].presets.values())).build()


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_window_caches_are_rings_that_wrap_around_twice(name, run_of):
    model = run_of(name).config.model
    sizes = {layer.attention.size for layer in _caches(model) if isinstance(layer.attention, RingCache)}
    assert sizes == {8}
    assert all(min(PROMPT_LENGTHS) + NEW_TOKENS > 2 * size for size in sizes)


def _caches(model: ModelConfig) -> tuple:
    return jax.eval_shape(lambda: make_caches(model, 4, CAPACITY, Runtime()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in (*DECODING, *OWN)]
)
def test_cached_logits_equal_the_full_forward_in_every_layout(name, run_of, pair_of):
    run = run_of(name)
    case = case_of(run)
    cached = _decode(run, case)
    if name not in SIBLINGS:
        for layout, full in _full(run, case).items():
            _check_equal(cached, full, case, 1e-5, layout)
    if name in SAMPLES:
        _check_equal(cached, _transformers_logits(pair_of(name).theirs, case), case, 1e-4, "transformers")


def _check_equal(cached: list[np.ndarray], full: list[np.ndarray], case: Case, atol: float, layout: str) -> None:
    for i, (rows_TV, all_TV) in enumerate(zip(cached, full, strict=True)):
        expected_TV = all_TV[case.prompt_lengths[i] - 1 :]
        np.testing.assert_allclose(rows_TV, expected_TV, rtol=0, atol=atol, err_msg=f"{layout}, document {i}")


def _transformers_logits(model, case: Case) -> list[np.ndarray]:
    """The logits of transformers, computed for one document at a time."""
    with torch.no_grad():
        if case.sources is None:
            return [model(torch.tensor([row])).logits[0].numpy() for row in case.documents]
        pairs = zip(case.documents, case.sources, strict=True)
        return [model(torch.tensor([s]), decoder_input_ids=torch.tensor([row])).logits[0].numpy() for row, s in pairs]


# ---------------------------------------------------------------- token by token
def _decode(run: Run, case: Case) -> list[np.ndarray]:
    """For each document, the logits after its prompt and after every later token."""
    prompts = [row[:n] for row, n in zip(case.documents, case.prompt_lengths, strict=True)]
    later = [row[n:] for row, n in zip(case.documents, case.prompt_lengths, strict=True)]
    source = case.sources and _lay_out(case.sources, [[i] for i in range(4)], 16)
    tokens = _lay_out(prompts, [[i] for i in range(4)], 16)
    model, params = run.decoding
    prompt = Prompt(tokens.ids, np.array(case.prompt_lengths, np.int32), source)
    rows, first_BV = prefill(model, params, prompt, capacity=CAPACITY)
    later_TBV = _steps(model, params, rows, np.array(later, np.int32).T)
    return [np.stack([first_BV[i], *later_TBV[:, i]]) for i in range(4)]


@partial(jax.jit, static_argnames="model")
def _steps(model: Transformer, params, rows: ModelState, tokens_TB: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda rows, token_B: token_step(model, params, rows, token_B), rows, tokens_TB)[1]


# ---------------------------------------------------------------- full forward pass
def _full(run: Run, case: Case) -> dict[str, list[np.ndarray]]:
    """For each layout and document, the logits of all tokens; one batch has the rows of all layouts."""
    alone = [[i] for i in range(4)]
    layouts = {"right-padded": (alone, False), "left-padded": (alone, True), "packed": (PACKED, False)}
    tokens = _join([_lay_out(case.documents, groups, WIDTH, left) for groups, left in layouts.values()])
    source = case.sources and _join([_lay_out(case.sources, g, 16, left) for g, left in layouts.values()])
    logits_BTV = np.asarray(_forward(run.model, run.params, tokens, source))
    logits, first = {}, 0
    for layout, (groups, left) in layouts.items():
        spans = _spans(case.documents, groups, WIDTH, left)
        logits[layout] = [logits_BTV[first + row, start:stop] for row, start, stop in spans]
        first += len(groups)
    return logits


@partial(jax.jit, static_argnames="model")
def _forward(model: Transformer, params, tokens: Tokens, source: Tokens | None) -> jax.Array:
    return model.apply({"params": params}, tokens, source)


def _spans(documents: list[list[int]], groups, width: int, left: bool = False) -> list[tuple[int, int, int]]:
    """Row, start and stop of every document."""
    spans = {}
    for row, group in enumerate(groups):
        start = width - sum(len(documents[i]) for i in group) if left else 0
        for i in group:
            spans[i] = (row, start, start + len(documents[i]))
            start = spans[i][2]
    return [spans[i] for i in range(len(documents))]


def _lay_out(documents: list[list[int]], groups, width: int, left: bool = False) -> Tokens:
    ids, positions, segments = np.zeros((3, len(groups), width), np.int32)
    count = np.zeros(len(groups), np.int32)
    for document, (row, start, stop) in zip(documents, _spans(documents, groups, width, left), strict=True):
        count[row] += 1
        ids[row, start:stop], positions[row, start:stop] = document, np.arange(len(document))
        segments[row, start:stop] = count[row]
    return Tokens(ids, positions, segments)


def _join(parts: list[Tokens]) -> Tokens:
    return Tokens(*(jnp.concatenate(fields) for fields in zip(*(part[:3] for part in parts), strict=True)))
