"""Sampling from logits to a token: filter pipelines against transformers, samples against their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from scipy import stats

from jaxformer.ops import sampling
from jaxformer.ops.filters import token_counts
from jaxformer.ops.sampling import History, SamplingParams, token_log_probs

B, V = 32, 40
RNG = np.random.default_rng(1)
LOGITS = (3 * RNG.normal(size=(B, V))).astype(np.float32)
PROMPT = RNG.integers(0, 4, size=(B, 12)).astype(np.int32)
LENGTHS = RNG.integers(1, 13, size=B).astype(np.int32)
KEYS = jax.random.split(jax.random.key(0), B)
FRESH = History(PROMPT, LENGTHS, LENGTHS)
EOS = 5
sample_next, apply_filters = map(jax.jit, (sampling.sample_next, sampling.apply_filters))


def every_setting(seed: int = 2) -> SamplingParams:
    """Random values of every parameter, with each filter disabled in some rows."""
    rng = np.random.default_rng(seed)

    def column(low, high, off, kind=np.float32):
        values = rng.integers(low, high, B) if kind is np.int32 else rng.uniform(low, high, B)
        return np.where(rng.random(B) < 0.3, off, values).astype(kind)

    return SamplingParams(
        temperature=column(0.3, 2.0, 0.0),
        top_k=column(1, V + 5, 0, np.int32),
        top_p=column(0.3, 1.0, 1.0),
        min_p=column(0.0, 0.1, 0.0),
        typical_p=column(0.3, 1.0, 1.0),
        repetition_penalty=column(0.7, 2.0, 1.0),
        frequency_penalty=column(-0.5, 1.0, 0.0),
        presence_penalty=column(-0.5, 1.0, 0.0),
        no_repeat_ngram=column(1, 4, 0, np.int32),
        min_new_tokens=column(0, 6, 0, np.int32),
        max_new_tokens=column(6, 9, 7, np.int32),
        eos=np.full((B, 1), EOS, np.int32),
        forced_first=np.where(rng.random(B) < 0.8, -1, 11).astype(np.int32),
        forced_last=np.where(rng.random(B) < 0.5, -1, EOS).astype(np.int32),
        bias=rng.normal(size=(B, V)).astype(np.float32),
        banned=rng.random((B, V)) < 0.1,
    )


def history_after(new_BT: np.ndarray, prompt=PROMPT, lengths=LENGTHS) -> History:
    """Prompts and new tokens, followed by random tokens that must be ignored."""
    num_new = new_BT.shape[1]
    ids = RNG.integers(0, V, size=(len(prompt), prompt.shape[1] + 10)).astype(np.int32)
    for row, start, length, new in zip(ids, prompt, lengths, new_BT, strict=True):
        row[:length], row[length : length + num_new] = start[:length], new
    return History(ids, lengths, lengths + num_new)


# ---------------------------------------------------------------- pipelines of transformers
PIPELINES = {
    "greedy with everything": {
        "repetition_penalty": 1.4, "no_repeat_ngram": 2, "min_new_tokens": 3, "bias": {3: 4.0, 2: -1.5}, "banned": [1],
        "forced_last": EOS,
    },
    "temperature": {"temperature": 0.7},
    "nucleus": {"temperature": 1.3, "top_p": 0.8},
    "top-k, then nucleus": {"temperature": 0.6, "top_k": 9, "top_p": 0.9},
    "four ways to narrow": {"temperature": 1.7, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
    "penalised nucleus": {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.8, "bias": {0: 3.0}},
    "all": {
        "temperature": 1.2, "top_k": 25, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 0.8,
        "no_repeat_ngram": 3, "min_new_tokens": 5, "bias": {7: 2.0, 1: 2.0}, "banned": [0, 39], "forced_last": 6,
    },
    "first of an encoder-decoder": {"forced_first": 17, "banned": [17], "repetition_penalty": 1.2},
    "first, then sampled": {"temperature": 0.8, "forced_first": 17, "top_k": 3, "typical_p": 0.5, "min_p": 0.1},
}  # fmt: skip
MAX_NEW = 7


@pytest.fixture(scope="module")
def tiny():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=8, n_layer=1, n_head=1))


def processors(model, options: dict, prompt_length: int):
    from transformers import GenerationConfig

    options = dict(options)
    bias, banned = options.pop("bias", None), options.pop("banned", None)
    config = GenerationConfig(
        do_sample="temperature" in options,
        temperature=options.get("temperature", 1.0),
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
        min_p=options.get("min_p"),
        typical_p=options.get("typical_p", 1.0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        no_repeat_ngram_size=options.get("no_repeat_ngram", 0),
        min_new_tokens=options.get("min_new_tokens"),
        max_length=prompt_length + MAX_NEW,
        forced_bos_token_id=options.get("forced_first"),
        forced_eos_token_id=options.get("forced_last"),
        sequence_bias=None if bias is None else {(token,): value for token, value in bias.items()},
        bad_words_ids=None if banned is None else [[token] for token in banned],
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model._prepare_special_tokens(config)
    return model._get_logits_processor(config, input_ids_seq_length=prompt_length, encoder_input_ids=None)


def same_for_all(options: dict, batch: int) -> SamplingParams:
    columns = {"max_new_tokens": np.full(batch, MAX_NEW, np.int32), "eos": np.full((batch, 1), EOS, np.int32)}
    for name, value in options.items():
        if name == "bias":
            columns[name] = np.zeros((batch, V), np.float32)
            columns[name][:, list(value)] = list(value.values())
        elif name == "banned":
            columns[name] = np.isin(np.arange(V), value) & np.ones((batch, 1), bool)
        else:
            columns[name] = np.full(batch, value, np.int32 if isinstance(value, int) else np.float32)
    return SamplingParams(**columns)


@pytest.mark.parametrize("num_new", [0, 2, MAX_NEW - 1])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_match_transformers(name, num_new, tiny):
    import torch

    options = PIPELINES[name]
    # transformers forces the first token after a prompt of exactly one token, the decoder start token.
    lengths = np.ones_like(LENGTHS) if "forced_first" in options else LENGTHS
    new = RNG.integers(0, 4, size=(B, num_new))
    settings = same_for_all(options, B)
    ours = np.asarray(apply_filters(LOGITS, settings, history_after(new, lengths=lengths)))
    for i in range(B):
        ids = np.concatenate([PROMPT[i, : lengths[i]], new[i]])
        pipeline = processors(tiny, options, int(lengths[i]))
        expected = pipeline(torch.tensor(ids[None].astype(np.int64)), torch.tensor(LOGITS[i : i + 1])).numpy()
        np.testing.assert_allclose(ours[i : i + 1], expected, rtol=1e-5, atol=1e-6)


def test_pipelines_cover_every_parameter_of_transformers():
    covered = {name for options in PIPELINES.values() for name in options}
    assert set(SamplingParams._fields) - covered == {"frequency_penalty", "presence_penalty", "max_new_tokens", "eos"}


def test_frequency_and_presence_penalties_use_new_tokens_only_and_follow_the_repetition_penalty():
    settings = same_for_all({"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 1.5}, B)
    new = RNG.integers(0, 8, size=(B, 6))
    ours = np.asarray(apply_filters(LOGITS, settings, history_after(new)))
    for i in range(B):
        for token in range(V):
            expected, times = LOGITS[i, token], new[i].tolist().count(token)
            if times or token in PROMPT[i, : LENGTHS[i]]:
                expected = expected * 2.0 if expected < 0 else expected / 2.0
            assert ours[i, token] == pytest.approx(expected - 0.25 * times - 1.5 * (times > 0), abs=1e-5)


# ---------------------------------------------------------------- independence of rows
@pytest.mark.parametrize("num_new", [0, 3, 5, 7])
def test_rows_do_not_depend_on_the_batch(num_new):
    settings = every_setting()
    history = history_after(RNG.integers(0, 4, size=(B, num_new)))
    scores, tokens = apply_filters(LOGITS, settings, history), sample_next(LOGITS, KEYS, settings, history)
    for i in range(B):
        row = slice(i, i + 1)
        alone = jax.tree.map(lambda x, row=row: x[row], (settings, history))
        np.testing.assert_array_equal(apply_filters(LOGITS[row], *alone), scores[row])
        np.testing.assert_array_equal(sample_next(LOGITS[row], KEYS[row], *alone), tokens[row])


@pytest.mark.slow
def test_a_filter_that_is_none_equals_a_disabled_one():
    """The result of a row does not depend on which filters other rows of the batch need."""
    settings, off = every_setting(), {"top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "repetition_penalty": 1}
    off |= {"frequency_penalty": 0, "presence_penalty": 0, "no_repeat_ngram": 0, "min_new_tokens": 0}
    off |= {"forced_first": -1, "forced_last": -1, "bias": 0, "banned": False}
    history = history_after(RNG.integers(0, 4, size=(B, 2)))
    everything = apply_filters(LOGITS, settings, history)
    for name, value in off.items():
        turned_off = settings._replace(**{name: np.full_like(getattr(settings, name), value)})
        without = settings._replace(**{name: None})
        actual, expected = (np.asarray(apply_filters(LOGITS, each, history)) for each in (turned_off, without))
        np.testing.assert_array_equal(actual, expected, name)
        assert not np.array_equal(everything, expected) or name in ("forced_first", "forced_last")


def test_new_parameter_values_do_not_recompile():
    compiled = jax.jit(lambda *inputs: sampling.sample_next(*inputs))
    for seed in range(5):
        settings = every_setting(seed)
        compiled(LOGITS, KEYS, settings, history_after(RNG.integers(0, 4, size=(B, seed))))
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "vocabulary"])
def test_eight_devices_sample_like_one(spec):
    settings = every_setting()
    history = history_after(RNG.integers(0, 4, size=(B, 3)))
    sharding = NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), spec)
    sharded = jax.device_put(LOGITS, sharding)
    np.testing.assert_array_equal(
        sample_next(sharded, KEYS, settings, history), sample_next(LOGITS, KEYS, settings, history)
    )


def test_greedy_is_argmax_and_compiles_no_random_numbers_loops_or_sorts():
    program = sample_next.lower(LOGITS, KEYS, SamplingParams(), FRESH).as_text()
    assert not any(word in program for word in ("while", "threefry", "stablehlo.sort"))
    np.testing.assert_array_equal(sample_next(LOGITS, KEYS, SamplingParams(), FRESH), LOGITS.argmax(-1))


def test_no_filter_sorts():
    settings = every_setting()
    program = apply_filters.lower(LOGITS, settings, history_after(np.zeros((B, 0)))).as_text()
    assert "while" in program
    assert "stablehlo.sort" not in program


@pytest.mark.parametrize("seed", range(5))
def test_filters_never_remove_all_tokens_of_a_row(seed):
    settings = every_setting(seed)
    history = history_after(RNG.integers(0, V, size=(B, 5)))
    bans = settings._replace(banned=RNG.random((B, V)) < np.linspace(0.8, 1.0, B)[:, None])
    scores = np.asarray(apply_filters(LOGITS, bans, history))
    assert np.isfinite(scores).any(axis=-1).all()
    assert not np.isnan(scores).any()


def test_bans_take_precedence_over_other_removals():
    only = np.arange(V) == 5
    one = np.array([1], np.int32)
    history = History(np.array([[5, 0]], np.int32), one, one)
    strict = SamplingParams(
        banned=~only[None], eos=np.array([[5]], np.int32), min_new_tokens=np.array([3]), no_repeat_ngram=np.array([1])
    )
    assert sample_next(LOGITS[:1], KEYS[:1], strict, history).tolist() == [5]
    # The bans leave 5, which is EOS, and 6, which repeats: the minimum length takes precedence over n-grams.
    banned, ids = ~(only | (np.arange(V) == 6))[None], np.array([[6, 0]], np.int32)
    assert sample_next(LOGITS[:1], KEYS[:1], strict._replace(banned=banned), history._replace(ids=ids)).tolist() == [6]


def test_a_forced_token_overrides_every_removal():
    settings = every_setting()._replace(banned=np.ones((B, V), bool), forced_first=np.full(B, EOS, np.int32))
    assert (sample_next(LOGITS, KEYS, settings, history_after(np.zeros((B, 0)))) == EOS).all()


# ---------------------------------------------------------------- history
def test_history_separates_prompt_and_new_tokens():
    new = RNG.integers(0, V, size=(B, 6))
    history = history_after(new)
    counts, seen = token_counts(history.new_ids, V), token_counts(history.all_ids, V)
    for i in range(B):
        row = [*PROMPT[i, : LENGTHS[i]], *new[i]]
        assert counts[i].tolist() == np.bincount(new[i], minlength=V).tolist()
        assert seen[i].tolist() == np.bincount(row, minlength=V).tolist()
    assert (history.num_new == 6).all()


# ---------------------------------------------------------------- random samples
def distribution(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}, {"typical_p": 0.6}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sample_frequencies_follow_the_filtered_distribution(temperature, options):
    draws = 20_000
    logits = np.broadcast_to(np.linspace(2.0, -2.0, 9, dtype=np.float32), (draws, 9))
    settings = same_for_all({"temperature": temperature, **options}, draws)
    expected = distribution(
        np.asarray(apply_filters(logits[:1], same_for_all({"temperature": temperature, **options}, 1), FRESH))
    )
    keys = jax.random.split(jax.random.key(3), draws)
    one = np.ones(draws, np.int32)
    samples = np.asarray(sample_next(logits, keys, settings, History(one[:, None], one, one)))
    actual, expected = np.bincount(samples, minlength=9), expected[0]
    assert (actual[expected == 0] == 0).all()
    kept = expected > 0
    if kept.sum() > 1:
        assert stats.chisquare(actual[kept], draws * expected[kept]).pvalue > 1e-3


def test_a_sample_depends_only_on_its_row_and_key():
    settings = SamplingParams(temperature=np.full(B, 1.3, np.float32), top_k=np.full(B, 20, np.int32))
    together = np.asarray(sample_next(LOGITS, KEYS, settings, FRESH))
    np.testing.assert_array_equal(sample_next(LOGITS, KEYS, settings, FRESH), together)
    order = RNG.permutation(B)
    np.testing.assert_array_equal(sample_next(LOGITS[order], KEYS[order], settings, FRESH), together[order])
    others = LOGITS.copy()
    others[1:] = 0
    assert sample_next(others, KEYS, settings, FRESH)[0] == together[0]
    assert not np.array_equal(sample_next(LOGITS, KEYS[::-1], settings, FRESH), together)


def test_a_temperature_near_zero_is_greedy():
    for temperature in (0.0, 1e-40, 1e-36, 1e-12, 9e-7, 1e-6, 1e-5):
        settings = same_for_all({"temperature": temperature, "top_p": 0.9, "typical_p": 0.9}, B)
        assert not np.isnan(apply_filters(1e4 * LOGITS, settings, FRESH)).any()
        np.testing.assert_array_equal(sample_next(1e4 * LOGITS, KEYS, settings, FRESH), LOGITS.argmax(-1))
    assert sampling.MIN_TEMPERATURE == 1e-6


def test_temperature_zero_ignores_keys_and_truncation_filters():
    settings = same_for_all({"temperature": 0.0, "typical_p": 0.1, "top_k": 3}, B)
    for keys in (KEYS, KEYS[::-1]):
        tokens = sample_next(LOGITS, keys, settings, FRESH)
        np.testing.assert_array_equal(tokens, LOGITS.argmax(-1))
        assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(apply_filters(LOGITS, settings, FRESH), LOGITS)


def test_bfloat16_logits_are_filtered_in_float32():
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    for settings in (SamplingParams(), SamplingParams(banned=every_setting().banned), every_setting()):
        history = history_after(np.zeros((B, 1)))
        scores = apply_filters(half, settings, history)
        assert scores.dtype == jnp.float32
        np.testing.assert_array_equal(scores, apply_filters(half.astype(jnp.float32), settings, history))
    assert token_log_probs(half, jnp.zeros(B, jnp.int32), 2).top.dtype == jnp.float32


# ---------------------------------------------------------------- log-probabilities
def test_log_probabilities_match_transition_scores(tiny):
    """For the filtered distribution that tokens are sampled from, and for the model's unfiltered one."""
    import torch

    settings = same_for_all({"temperature": 0.8, "top_k": 9}, B)
    tokens = sample_next(LOGITS, KEYS, settings, FRESH)
    for logits in (apply_filters(LOGITS, settings, FRESH), LOGITS):
        sequences = torch.tensor(np.stack([PROMPT[:, 0], tokens], axis=1).astype(np.int64))
        expected = tiny.compute_transition_scores(sequences, (torch.tensor(np.asarray(logits)),), normalize_logits=True)
        np.testing.assert_allclose(token_log_probs(logits, tokens).chosen, expected.numpy()[:, 0], rtol=1e-5, atol=1e-6)


def test_top_log_probabilities_are_sorted_with_their_token_ids():
    tokens = LOGITS.argmax(-1)
    actual = token_log_probs(LOGITS, tokens, top_n=5)
    exact = np.log(np.array([distribution(row) for row in LOGITS]))
    order = np.argsort(-exact, axis=-1)[:, :5]
    np.testing.assert_array_equal(actual.top_ids, order)
    np.testing.assert_allclose(actual.top, np.take_along_axis(exact, order, axis=-1), atol=1e-5)
    np.testing.assert_array_equal(actual.chosen, actual.top[:, 0])
    assert token_log_probs(LOGITS, tokens).top.shape == (B, 0)
    assert token_log_probs(LOGITS, tokens, top_n=V + 3).top.shape == (B, V)
