"""Every filter against the LogitsProcessor of transformers, or against its definition if transformers has none."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.ops import filters

B, V = 48, 50
RNG = np.random.default_rng(0)
LOGITS = (3 * RNG.normal(size=(B, V))).astype(np.float32)
TIED = np.round(LOGITS).astype(np.float32)
# The filters compute 1 - p in float32, so values of p close to 1 must be exact in float32.
TRUNCATION = {
    "top_k": (jax.jit(filters.keep_top_k), [1, 2, 7, V - 1, V, V + 30]),
    "top_p": (jax.jit(filters.keep_top_p), [1e-9, 0.01, 0.3, 0.9, 0.97, 1 - 2**-10]),
    "min_p": (jax.jit(filters.keep_min_p), [0.0, 1e-6, 0.05, 0.5, 1.0]),
    "typical_p": (jax.jit(filters.keep_typical_p), [1e-9, 0.05, 0.2, 0.9, 0.95, 1 - 2**-10]),
}
TRUNCATION_CASES = [(name, value) for name, (_, values) in TRUNCATION.items() for value in values]
remove_repeated_ngrams = jax.jit(filters.remove_repeated_ngrams)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def rows(value, dtype=None) -> np.ndarray:
    return np.full(B, value, dtype or (np.int32 if isinstance(value, int) else np.float32))


def truncate(name: str, logits: np.ndarray, value) -> np.ndarray:
    """Apply a truncation filter with the same value in all rows."""
    values = np.full(len(logits), value, np.int32 if name == "top_k" else np.float32)
    return np.asarray(TRUNCATION[name][0](logits, values))


def reference(processor, logits: np.ndarray, ids=None) -> np.ndarray:
    import torch

    ids = None if ids is None else torch.tensor(np.asarray(ids), dtype=torch.long)
    return processor(ids, torch.tensor(logits)).numpy()


def warper(name: str, value):
    import transformers

    kind = {"top_k": "TopK", "top_p": "TopP", "min_p": "MinP", "typical_p": "Typical"}[name]
    return getattr(transformers, f"{kind}LogitsWarper")(value)


def histories(low: int, high: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ids from a small vocabulary, so that they repeat, and row lengths. Padding consists of valid token ids."""
    lengths = RNG.integers(low, high + 1, size=B).astype(np.int32)
    return RNG.integers(0, vocab, size=(B, high)).astype(np.int32), lengths


# ---------------------------------------------------------------- temperature and truncation
@pytest.mark.parametrize(("name", "value"), TRUNCATION_CASES)
def test_truncation_matches_transformers(name, value):
    np.testing.assert_array_equal(truncate(name, LOGITS, value), reference(warper(name, value), LOGITS))


@pytest.mark.parametrize(("name", "value"), TRUNCATION_CASES)
def test_truncation_after_other_filters_matches_transformers(name, value):
    holes = np.where(RNG.random(LOGITS.shape) < 0.5, -np.inf, LOGITS).astype(np.float32)
    holes[0, 1:] = -np.inf
    np.testing.assert_array_equal(truncate(name, holes, value), reference(warper(name, value), holes))


@pytest.mark.parametrize("name", ["top_k", "min_p", "typical_p"])
def test_ties_are_kept_as_in_transformers(name):
    for value in TRUNCATION[name][1]:
        np.testing.assert_array_equal(truncate(name, TIED, value), reference(warper(name, value), TIED))


@pytest.mark.parametrize("p", TRUNCATION["top_p"][1])
def test_top_p_keeps_all_ties_with_the_last_token_of_transformers(p):
    least = reference(warper("top_p", p), TIED)
    least = np.where(np.isfinite(least), least, np.inf).min(axis=-1, keepdims=True)
    np.testing.assert_array_equal(truncate("top_p", TIED, p), np.where(least <= TIED, TIED, -np.inf))


@pytest.mark.parametrize("name", TRUNCATION)
def test_positive_and_negative_zero_tie(name):
    logits = np.array([[0.0, -0.0, -0.0, 0.0]], np.float32)
    for value in TRUNCATION[name][1]:
        assert np.isfinite(truncate(name, logits, value)).all()


@pytest.mark.parametrize("name", TRUNCATION)
def test_disabled_filters_change_nothing(name):
    for logits in (LOGITS, 100 * LOGITS):  # also where probabilities are too small for float32
        np.testing.assert_array_equal(truncate(name, logits, OFF[name]), logits)


