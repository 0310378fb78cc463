"""Validation of the settings of a request, and their batching into arrays."""

import jax
import numpy as np
import pytest

from jaxformer.decode.sampling import SamplingConfig, batch_settings
from jaxformer.errors import UserError
from jaxformer.ops.sampling import History, SamplingParams, sample_next

BAD = {
    "temperature": [-0.1, float("nan"), float("inf"), 1e300, "1", None, True],
    "top_k": [0, -1, 2.0, "3", True],
    "top_p": [0.0, -0.5, 1.01, float("nan"), "0.9"],
    "min_p": [-0.01, 1.5, float("nan")],
    "typical_p": [0.0, 1.5, float("nan")],
    "repetition_penalty": [0.0, -1.0, float("inf"), float("nan"), 1e-60],
    "frequency_penalty": [float("inf"), float("nan"), 1e39, "x"],
    "presence_penalty": [float("-inf"), float("nan"), 1e39],
    "no_repeat_ngram": [0, -2, 1.5],
    "min_new_tokens": [-1, 0.5, 65, None],
    "max_new_tokens": [-1, 2.5, None],
    "forced_first": [-1, 2.0],
    "forced_last": [-1, "eos"],
    "bias": [{3: float("inf")}, {3: float("nan")}, {3: "1"}, [3]],
    "banned": ["12", 3, None],
    "stop": ["\n", None, [""], [3], 7],
    "seed": [0.5, "1", None, 2**64],
    "num_samples": [0, 1.5, None],
    "log_probs": [-1, 0.5, "2"],
}
GOOD = {
    "temperature": [0, 0.0, 1e-9, 1, 5.5, np.float32(0.5)],
    "top_k": [1, 10**12, np.int64(4)],
    "top_p": [1e-9, 1, 1.0],
    "min_p": [0, 0.0, 1.0],
    "typical_p": [0.5, 1],
    "repetition_penalty": [0.5, 1, 3.0],
    "frequency_penalty": [-2.0, 0, 2],
    "presence_penalty": [-2.0, 0, 2],
    "no_repeat_ngram": [1, 50],
    "min_new_tokens": [0, 64],
    "max_new_tokens": [0, 1000],
    "forced_first": [0, 9],
    "forced_last": [0, 9],
    "bias": [{}, {0: 1, 9: -100.0}],
    "banned": [(), [0, 9], (3, 3)],
    "stop": [(), ["\n", "end"]],
    "seed": [0, -1, 2**40],
    "num_samples": [1, 3],
    "log_probs": [None, 0, 5],
}
V = 10


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_bad_values_are_named(name, value):
    with pytest.raises(UserError, match=rf"^{name}.*must be") as raised:
        SamplingConfig(**{name: value})
    if not isinstance(value, dict):
        assert f"{name}={value!r}" in str(raised.value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]])
def test_good_values_give_a_token(name, value):
    """Includes the most extreme values that are allowed."""
    config = SamplingConfig(**({"temperature": 0.7} | {name: value}))
    settings = batch_settings([config, SamplingConfig()], vocab_size=V, eos_ids=(2,))
    prompts, lengths = np.array([[1, 1, 4], [3, 0, 0]], np.int32), np.array([3, 1], np.int32)
    history = History(prompts, lengths, lengths)
    keys = jax.random.split(jax.random.key(0), 2)
    tokens = jax.jit(sample_next)(np.linspace(-1, 1, 2 * V, dtype=np.float32).reshape(2, V), keys, settings, history)
    assert all(0 <= token < V for token in tokens.tolist())
    assert tokens[1] == V - 1


def test_bad_and_good_values_cover_every_setting():
    assert set(BAD) == set(GOOD) == set(SamplingConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"forced_first": V}, {"forced_last": V}),
        *({"bias": {V: 1.0}}, {"bias": {-1: 1.0}}, {"bias": {"3": 1.0}}),
        *({"banned": [V]}, {"banned": [-1]}, {"banned": [1.0]}),
    ],
    ids=str,
)
def test_tokens_outside_the_vocabulary_are_named(wrong):
    with pytest.raises(UserError, match=rf"^{next(iter(wrong))}: .* is not a token id: .*0 to 9"):
        batch_settings([SamplingConfig(), SamplingConfig(**wrong)], vocab_size=V)


def test_banning_every_token_is_rejected():
    with pytest.raises(UserError, match="banned: holds all 10"):
        batch_settings([SamplingConfig(banned=range(V))], vocab_size=V)
    batch_settings([SamplingConfig(banned=range(V - 1))], vocab_size=V)


def test_a_greedy_batch_has_no_filter():
    """Even if greedy rows set top_k and similar settings, which have no effect on them."""
    rows = [SamplingConfig(), SamplingConfig(top_k=5, top_p=0.5, min_p=0.1, typical_p=0.5), SamplingConfig(top_p=1.0)]
    settings = batch_settings(rows, vocab_size=V, eos_ids=(2,))
    used = {name for name, value in settings._asdict().items() if value is not None}
    assert used == {"max_new_tokens", "eos"}


def test_rows_that_do_not_use_a_filter_have_it_off():
    rows = [
        SamplingConfig(temperature=0.5, top_k=3, repetition_penalty=1.5, bias={1: 2.0}, forced_first=4),
        SamplingConfig(top_k=7, presence_penalty=0.25, no_repeat_ngram=2, max_new_tokens=9, min_new_tokens=1),
        SamplingConfig(temperature=1.0, top_p=0.5, min_p=0.1, typical_p=0.2, banned=[0, 3], forced_last=2),
    ]
    expected = SamplingParams(
        temperature=[0.5, 0.0, 1.0],
        top_k=[3, 0, 0],
        top_p=[1.0, 1.0, 0.5],
        min_p=[0.0, 0.0, 0.1],
        typical_p=[1.0, 1.0, 0.2],
        repetition_penalty=[1.5, 1.0, 1.0],
        frequency_penalty=None,
        presence_penalty=[0.0, 0.25, 0.0],
        no_repeat_ngram=[0, 2, 0],
        min_new_tokens=[0, 1, 0],
        max_new_tokens=[64, 9, 64],
        eos=[[2, 6]] * 3,
        forced_first=[4, -1, -1],
        forced_last=[-1, -1, 2],
        bias=[[0, 2.0] + [0] * 8, [0] * V, [0] * V],
        banned=[[False] * V, [False] * V, [i in (0, 3) for i in range(V)]],
    )
    settings = batch_settings(rows, vocab_size=V, eos_ids=(2, 6))
    for name, wanted in expected._asdict().items():
        actual = getattr(settings, name)
        if wanted is None:
            assert actual is None, name
        else:
            np.testing.assert_array_equal(actual, np.asarray(wanted, actual.dtype), name)
            assert actual.dtype in (np.float32, np.int32, bool)


def test_min_new_tokens_has_no_effect_without_eos():
    settings = batch_settings([SamplingConfig(min_new_tokens=3)], vocab_size=V)
    assert settings.min_new_tokens is None
    assert settings.eos.shape == (1, 0)
