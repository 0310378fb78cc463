"""Settings of requests: sampling, several samples, log-probabilities, stop strings; and which settings are rejected."""

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.decode import slots
from jaxformer.decode.jobs import make_job
from jaxformer.decode.sampling import SamplingConfig
from jaxformer.decode.slots import DecodeRequest, _unique_prompts
from jaxformer.decode.text import find_stop
from jaxformer.layers import Transformer
from jaxformer.models.bert import bert

NEW = 8
PROMPTS = [[1, 70], [1, 71, 72, 73], [5], [200, 3, 9]]
LETTERS = range(100, 126)  # a to z, as bytes after three special ids
ONLY_LETTERS = {"banned": [i for i in range(259) if i not in LETTERS]}


# ---------------------------------------------------------------- sampling
MIXED = [
    {},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.8, "seed": 5},
    {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "min_new_tokens": 6},
    {"temperature": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.3, "min_p": 0.02},
    {"temperature": 1.0, "typical_p": 0.9, "bias": {70: 3.0}, "banned": [71], "max_new_tokens": 5},
]


def test_requests_of_all_kinds_share_a_batch(decoder_run):
    """What a request samples depends neither on its slot nor on the other requests."""
    requests = [jf.Request(ids, **settings) for ids in PROMPTS for settings in MIXED]
    alone = [jf.generate(decoder_run, [request], NEW)[0] for request in requests]
    assert len({tuple(row) for row in alone}) > len(requests) // 2
    assert jf.generate(decoder_run, requests, NEW, batch_size=8) == alone
    order = np.random.default_rng(0).permutation(len(requests))
    assert jf.generate(decoder_run, [requests[i] for i in order], NEW, batch_size=4) == [alone[i] for i in order]


def test_settings_of_a_request_override_those_of_the_call(decoder_run):
    outputs = jf.generate(decoder_run, [jf.Request([5], max_new_tokens=3), [5]], NEW, banned=[2])
    assert [len(row) for row in outputs] == [3, NEW]
    assert outputs[0] == outputs[1][:3]


# ---------------------------------------------------------------- several samples
SAMPLED = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3}


def test_samples_differ_and_repeat(either_run):
    """The first sample is the one that num_samples=1 gives, and no sample depends on how many there are."""
    eight = jf.generate(either_run, PROMPTS, num_samples=8, batch_size=8, **SAMPLED)
    assert [len(each) for each in eight] == [8] * 4
    assert all(len({tuple(row) for row in each}) > 4 for each in eight)
    assert jf.generate(either_run, PROMPTS, num_samples=8, batch_size=8, **SAMPLED) == eight
    assert jf.generate(either_run, PROMPTS, **SAMPLED) == [each[0] for each in eight]
    assert jf.generate(either_run, PROMPTS, num_samples=3, batch_size=8, **SAMPLED) == [each[:3] for each in eight]
    assert jf.generate(either_run, PROMPTS, num_samples=1, **SAMPLED) == [each[:1] for each in eight]


def test_a_request_may_set_its_own_num_samples(decoder_run):
    one, several = jf.generate(decoder_run, [PROMPTS[0], jf.Request(PROMPTS[0], num_samples=3)], **SAMPLED)
    assert len(several) == 3
    assert several[0] == one


def test_greedy_samples_are_equal(decoder_run):
    assert all(a == b for a, b in jf.generate(decoder_run, PROMPTS, NEW, num_samples=2))


def test_samples_share_the_prefill_of_their_prompt(decoder_run, monkeypatch):
    sizes = []

    def record(model, params, prompt, **kwargs):
        sizes.append(len(prompt.ids))
        return prefill(model, params, prompt, **kwargs)

    prefill = slots.prefill
    monkeypatch.setattr(slots, "prefill", record)
    jf.generate(decoder_run, PROMPTS[:1], num_samples=8, **SAMPLED)
    assert sizes == [1]


