"""Span corruption, UL2 and text infilling: the published procedures, and properties of random corruption."""

import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.config import NUM_SENTINELS, Denoiser, Span
from jaxformer.data import Bytes, build_set
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective
from jaxformer.objectives.infill import mask_spans, span_lengths
from jaxformer.objectives.span import corrupted_lengths, random_spans, replace_spans, span_counts

SENTINELS = np.arange(1000, 1000 + NUM_SENTINELS, dtype=np.int32)


def restore(inputs: list[int], targets: list[int]) -> list[int]:
    """The text before span corruption: every sentinel of the inputs replaced by what follows it in the targets."""
    spans, text = {}, []
    for token in targets:
        if token >= SENTINELS[0]:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    for token in inputs:
        text += spans[token] if token >= SENTINELS[0] else [token]
    return text


# ---------------------------------------------------------------- span corruption
def test_the_example_of_the_paper():
    """arXiv:1910.10683, figure 2."""
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
    noise = np.isin(words, ["for", "inviting", "last"])
    inputs, targets = replace_spans(np.arange(len(words)), noise, SENTINELS)
    names = dict(enumerate(words)) | {1000: "<X>", 1001: "<Y>", 1002: "<Z>"}
    assert " ".join(names[id] for id in inputs) == "Thank you <X> me to your party <Y> week ."
    assert " ".join(names[id] for id in targets) == "<X> for inviting <Y> last <Z>"


def test_the_example_of_transformers():
    """The documentation of T5 in transformers, section on unsupervised denoising training."""
    words = ["The", "cute", "dog", "walks", "in", "the", "park"]
    noise = np.array([False, True, True, False, False, True, False])
    inputs, targets = replace_spans(np.arange(len(words)), noise, SENTINELS)
    names = dict(enumerate(words)) | {1000 + i: f"<extra_id_{i}>" for i in range(3)}
    assert " ".join(names[id] for id in inputs) == "The <extra_id_0> walks in <extra_id_1> park"
    assert " ".join(names[id] for id in targets) == "<extra_id_0> cute dog <extra_id_1> the <extra_id_2>"


def test_lengths_are_those_of_t5():
    """T5 pre-trains on 568 tokens, which give 512 inputs and 114 targets including eos (its `random_spans_helper`)."""
    inputs, targets = corrupted_lengths(568, *span_counts(568, 0.15, 3.0))
    assert (inputs + 1, targets + 1) == (512, 114)


