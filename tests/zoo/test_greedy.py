"""Greedy outputs and scores of a batch equal those that transformers computes row by row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import jaxformer as jf
from jaxformer.convert import SAMPLES
from jaxformer.convert.sample import VOCAB

NEW_TOKENS = 20
PROMPT_LENGTHS = (3, 13, 8, 1)
DECODERS = ("LMHeadModel", "CausalLM", "Generation", "MTModel")
GENERATING = [name for name, sample in SAMPLES.items() if sample.architecture.endswith(DECODERS)]
# One per model shape. test_cached.py compares the logits of every family; the decode loop is the same for all.
ALWAYS = {"llama", "bart"}


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB - 1, length).tolist() for length in PROMPT_LENGTHS]


def continuation(pair, row: list[int], **options) -> list[int]:
    """The new tokens that transformers generates, without eos."""
    with torch.no_grad():
        # Without a KV cache, as the reference should be; in transformers it also fails for a T5 whose decoder is deeper
        # than its encoder.
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "use_cache": False} | options
        ids = torch.tensor([row])
        [tokens] = pair.theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings).tolist()
    start = 1 if pair.config.shape == "encoder-decoder" else len(row)
    ends = options.get("eos_token_id", pair.theirs.generation_config.eos_token_id)
    return tokens[start : tokens.index(ends, start) if ends in tokens[start:] else None]


def log_probs(logits: torch.Tensor, targets: list[int]) -> np.ndarray:
    return logits[0].log_softmax(-1)[torch.arange(len(targets)), torch.tensor(targets)].numpy()


@pytest.mark.parametrize("name", SAMPLES)
def test_generating_samples_are_those_with_a_decoder_and_a_head(name, pair_of):
    config = pair_of(name).config
    assert (name in GENERATING) == (config.decoder is not None and config.head is not None)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in GENERATING]
)
def test_greedy_outputs_equal_transformers(name, pair_of):
    pair = pair_of(name)
    assert jf.generate(pair.run, prompts(), max_new_tokens=NEW_TOKENS) == [continuation(pair, r) for r in prompts()]


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_generation_stops_at_eos_as_in_transformers(name, pair_of):
    """eos is set to a token that one row generates anyway."""
    pair = pair_of(name)
    free = [continuation(pair, row) for row in prompts()]
    end = next(token for token in free[0] if token not in free[0][:3])
    expected = [continuation(pair, row, eos_token_id=end) for row in prompts()]
    assert len(expected[0]) < len(free[0])
    special = pair.config.special.model_copy(update={"eos": (end,)})
    model = pair.config.model_copy(update={"special": special})
    run = replace(pair.run, config=pair.run.config.model_copy(update={"model": model}))
    assert jf.generate(run, prompts(), max_new_tokens=NEW_TOKENS) == expected


def test_scores_of_a_decoder_only_model(pair_of):
    pair = pair_of("llama")
    start = pair.theirs.config.bos_token_id
    for row, scores in zip(prompts(), jf.score(pair.run, prompts(), add_bos=True), strict=True):
        with torch.no_grad():
            logits = pair.theirs(torch.tensor([[start, *row[:-1]]])).logits
        np.testing.assert_allclose(scores, log_probs(logits, row), atol=1e-4)


def test_scores_of_an_encoder_decoder(pair_of):
    pair = pair_of("marian")
    sources, targets = prompts(seed=1), prompts()
    start = pair.theirs.config.decoder_start_token_id
    for source, target, scores in zip(sources, targets, jf.score(pair.run, targets, sources), strict=True):
        with torch.no_grad():
            previous = torch.tensor([[start, *target[:-1]]])
            logits = pair.theirs(torch.tensor([source]), decoder_input_ids=previous).logits
        np.testing.assert_allclose(scores, log_probs(logits, target), atol=1e-4)