def test_unique_prompts():
    first, second, config = [5, 6], [5, 6], SamplingConfig()
    rows = [
        DecodeRequest(first, config),
        DecodeRequest(first, config, 1),
        DecodeRequest(second, config),
        DecodeRequest([7], config),
        DecodeRequest(second, config, 1),
    ]
    prompts, prompt_index = _unique_prompts(rows)
    assert prompts == [[5, 6], [5, 6], [7], [5, 6]]
    assert prompt_index == [0, 0, 1, 2, 3]
    assert len({row.seed for row in rows}) == 3  # depends on the ids and the sample number only


# ---------------------------------------------------------------- log-probabilities
def test_log_probs_are_those_of_score(either_run):
    """Before any filter, normalised over the full vocabulary of the model."""
    filtered = {"temperature": 2.0, "top_k": 50, "repetition_penalty": 1.5, "bias": {70: 5.0}, "banned": [71]}
    requests = [jf.Request(ids, log_probs=n) for ids, n in zip(PROMPTS[:2], (0, 3), strict=True)]
    completions = [c for (c,) in jf.complete(either_run, requests, max_new_tokens=NEW, **filtered)]
    if either_run.config.model.encoder is None:
        rows = [[*ids, *c.ids] for ids, c in zip(PROMPTS, completions, strict=False)]
        scores = [row[-len(c.ids) :] for row, c in zip(jf.score(either_run, rows), completions, strict=True)]
    else:
        scores = jf.score(either_run, [c.ids for c in completions], PROMPTS[:2])
    for completion, expected in zip(completions, scores, strict=True):
        assert len(completion.ids) == len(completion.log_probs) > 3
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5)


def test_scores_of_beams_are_those_of_score(decoder_run):
    """A search normalises over the full vocabulary of the model too."""
    hypotheses = jf.search(decoder_run, [[1, 5, 6]], NEW, num_beams=3, banned=[decoder_run.tokenizer.eos_id])[0]
    scores = [
        row[-NEW:].mean() for row in jf.score(decoder_run, [[1, 5, 6, *hypothesis.output] for hypothesis in hypotheses])
    ]
    np.testing.assert_allclose([hypothesis.score for hypothesis in hypotheses], scores, atol=1e-5)


def test_each_request_gets_as_many_top_ids_as_it_asks_for(decoder_run):
    numbers = [None, 0, 1, 4, 1000]
    requests = [jf.Request([5, 6], log_probs=n) for n in numbers]
    completions = [c for (c,) in jf.complete(decoder_run, requests, max_new_tokens=NEW)]
    assert completions[0].log_probs is None
    assert completions[0].top is None
    for n, completion in zip(numbers[1:], completions[1:], strict=True):
        assert completion.ids == completions[0].ids
        np.testing.assert_array_equal(completion.log_probs, completions[1].log_probs)
        assert [len(top) for top in completion.top] == [min(n, decoder_run.tokenizer.vocab_size)] * len(completion.ids)
        for token, chosen, top in zip(completion.ids, completion.log_probs, completion.top, strict=True):
            assert top == sorted(top, key=lambda pair: -pair[1])
            assert not top or top[0] == (token, pytest.approx(chosen, abs=1e-6))
    # The sum is below 1, because ids beyond the tokenizer have probabilities too.
    assert all(0.5 < np.exp([logp for _, logp in top]).sum() < 1.0 for top in completions[-1].top)


def test_log_probs_have_the_length_of_the_output(decoder_run):
    eos = decoder_run.tokenizer.eos_id
    requests = [jf.Request([5, 6], log_probs=2, forced_last=eos, max_new_tokens=4), jf.Request([5], forced_first=eos)]
    (first,), (second,) = jf.complete(decoder_run, requests, max_new_tokens=NEW, log_probs=1)
    assert [len(part) for part in (first.ids, first.log_probs, first.top)] == [3, 3, 3]
    assert [len(part) for part in (second.ids, second.log_probs, second.top)] == [0, 0, 0]


