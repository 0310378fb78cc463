"""Filters against `generate` of transformers: beam search with scores, and greedy decoding."""

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.convert import SAMPLES

NUM_BEAMS, NEW = 4, 8
# Pairs of our settings and the settings of transformers.
BOTH_SHAPES = [
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
    (
        {"min_new_tokens": 6, "bias": {1: 9.0, 2: 9.0}},  # the eos of both models, which is rare without a bias
        {"min_new_tokens": 6, "sequence_bias": [[[1], 9.0], [[2], 9.0]]},
    ),
    ({"forced_last": 2}, {"forced_eos_token_id": 2}),
    (
        {"repetition_penalty": 1.3, "no_repeat_ngram": 1, "banned": range(10, 60)},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 1, "bad_words_ids": [[i] for i in range(10, 60)]},
    ),
]
ENCODER_DECODER = [
    ({"forced_first": 17}, {"forced_bos_token_id": 17}),
    (
        {"forced_first": 17, "forced_last": 1, "no_repeat_ngram": 2},
        {"forced_bos_token_id": 17, "forced_eos_token_id": 1, "no_repeat_ngram_size": 2},
    ),
]
CASES = [("gpt2", *pair) for pair in BOTH_SHAPES] + [("t5", *pair) for pair in BOTH_SHAPES + ENCODER_DECODER]


def _cases(quick: str) -> list:
    """All cases; only those of the model `quick` and those with forced_first are in the default run."""
    return [
        pytest.param(
            name,
            ours,
            expected,
            id=f"{name}-{'-'.join(ours)}",
            marks=() if name == quick or "forced_first" in ours else pytest.mark.slow,
        )
        for name, ours, expected in CASES
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Random models of transformers, and the runs with the same weights."""
    directories = {name: tmp_path_factory.mktemp(name) for name in ("gpt2", "t5")}
    return {name: (SAMPLES[name].save(path), jf.load(path)) for name, path in directories.items()}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(3, 90, length).tolist() for length in (1, 4, 7, 11) * 5]


def transformers_outputs(model, prompts: list[list[int]], num_beams: int, **settings) -> dict[tuple[int, ...], tuple]:
    """Outputs of transformers by prompt, new tokens only and without eos; with beams also their scores."""
    outputs = {}
    for length in {len(prompt) for prompt in prompts}:  # the penalties of transformers would count padding as tokens
        same = [prompt for prompt in prompts if len(prompt) == length]
        rows, scores = _transformers_generate(model, same, num_beams, **settings)
        for i, prompt in enumerate(same):
            beams = slice(i * num_beams, (i + 1) * num_beams)
            outputs[tuple(prompt)] = rows[beams], None if scores is None else scores[beams]
    return outputs


def _transformers_generate(model, prompts: list[list[int]], num_beams: int, **settings):
    import torch

    ids = torch.tensor(prompts)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        pad_token_id=0,
        use_cache=model.config.model_type != "t5",  # transformers makes as many caches as T5 has encoder layers
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    eos = model.generation_config.eos_token_id
    rows = [row[start:] for row in result.sequences.tolist()]
    return [row[: row.index(eos)] if eos in row else row for row in rows], result.get("sequences_scores")


@pytest.fixture(scope="module")
def plain(pairs, prompts) -> dict[str, list[list[int]]]:
    """Greedy outputs without a filter."""
    return {name: jf.generate(run, prompts, NEW, batch_size=8) for name, (_, run) in pairs.items()}


@pytest.mark.parametrize(("name", "ours", "expected"), _cases(quick="gpt2"))
def test_greedy(pairs, prompts, plain, name, ours, expected):
    model, run = pairs[name]
    outputs = jf.generate(run, prompts, NEW, batch_size=8, **ours)
    reference = transformers_outputs(model, prompts, 1, **expected)
    assert outputs == [reference[tuple(prompt)][0][0] for prompt in prompts]
    assert outputs != plain[name]


@pytest.mark.parametrize(("name", "ours", "expected"), _cases(quick="t5"))
def test_beams(pairs, prompts, name, ours, expected):
    model, run = pairs[name]
    results = jf.search(run, prompts, NEW, num_beams=NUM_BEAMS, batch_size=NUM_BEAMS * len(prompts), **ours)
    reference = transformers_outputs(model, prompts, NUM_BEAMS, **expected)
    for prompt, hypotheses in zip(prompts, results, strict=True):
        rows, scores = reference[tuple(prompt)]
        assert [hypothesis.output for hypothesis in hypotheses] == rows
        np.testing.assert_allclose([hypothesis.score for hypothesis in hypotheses], scores, atol=1e-4)


@pytest.mark.slow
def test_requests_with_different_filters_share_a_batch_of_beams(pairs, prompts):
    _, run = pairs["t5"]
    requests = [jf.Request(ids, **BOTH_SHAPES[i % len(BOTH_SHAPES)][0]) for i, ids in enumerate(prompts[:8])]
    together = jf.search(run, requests, NEW, num_beams=NUM_BEAMS)
    for request, hypotheses in zip(requests[:2], together, strict=False):
        alone = jf.search(run, [request], NEW, num_beams=NUM_BEAMS)[0]
        assert [hypothesis.output for hypothesis in alone] == [hypothesis.output for hypothesis in hypotheses]
        np.testing.assert_allclose([h.score for h in alone], [h.score for h in hypotheses], atol=1e-5)