def published_counts(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """`random_spans_noise_mask` in T5's preprocessors.py, which computes in float32."""
    num_noise = np.round(np.float32(length) * np.float32(density)).astype(int)
    num_noise = min(max(num_noise, 1), length - 1)
    return num_noise, max(np.round(np.float32(num_noise) / np.float32(mean_length)).astype(int), 1)


def published_noise(length: int, num_noise: int, num_spans: int, random: np.random.RandomState) -> np.ndarray:
    """The rest of `random_spans_noise_mask`: spans begin where an indicator, shuffled and shifted by one, is 1."""

    def segment_lengths(num_items: int) -> np.ndarray:
        begins, indicator = random.permutation(num_items - 1), np.zeros(num_items, int)
        indicator[1 + begins[: num_spans - 1]] = 1
        return np.bincount(np.cumsum(indicator))

    noise, rest = segment_lengths(num_noise), segment_lengths(length - num_noise)
    starts = np.cumsum(np.stack([rest, noise], axis=1).ravel())[:-1]
    return np.cumsum(np.isin(np.arange(length), starts)) % 2 == 1


def published_replacement(ids: np.ndarray, noise: np.ndarray, vocab_size: int) -> np.ndarray:
    """`noise_span_to_unique_sentinel`, which counts sentinels down from the end of the vocabulary."""
    follows = np.concatenate([[False], noise[:-1]])
    return np.where(noise & ~follows, vocab_size - np.cumsum(noise & ~follows), ids)[~(noise & follows)]


def test_the_number_of_spans_is_that_of_t5():
    """Lengths such as 190, where 190 * 0.15 is a half in float64 but not in float32, are rounded as by T5."""
    for density, mean_length in ((0.15, 3.0), (0.15, 8.0), (0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0)):
        for length in range(2, 1200):
            expected = published_counts(length, density, mean_length)
            assert span_counts(length, density, mean_length) == expected, (length, density, mean_length)


@pytest.mark.parametrize("length", [2, 3, 30, 190, 568])
def test_inputs_and_targets_are_those_of_t5(length):
    """With T5's 32,000 pieces and the sentinels that `objective.tokens` adds, ids are those of its models."""
    ids = {token: 32000 + i for i, token in enumerate(Span(input_length=8).tokens)}
    sentinels = np.array([ids[f"<extra_id_{i}>"] for i in range(NUM_SENTINELS)])
    text, counts = np.arange(length), span_counts(length, 0.15, 3.0)
    for seed in range(20):
        noise = random_spans(length, *counts, np.random.RandomState(seed))
        np.testing.assert_array_equal(noise, published_noise(length, *counts, np.random.RandomState(seed)))
        inputs, targets = replace_spans(text, noise, sentinels)
        np.testing.assert_array_equal(inputs, published_replacement(text, noise, 32100))
        np.testing.assert_array_equal(targets, published_replacement(text, ~noise, 32100))


@given(st.integers(1, 300), st.floats(0.01, 0.99), st.floats(1.0, 70.0), st.integers(0, 2**31))
def test_random_spans_keep_every_token(length, density, mean_length, seed):
    counts = span_counts(length, density, mean_length)
    noise = random_spans(length, *counts, np.random.RandomState(seed))
    assert len(noise) == length
    assert noise.sum() == counts[0]
    assert (np.diff(noise.astype(int), prepend=0) == 1).sum() == counts[1]
    if counts[1] > NUM_SENTINELS:
        return
    inputs, targets = replace_spans(np.arange(length, dtype=np.int32), noise, SENTINELS)
    assert (len(inputs), len(targets)) == corrupted_lengths(length, *counts)
    assert restore(inputs.tolist(), targets.tolist()) == list(range(length))


def test_all_span_lengths_occur():
    masks = [random_spans(12, 4, 2, np.random.RandomState(seed)) for seed in range(300)]
    texts = {"".join("x" if noise else "." for noise in mask) for mask in masks}
    lengths = {tuple(len(span) for span in re.findall("x+", text)) for text in texts}
    assert lengths == {(1, 3), (2, 2), (3, 1)}
    assert len(texts) == 3 * 7, "3 ways to split the noise, 7 to split the other 8 tokens"


@pytest.mark.parametrize("kind", ["span", "ul2", "infill"])
def test_every_row_fits_whatever_is_drawn(config_for, objective_for, kind):
    config, objective = config_for(kind), objective_for(kind)
    packed = build_set(config.data, objective, "train")
    rows = packed.rows(range(len(packed)))
    assert rows["segments"].max() > 1, "some rows must hold several texts"
    for seed in range(20):
        batch = objective.batch(rows, lambda row, s=seed: np.random.RandomState(100 * s + row))
        for i in range(len(packed)):
            texts = set(rows["segments"][i]) - {0}
            assert set(batch.tokens.segments[i]) - {0} == texts == set(batch.source.segments[i]) - {0}


def test_the_decoder_reads_the_start_token_and_shifted_targets(config_for, objective_for):
    config, objective = config_for("span"), objective_for("span")
    packed = build_set(config.data, objective, "train")
    batch = objective.batch(packed.rows([0, 1]), lambda row: np.random.RandomState(row))
    begins = batch.tokens.positions == 0
    inside = batch.tokens.segments > 0
    assert (batch.tokens.ids[begins & inside] == Bytes.bos_id).all()
    shifted = np.roll(batch.targets, 1, axis=1)
    np.testing.assert_array_equal(batch.tokens.ids[inside & ~begins], shifted[inside & ~begins])


def test_too_many_spans_are_an_error(config_for):
    config = config_for("span", density=0.5, mean_length=1.0)
    objective = config.data.objective.replace(input_length=400)
    config = config.replace(data=config.data.replace(objective=objective, length=500))
    with pytest.raises(UserError, match=r"spans, but there are 100 sentinels: raise mean_length"):
        make_objective(config, Bytes().with_tokens(objective.tokens))


def test_missing_sentinels_are_an_error_that_names_them(config_for):
    config = config_for("ul2")
    names = r"'<extra_id_0>', '<extra_id_1>', \.\.\., '\[S2S\]' \(103 in total\)"
    with pytest.raises(UserError, match=rf"needs the tokens {names}.*extra_tokens=objective\.tokens"):
        make_objective(config, Bytes())
    make_objective(config, Bytes().with_tokens(config.data.objective.tokens))
    with pytest.raises(UserError, match=r"""'<extra_id_98>', '<extra_id_99>', .*extra_tokens='\["<extra_id_98>", "<"""):
        make_objective(config_for("span"), Bytes().with_tokens(config_for("span").data.objective.tokens[2:]))


# ---------------------------------------------------------------- UL2
def test_ul2_announces_every_task_and_draws_all_of_them(objective_for):
    objective = objective_for("ul2")
    tokenizer, ids = objective.tokenizer, np.arange(3, 23, dtype=np.int32)
    modes = {tokenizer.token_id(mode) for mode in ("[NLU]", "[NLG]", "[S2S]")}
    seen = set()
    for seed in range(60):
        inputs, targets = objective.corrupt(ids, np.random.RandomState(seed))
        seen.add(int(inputs[0]))
        if inputs[0] == tokenizer.token_id("[S2S]"):
            sentinel = tokenizer.token_id("<extra_id_0>")
            assert inputs[1:].tolist() == [*range(3, 18), sentinel, Bytes.eos_id]
            assert targets.tolist() == [sentinel, *range(18, 23), Bytes.eos_id]
    assert seen == modes


def test_ul2_weights_are_relative_frequencies(objective_for):
    tasks = (Denoiser(mode="[NLU]", density=0.2, mean_length=3.0, weight=3.0), Denoiser(mode="[S2S]", density=0.2))
    objective = objective_for("ul2", denoisers=tasks)
    ids = np.arange(3, 23, dtype=np.int32)
    modes = [objective.corrupt(ids, np.random.RandomState(seed))[0][0] for seed in range(400)]
    assert 0.68 < np.mean(np.array(modes) == objective.tokenizer.token_id("[NLU]")) < 0.82


# ---------------------------------------------------------------- text infilling
@given(st.integers(1, 200), st.floats(0.5, 6.0), st.integers(0, 2**31))
def test_span_lengths_add_up(num_masked, mean_length, seed):
    lengths = span_lengths(num_masked, mean_length, np.random.RandomState(seed))
    assert lengths.sum() == num_masked
    assert (lengths >= 0).all()


@given(st.integers(1, 100), st.data())
def test_masked_spans_keep_the_order_of_all_other_tokens(length, data):
    num_masked = data.draw(st.integers(1, length))
    random = np.random.RandomState(data.draw(st.integers(0, 2**31)))
    lengths = span_lengths(num_masked, 3.0, random)
    out = mask_spans(np.arange(length), lengths, 999, random)
    kept = out[out != 999]
    assert len(out) <= length
    assert len(kept) == length - num_masked
    assert (np.diff(kept) > 0).all()
    assert (out == 999).sum() >= (lengths > 0).sum()


def test_sentences_are_permuted_and_restored_by_the_targets(objective_for):
    objective = objective_for("infill", rate=0.01)
    text = "One. Two! Three? Four."
    ids = np.array(Bytes().encode(text), np.int32)
    outputs = [objective.corrupt(ids, np.random.RandomState(seed)) for seed in range(20)]
    assert all(targets.tolist() == [*ids, Bytes.eos_id] for _, targets in outputs)
    begins = {objective.tokenizer.decode([id for id in inputs if id < 259])[:3] for inputs, _ in outputs}
    assert len(begins) > 2


def test_ul2_tasks_have_a_mode_token():
    with pytest.raises(ValueError, match="mode"):
        Denoiser(mode="", density=0.5)