# ---------------------------------------------------------------- stop strings
LONG = {"max_new_tokens": 40, "temperature": 2.0, **ONLY_LETTERS}


@pytest.fixture(scope="module")
def letters(decoder_run) -> list[str]:
    """The outputs without a stop string."""
    texts = jf.generate(decoder_run, ["a", "bc", "def"], **LONG)
    assert all(len(text) == 40 for text in texts)
    return texts


def test_outputs_end_before_a_stop_string(decoder_run, letters):
    """Stop strings before, across and after the first check for them; every character is one token here."""
    for start, length in ((0, 3), (4, 1), (14, 5), (35, 5), (36, 4)):
        requests = [
            jf.Request(text, stop=[whole[start : start + length]])
            for text, whole in zip(["a", "bc", "def"], letters, strict=True)
        ]
        results = jf.complete(decoder_run, requests, **LONG)
        for request, (completion,), whole in zip(requests, results, letters, strict=True):
            expected = whole[: whole.index(request.settings["stop"][0])]
            assert completion.output == expected
            assert completion.finish == "stop"
            assert completion.ids == decoder_run.tokenizer.encode(expected)


def test_the_first_of_several_stop_strings_ends_the_output(decoder_run, letters):
    text = letters[0]
    stops = [text[30:33], text[9:12], text[20:23], "never"]
    expected = text[: min(text.index(stop) for stop in stops[:3])]
    assert jf.generate(decoder_run, ["a"], stop=stops, **LONG) == [expected]


def test_overlapping_stop_strings_do_not_depend_on_when_they_are_checked(decoder_run, letters):
    """A stop string may begin earlier than another but end later: the one that ends first counts, as in a stream."""
    text = letters[0]
    stops = [text[5:12], text[8:10]]
    assert jf.generate(decoder_run, ["a"], stop=stops, **LONG) == [text[: text.index(stops[1])]]
    assert "".join(jf.stream(decoder_run, "a", stop=stops, **LONG)) == text[: text.index(stops[1])]


def test_a_stop_string_does_not_change_other_rows(decoder_run, letters):
    """A slot that is freed by a stop is refilled, and the other slots do not change."""
    texts = ["a", "bc", "def"] * 4
    stops = [[letters[i % 3][10:12]] if i % 2 else [] for i in range(12)]
    requests = [jf.Request(text, stop=stop, log_probs=1) for text, stop in zip(texts, stops, strict=True)]
    results = jf.complete(decoder_run, requests, batch_size=4, **LONG)
    for i, (completion,) in enumerate(results):
        whole = letters[i % 3]
        assert completion.output == (whole[: whole.index(stops[i][0])] if stops[i] else whole)
        assert len(completion.ids) == len(completion.log_probs) == len(completion.top) == len(completion.output)


def test_stop_strings_that_never_occur(decoder_run, letters):
    eos = decoder_run.tokenizer.eos_id
    requests = [jf.Request("a"), jf.Request("a", max_new_tokens=5, forced_last=eos), jf.Request("a", forced_first=eos)]
    completions = [c for (c,) in jf.complete(decoder_run, requests, **LONG, stop=["NEVER"])]
    assert [c.finish for c in completions] == ["length", "eos", "eos"]
    assert [c.output for c in completions] == [letters[0], letters[0][:4], ""]


def test_stop_strings_work_with_id_lists(decoder_run, letters):
    prompt, stop = [1, *decoder_run.tokenizer.encode("a")], letters[0][6:9]
    (output,) = jf.generate(decoder_run, [prompt], stop=[stop], **LONG)
    assert output == decoder_run.tokenizer.encode(letters[0][: letters[0].index(stop)])


def test_find_stop():
    assert find_stop("abcabc", ["c", "b"]) == 1
    assert find_stop("abc", ["abcd", "x"]) is None
    assert find_stop("abcd", ["abcd", "bc"]) == 1
    assert find_stop("abcd", ["bcd", "abcd"]) == 0  # both end at the same character: the longer one counts
    assert find_stop("", ["a"]) is None
    assert find_stop("abc", []) is None