@pytest.mark.parametrize("name", TRUNCATION)
def test_every_row_uses_its_own_value(name):
    truncation, values = TRUNCATION[name]
    mixed = np.resize(np.array([OFF[name], *values], np.int32 if name == "top_k" else np.float32), B)
    together = np.asarray(truncation(LOGITS, mixed))
    for i in range(B):
        np.testing.assert_array_equal(together[i : i + 1], truncation(LOGITS[i : i + 1], mixed[i : i + 1]))


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.0, 2.5, 100.0])
def test_temperature_matches_transformers(temperature):
    from transformers import TemperatureLogitsWarper

    expected = reference(TemperatureLogitsWarper(temperature), LOGITS)
    np.testing.assert_allclose(filters.apply_temperature(LOGITS, rows(temperature)), expected, rtol=1e-6)


LOGIT_ROWS = st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7).map(lambda x: np.array([x], np.float32))
SETTINGS = st.sampled_from(list(TRUNCATION)).flatmap(
    lambda name: st.tuples(st.just(name), st.integers(1, 9) if name == "top_k" else st.floats(1e-3, 0.999))
)


@given(LOGIT_ROWS, SETTINGS)
def test_truncation_keeps_at_least_one_token_and_its_logit(logits, setting):
    truncated = truncate(setting[0], logits, setting[1])
    kept = np.isfinite(truncated)
    assert kept.any()
    np.testing.assert_array_equal(truncated[kept], logits[kept])


@given(LOGIT_ROWS, SETTINGS, st.permutations(range(7)))
def test_truncation_does_not_depend_on_the_order_of_tokens(logits, setting, order):
    if setting[0] in ("top_p", "typical_p"):
        logits = np.round(logits)  # sums of probabilities in another order differ in their last bits
        setting = (setting[0], np.round(setting[1], 2) + 0.0031)
    one = truncate(setting[0], logits, setting[1])[:, order]
    np.testing.assert_array_equal(one, truncate(setting[0], logits[:, order], setting[1]))


@given(LOGIT_ROWS, st.sampled_from(["top_p", "typical_p"]), st.floats(1e-3, 0.999), st.floats(1e-3, 0.999))
def test_a_larger_p_keeps_more_tokens(logits, name, one, other):
    less, more = sorted((one, other))
    kept_less, kept_more = (np.isfinite(truncate(name, logits, p)) for p in (less, more))
    assert (kept_more | ~kept_less).all()


@given(LOGIT_ROWS, st.floats(0.01, 0.99))
def test_top_p_keeps_the_most_likely_tokens_until_p_is_reached(logits, p):
    kept = np.isfinite(truncate("top_p", logits, p))[0]
    exact = np.exp(logits[0].astype(np.float64) - logits.max())
    exact /= exact.sum()
    assert exact[kept].sum() >= p - 1e-5
    assert exact[kept].min() >= exact[~kept].max(initial=0.0)
    without_last = exact[exact > exact[kept].min()]  # without the least likely token kept, p is not reached
    assert without_last.sum() < p + 1e-5


def test_truncation_of_a_large_vocabulary_matches_transformers():
    logits = (2 * RNG.normal(size=(3, 50_257))).astype(np.float32)
    for name, value in (("top_k", 1000), ("top_p", 0.9), ("typical_p", 0.9), ("min_p", 0.02)):
        ours, theirs = truncate(name, logits, value), reference(warper(name, value), logits)
        # Tokens at the threshold have a probability of 1e-6: sums in another order may differ by one of them.
        assert (np.isfinite(ours) != np.isfinite(theirs)).sum(axis=-1).max() <= (name in ("top_p", "typical_p"))


# ---------------------------------------------------------------- bias and penalties
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
def test_repetition_penalty_matches_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    ids, lengths = histories(1, 20, V)
    seen = np.asarray(filters.token_presence(np.where(np.arange(20) < lengths[:, None], ids, -1), V))
    ours = np.asarray(filters.apply_repetition_penalty(LOGITS, seen, rows(penalty)))
    for i in range(B):
        row = slice(i, i + 1)
        expected = reference(RepetitionPenaltyLogitsProcessor(penalty), LOGITS[row], ids[row, : lengths[i]])
        np.testing.assert_allclose(ours[row], expected, rtol=1e-6)


def test_frequency_and_presence_penalties_match_their_definition():
    ids, lengths = histories(0, 30, V // 3)
    counts = np.array([np.bincount(row[:n], minlength=V) for row, n in zip(ids, lengths, strict=True)], np.int32)
    frequency, presence = RNG.normal(size=(2, B)).astype(np.float32)
    by_count = np.asarray(filters.apply_frequency_penalty(LOGITS, counts, frequency))
    by_presence = np.asarray(filters.apply_presence_penalty(LOGITS, counts, presence))
    for i in range(B):
        for token in range(V):
            times = ids[i, : lengths[i]].tolist().count(token)
            assert by_count[i, token] == pytest.approx(LOGITS[i, token] - frequency[i] * times, abs=1e-5)
            assert by_presence[i, token] == pytest.approx(LOGITS[i, token] - presence[i] * (times > 0), abs=1e-5)


def test_bias_matches_transformers():
    from transformers import SequenceBiasLogitsProcessor

    bias = {3: 2.5, 49: -7.0}
    table = np.zeros((B, V), np.float32)
    table[:, list(bias)] = list(bias.values())
    expected = reference(SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()}), LOGITS, np.zeros((B, 1)))
    np.testing.assert_array_equal(filters.add_bias(LOGITS, table), expected)


