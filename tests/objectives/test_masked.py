"""Masked language modelling: what is masked, how often, and by what."""

import numpy as np
import pytest

from jaxformer.config import Masked, MemorySource
from jaxformer.data import Bytes, build_set
from jaxformer.data.tokenizer import Words
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective

MASK = 259


def corrupt(objective, rows, seed):
    return objective.batch(rows, lambda row: np.random.RandomState(1000 * seed + row))


@pytest.fixture
def case(config_for, objective_for):
    """The objective, and the rows that it stores."""

    def make(**options):
        objective = objective_for("masked", **options)
        packed = build_set(config_for("masked", **options).data, objective, "train")
        return objective, packed.rows(range(len(packed)))

    return make


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("rate", [0.02, 0.15, 0.3, 0.9])
def test_targets_are_the_original_tokens_and_nothing_else_changes(case, rate, whole_words):
    objective, rows = case(rate=rate, whole_words=whole_words)
    for seed in range(5):
        batch = corrupt(objective, rows, seed)
        for i, original in enumerate(rows["tokens"]):
            is_target = batch.weights[i] > 0
            positions = batch.predicted[i][is_target]
            assert (np.diff(positions) > 0).all()
            np.testing.assert_array_equal(batch.targets[i][is_target], original[positions])
            untouched = np.setdiff1d(np.arange(len(original)), positions)
            np.testing.assert_array_equal(batch.tokens.ids[i][untouched], original[untouched])
            assert (original[positions] > Bytes.eos_id).all(), "padding, bos and eos are never masked"
            budget = objective.config.objective.num_predictions(int((original > Bytes.eos_id).sum()))
            assert len(positions) == budget or (whole_words and len(positions) <= budget)


def test_shares_of_masked_random_and_kept_tokens(case):
    objective, rows = case(rate=0.5, mask_share=0.6, random_share=0.3)
    new, old = [], []
    for seed in range(100):
        batch = corrupt(objective, rows, seed)
        replaced = np.take_along_axis(batch.tokens.ids, batch.predicted, axis=1)
        new.append(replaced[batch.weights > 0])
        old.append(batch.targets[batch.weights > 0])
    new, old = np.concatenate(new), np.concatenate(old)
    is_random = (new != MASK) & (new != old)
    assert abs((new == MASK).mean() - 0.6) < 0.01
    assert abs(is_random.mean() - 0.3) < 0.01
    assert (new[is_random] > Bytes.eos_id).all(), "a random token is never a special token"


def test_whole_words_are_masked_together(case):
    objective, rows = case(rate=0.4, whole_words=True, mask_share=1.0, random_share=0.0)
    batch = corrupt(objective, rows, 0)
    seen = 0
    for ids, segments, masked in zip(rows["tokens"], rows["segments"], batch.tokens.ids == MASK, strict=True):
        begins = (ids == Bytes().encode(" ")[0]) | (ids <= Bytes.eos_id) | (np.roll(ids, 1) == Bytes.bos_id)
        for word in np.split(np.arange(len(ids)), np.flatnonzero(begins)):
            inside = word[(segments[word] > 0) & (ids[word] > Bytes.eos_id)]
            assert masked[inside].all() or not masked[inside].any()
            seen += bool(len(inside) > 1 and masked[inside].all())
    assert seen > 5


def test_a_row_of_long_words_has_tokens_to_predict(config_for, objective_for):
    """Without them, the loss would be undefined; a word of 20 tokens exceeds the budget of 3."""
    objective = objective_for("masked", whole_words=True)
    data = config_for("masked", whole_words=True).data.replace(train=MemorySource(documents=("a" * 20,)))
    batch = corrupt(objective, build_set(data, objective, "train").rows([0]), 0)
    assert batch.weights.tolist() == [[1, 1, 1, 0]]
    assert batch.predicted[0, :3].tolist() == [1, 2, 3]


def test_every_token_of_a_vocabulary_of_words_is_a_whole_word():
    tokenizer = Words({"the": 3, "cat": 2}, extra_tokens=("<mask>",))
    assert tokenizer.word_starts.all()
    assert len(tokenizer.word_starts) == tokenizer.vocab_size


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1])
def test_rates_of_0_and_1_are_errors(rate):
    with pytest.raises(ValueError, match="rate"):
        Masked(rate=rate)


def test_shares_above_1_are_an_error():
    with pytest.raises(ValueError, match=r"mask_share=0\.8 \+ random_share=0\.3"):
        Masked(random_share=0.3)


def test_a_tokenizer_without_mask_token_is_an_error_that_says_how_to_add_it(config_for):
    with pytest.raises(UserError, match=r"needs the token '<mask>'.*data\.tokenizer\.extra_tokens"):
        make_objective(config_for("masked"), Bytes())