# ---------------------------------------------------------------- errors, raised before anything is compiled
@pytest.fixture
def never_compiles(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a program was called")

    monkeypatch.setattr(slots, "prefill", refuse)


BEAMS = {"num_beams": 4}
REJECTED = [
    ({"temprature": 1.0}, "unknown setting 'temprature'; known settings include: temperature"),
    ({"repeat_penalty": 1.0}, "unknown setting 'repeat_penalty'; known settings include: .*repetition_penalty"),
    ({"zzz": 1}, "unknown setting 'zzz'; known settings include: temperature, top_k, .*log_probs"),
    ({"top_p": 0}, "top_p=0: must be in"),
    ({"min_new_tokens": 9}, "min_new_tokens=9: must be at most max_new_tokens=4"),
    ({"bias": {259: 1.0}}, "bias: 259 is not a token id: .* 0 to 258"),
    ({"banned": [-1]}, "banned: -1 is not a token id"),
    ({"forced_first": 263}, "forced_first: 263 is not a token id"),
    ({"forced_last": 10**6}, "forced_last: 1000000 is not a token id"),
    ({"banned": range(259)}, "banned: holds all 259 tokens"),
    ({"stop": "\n"}, "stop='.n': must be a list of strings"),
    ({"batch_size": 0}, "batch_size=0: must be an integer >= 1"),
    ({"batch_size": -4}, "batch_size=-4"),
    ({"batch_size": 2.5}, "batch_size=2.5: must be an integer"),
    ({"num_beams": "2"}, "num_beams='2': must be an integer"),
    (BEAMS | {"length_penalty": "1"}, "length_penalty='1': must be a finite number"),
    ({"max_new_tokens": 64}, "prompt 0: prompt of 2 tokens and max_new_tokens=64 exceed .*context of 64.*at most 62"),
    (BEAMS | {"temperature": 0.5}, "num_beams=4 with temperature=0.5"),
    (BEAMS | {"top_k": 5}, "num_beams=4 with top_k=5"),
    (BEAMS | {"top_p": 0.5}, "num_beams=4 with top_p=0.5"),
    (BEAMS | {"min_p": 0.5}, "num_beams=4 with min_p=0.5"),
    (BEAMS | {"stop": ["a"]}, "num_beams=4 with stop="),
    (BEAMS | {"log_probs": 0}, "num_beams=4 with log_probs=0"),
    (BEAMS | {"num_samples": 2}, "num_beams=4 with num_samples=2"),
    (BEAMS | {"zzz": 2}, "unknown setting 'zzz'"),
    (BEAMS | {"batch_size": 0}, "batch_size=0"),
    (BEAMS | {"banned": [300]}, "banned: 300 is not a token id"),
    (BEAMS | {"max_new_tokens": 64}, "context of 64"),
]


@pytest.mark.parametrize(("settings", "message"), REJECTED, ids=[str(list(settings)) for settings, _ in REJECTED])
def test_bad_settings_are_rejected_before_compilation(decoder_run, never_compiles, settings, message):
    with pytest.raises(jf.UserError, match=message):
        jf.generate(decoder_run, ["a"], **({"max_new_tokens": 4} | settings))


@pytest.mark.parametrize("own", [{"top_k": 0}, {"temprature": 1.0}, {"banned": [999]}, {"max_new_tokens": 64}], ids=str)
@pytest.mark.parametrize("beams", [{}, BEAMS], ids=["one", "beams"])
def test_the_error_names_the_prompt_of_a_bad_request(decoder_run, never_compiles, own, beams):
    with pytest.raises(jf.UserError, match=f"^prompt 1: .*{next(iter(own))}"):
        jf.generate(decoder_run, ["a", jf.Request("b", **own)], 4, **beams)
    with pytest.raises(jf.UserError, match=next(iter(own))):
        jf.stream(decoder_run, jf.Request("b", **own))


def test_a_request_may_not_sample_with_beam_search(decoder_run, never_compiles):
    with pytest.raises(jf.UserError, match=r"prompt 0: num_beams=4 with temperature=0\.5"):
        jf.generate(decoder_run, [jf.Request("a", temperature=0.5)], 4, num_beams=4)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("abc", r"list of texts or of id lists, got the text 'abc': write \['abc'\]"),
        ([[5], [6, 264]], "prompt 1: token id 264 is outside the vocabulary of 264"),
        ([[5], [-1]], "prompt 1: token id -1"),
        ([[5] * 61], "prompt 0: prompt of 61 tokens and max_new_tokens=4 exceed"),
        (["a", "b" * 70], "prompt 1: prompt of 71 tokens"),
        ([5, 6], "prompt 0: .*neither a text nor a list of token ids: 5"),
        ([[5.5]], "prompt 0: .*neither a text nor a list of token ids"),
        ([["a"]], "prompt 0: .*neither a text nor a list of token ids"),
        (np.array([[5, 6], [7, 999]]), "prompt 1: token id 999"),
    ],
    ids=str,
)
def test_bad_prompts_are_rejected_before_compilation(decoder_run, never_compiles, prompts, message):
    for settings in ({}, BEAMS):
        with pytest.raises(jf.UserError, match=message):
            jf.generate(decoder_run, prompts, 4, **settings)