# ---------------------------------------------------------------- removals
@pytest.mark.parametrize("n", [1, 2, 3, 4, 11])
def test_no_repeat_ngram_matches_transformers(n):
    from transformers import NoRepeatNGramLogitsProcessor

    ids, lengths = histories(1, 24, 3)
    ours = np.asarray(remove_repeated_ngrams(LOGITS, ids, lengths, rows(n)))
    removed = 0
    for i in range(B):
        row = slice(i, i + 1)
        expected = reference(NoRepeatNGramLogitsProcessor(n), LOGITS[row], ids[row, : lengths[i]])
        np.testing.assert_array_equal(ours[row], expected)
        removed += np.isinf(expected).sum()
    assert removed > 0 or n == 11


def test_every_row_uses_its_own_ngram_size():
    ids, lengths = histories(1, 24, 3)
    n = np.resize(np.array([0, 1, 2, 3, 5, 10**9], np.int32), B)
    together = np.asarray(remove_repeated_ngrams(LOGITS, ids, lengths, n))
    for i in range(B):
        row = slice(i, i + 1)
        np.testing.assert_array_equal(
            together[row], remove_repeated_ngrams(LOGITS[row], ids[row], lengths[row], n[row])
        )
    untouched = (n == 0) | (n > 24)
    np.testing.assert_array_equal(together[untouched], LOGITS[untouched])
    assert np.isinf(together[~untouched]).any()


def test_banned_tokens_match_bad_words_of_transformers():
    from transformers import NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor

    words = [0, 7, 49]
    table = np.zeros((B, V), bool)
    table[:, words] = True
    ours = filters.remove_banned(LOGITS, table)
    bad = NoBadWordsLogitsProcessor([[w] for w in words], eos_token_id=1)
    np.testing.assert_array_equal(ours, reference(bad, LOGITS, np.zeros((B, 1))))
    np.testing.assert_array_equal(ours, reference(SuppressTokensLogitsProcessor(words), LOGITS, np.zeros((B, 1))))


@pytest.mark.parametrize("num_new", [0, 3, 4, 5])
def test_min_length_matches_transformers(num_new):
    from transformers import MinNewTokensLengthLogitsProcessor

    eos = np.tile(np.array([2, 9, -1], np.int32), (B, 1))
    ours = filters.remove_early_eos(LOGITS, rows(num_new), rows(4), eos)
    expected = reference(MinNewTokensLengthLogitsProcessor(6, 4, [2, 9]), LOGITS, np.zeros((B, 6 + num_new)))
    np.testing.assert_array_equal(ours, expected)


def test_forced_tokens_match_transformers():
    from transformers import ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor

    first = reference(ForcedBOSTokenLogitsProcessor(3), LOGITS, np.zeros((B, 1)))
    last = reference(ForcedEOSTokenLogitsProcessor(8, 0), LOGITS, np.zeros((B, 7)))
    np.testing.assert_array_equal(filters.force_token(LOGITS, rows(3)), first)
    np.testing.assert_array_equal(filters.force_token(LOGITS, rows(0)), last)
    some = np.where(np.arange(B) % 2, 3, -1).astype(np.int32)
    np.testing.assert_array_equal(filters.force_token(LOGITS, some), np.where(some[:, None] >= 0, first, LOGITS))


def test_a_removal_that_would_leave_no_token_is_skipped():
    everything = np.arange(B)[:, None] % 2 == np.zeros((1, V), int)
    ours = np.asarray(filters.remove_banned(LOGITS, everything))
    np.testing.assert_array_equal(ours, LOGITS)
    holes = LOGITS.copy()
    holes[:, 1:] = -np.inf
    only_first = np.arange(V) == np.zeros((B, 1), int)
    np.testing.assert_array_equal(filters.remove_banned(holes, only_first), holes)
    np.testing.assert_array_equal(filters.remove_early_eos(holes, rows(0), rows(1), np.zeros((B, 1), np.int32)), holes)
    np.testing.assert_array_equal(remove_repeated_ngrams(holes, np.zeros((B, 2), np.int32), rows(2), rows(1)), holes)


def test_ids_outside_the_vocabulary_are_ignored():
    ids = np.array([[0, 4, 5, -1], [-1, -1, 99, 99]], np.int32)
    np.testing.assert_array_equal(filters.token_presence(ids, 5), [[True, False, False, False, True], [False] * 5])