def test_bad_settings_are_rejected_without_a_prompt(decoder_run, never_compiles):
    for settings in ({"zzz": 1}, {"top_p": 0.0}, {"num_beams": 2, "zzz": 1}):
        with pytest.raises(jf.UserError, match=list(settings)[-1]):
            jf.generate(decoder_run, iter([]), 4, **settings)


def test_stream_rejects_several_samples(decoder_run, never_compiles):
    with pytest.raises(jf.UserError, match="num_samples=2: stream returns one output"):
        jf.stream(decoder_run, "a", num_samples=2, max_new_tokens=4)


def test_texts_need_a_tokenizer(decoder_run, never_compiles):
    run = jf.Run(decoder_run.config, decoder_run.model, decoder_run.params, None, 0)
    for call in (
        lambda: jf.generate(run, [[5]], 4, stop=["a"]),
        lambda: jf.generate(run, ["a"], 4),
        lambda: jf.search(run, ["a"], 4),
        lambda: jf.stream(run, [5], max_new_tokens=4),
    ):
        with pytest.raises(jf.UserError, match="this model has no tokenizer: pass id lists"):
            call()


def test_default_values_are_allowed_with_beams(decoder_run):
    """Default values have no effect, so they may be passed with beams too."""
    plain = jf.generate(decoder_run, [[5, 6]], 4, num_beams=2)
    defaults = {"temperature": 0.0, "top_k": None, "stop": [], "num_samples": 1, "log_probs": None, "banned": []}
    assert jf.generate(decoder_run, [[5, 6]], 4, num_beams=2, **defaults) == plain


def test_encoder_only_models_are_rejected(decoder_run, never_compiles):
    model = bert(num_layers=1, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=264)
    run = jf.Run(
        decoder_run.config.model_copy(update={"model": model}), Transformer(model), {}, decoder_run.tokenizer, 0
    )
    for what, call in (
        ("generate", lambda: jf.generate(run, ["a"])),
        ("generate", lambda: jf.complete(run, ["a"])),
        ("search", lambda: jf.search(run, ["a"])),
        ("stream", lambda: jf.stream(run, "a")),
        ("generate", lambda: make_job(run, {}, {}, 1)),
        ("score", lambda: jf.score(run, ["a"])),
    ):
        with pytest.raises(
            jf.UserError, match=f"{what}: an encoder-only model does not generate text; jf.fill_mask predicts"
        ):
            call()
