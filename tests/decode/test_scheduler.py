"""Continuous batching: every request gives the same output as it does alone, and results are in input order."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.decode import slots as slots_module
from jaxformer.decode.sampling import SamplingConfig
from jaxformer.decode.scheduler import LOOKAHEAD_BATCHES, schedule
from jaxformer.decode.slots import DecodeRequest, Slots, SlotShape, bucket_length

MANY = 72


def prompts(number: int, longest: int = 24, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 259, rng.integers(1, longest + 1)).tolist() for _ in range(number)]


def decode_alone(run: jf.Run, ids: list[int], **settings) -> list[int]:
    """Decode one request in one slot; all calls have the same shape, so that nothing is compiled twice."""
    request = DecodeRequest(ids, SamplingConfig(**settings))
    source = bucket_length(24) if run.config.model.encoder is not None else 0
    slots = Slots(run, SlotShape(num_slots=1, length=64, source_length=source, top_n=None))
    slots.add([request])
    slots.advance(max_steps=1000, until_done=1)
    return slots.release(0).ids


# ---------------------------------------------------------------- the same results
@pytest.fixture(scope="module")
def requests_and_outputs(either_run):
    """Many requests of many lengths that end after 0 to 20 tokens, and the output of each alone."""
    lengths = np.random.default_rng(1).integers(0, 21, MANY).tolist()
    requests = [jf.Request(ids, max_new_tokens=n) for ids, n in zip(prompts(MANY), lengths, strict=True)]
    return requests, [decode_alone(either_run, request.prompt, **request.settings) for request in requests]


def test_many_requests_through_few_slots(either_run, requests_and_outputs):
    requests, alone = requests_and_outputs
    assert len({len(ids) for ids in alone}) > 10
    assert jf.generate(either_run, requests, batch_size=8) == alone


def test_the_order_of_requests_changes_nothing(either_run, requests_and_outputs):
    requests, alone = requests_and_outputs
    assert jf.generate(either_run, requests[::-1], batch_size=8) == alone[::-1]


@pytest.mark.slow
def test_fewer_slots_change_nothing(decoder_run):
    requests = prompts(MANY, longest=16)
    first = jf.generate(decoder_run, requests, max_new_tokens=8, batch_size=8)
    assert jf.generate(decoder_run, requests, max_new_tokens=8, batch_size=4) == first
    assert jf.generate(decoder_run, requests, max_new_tokens=8, batch_size=1) == first


def test_a_longer_prompt_than_any_before(decoder_run):
    """It does not fit into the current slots, so it and all later requests wait until the slots are empty."""
    short, long = prompts(4 * LOOKAHEAD_BATCHES + 3, longest=6), [7] * 50
    lengths = itertools.cycle((2, 8, 5, 3, 7))  # so that slots become free one by one
    requests = [jf.Request(ids, max_new_tokens=n) for ids, n in zip([*short, long, *short[:5]], lengths, strict=False)]
    outputs = jf.generate(decoder_run, requests, batch_size=4)
    assert outputs == [decode_alone(decoder_run, request.prompt, **request.settings) for request in requests]


def test_prompts_that_are_prefilled_in_chunks(run, monkeypatch):
    """The last chunk may be short and end at the capacity of the cache: it must not overwrite earlier tokens."""
    if run.config.model.encoder is not None:
        pytest.skip("a source is encoded at once")
    rows = [np.random.default_rng(n).integers(3, 259, n).tolist() for n in (18, 20, 5, 17)]
    settings = {"max_new_tokens": 4, "log_probs": 0}
    whole = jf.complete(run, rows, **settings)
    monkeypatch.setattr(slots_module, "PREFILL_CHUNK", 16)
    for (expected,), (actual,) in zip(whole, jf.complete(run, rows, **settings), strict=True):
        assert actual.ids == expected.ids
        np.testing.assert_allclose(actual.log_probs, expected.log_probs, atol=1e-5)


# ---------------------------------------------------------------- the end of a request
def test_empty_prompts_and_zero_new_tokens_share_a_batch(either_run):
    rows = [[], [70, 71], [], [72]]
    settings = [{"max_new_tokens": n} for n in (4, 0, 0, 6)]
    results = jf.complete(
        either_run, [jf.Request(ids, **own) for ids, own in zip(rows, settings, strict=True)], batch_size=2
    )
    assert [(len(c.ids), c.finish) for (c,) in results[1:3]] == [(0, "length")] * 2
    first_id = (
        either_run.tokenizer.eos_id if either_run.config.model.encoder is not None else either_run.tokenizer.bos_id
    )
    assert results[0][0].ids == jf.generate(either_run, [[first_id]], max_new_tokens=4)[0]
    assert results[3][0].ids == jf.generate(either_run, [[72]], max_new_tokens=6)[0]


def test_rows_that_end_with_their_first_token(decoder_run):
    eos = decoder_run.tokenizer.eos_id
    requests = [jf.Request(ids, forced_first=eos) for ids in prompts(9, longest=8)]
    requests.insert(4, jf.Request([70, 71], banned=[eos]))
    completions = [c for (c,) in jf.complete(decoder_run, requests, max_new_tokens=5, batch_size=4)]
    assert [(len(c.ids), c.finish) for c in completions] == [(0, "eos")] * 4 + [(5, "length")] + [(0, "eos")] * 5


def test_a_released_slot_does_not_advance(decoder_run):
    rows = [DecodeRequest([5], SamplingConfig(max_new_tokens=9)), DecodeRequest([6], SamplingConfig(max_new_tokens=9))]
    slots = Slots(decoder_run, SlotShape(num_slots=2, length=64, source_length=0, top_n=None))
    slots.add(rows)
    slots.advance(max_steps=3, until_done=2)
    assert [len(slots.new_ids(slot)) for slot in range(2)] == [4, 4]
    assert slots.done == []
    cut = slots.release(0, stop_after=2)
    assert (cut.ids, cut.finish) == (decode_alone(decoder_run, [5], max_new_tokens=9)[:2], "stop")
    slots.advance(max_steps=1000, until_done=1)  # one slot is done already
    assert (slots.free, len(slots.new_ids(1))) == ([0], 4)
    slots.advance(max_steps=1000, until_done=2)
    assert slots.release(1).ids == decode_alone(decoder_run, [6], max_new_tokens=9)
    assert slots.free == list(range(slots.shape.num_slots))


def test_banned_ids_and_ids_beyond_the_tokenizer_are_never_sampled(decoder_run):
    """Even at a very high temperature."""
    allowed = {*range(100, 110), 250}
    banned = [i for i in range(decoder_run.tokenizer.vocab_size) if i not in allowed]
    requests = [jf.Request(ids, banned=banned) for ids in prompts(6, longest=8)] + prompts(6, longest=8, seed=2)
    outputs = jf.generate(decoder_run, requests, max_new_tokens=20, temperature=1e4, batch_size=4)
    assert {token for row in outputs[:6] for token in row} == allowed
    assert all(len(row) == 20 for row in outputs[:6])
    sampled = {token for row in outputs[6:] for token in row}
    assert len(sampled) > 50
    assert max(sampled) < decoder_run.tokenizer.vocab_size < decoder_run.config.model.vocab_size


# ---------------------------------------------------------------- groups and iterators
def test_empty_groups(decoder_run):
    """Empty groups before, between and after other groups, and more of them than are read ahead."""
    rows = [DecodeRequest(ids, SamplingConfig(max_new_tokens=3)) for ids in prompts(4)]
    none: list[DecodeRequest] = []
    groups = [*[none] * 9, rows[:2], none, rows[2:3], *[none] * 20, rows[3:], *[none] * 9]
    results = list(schedule(decoder_run, iter(groups), 2))
    assert [len(each) for each in results] == [len(each) for each in groups]
    ids = [completion.ids for each in results for completion in each]
    assert ids == [decode_alone(decoder_run, row.ids, max_new_tokens=3) for row in rows]
    assert list(schedule(decoder_run, [none] * 30, 2)) == [none] * 30


def test_an_iterator_is_read_as_far_as_needed(decoder_run):
    """Endless prompts give endless outputs. A few batches are read ahead, but none before the first `next`."""
    read = Counter()

    def endless():
        for ids in itertools.cycle(prompts(10, longest=8)):
            read["prompts"] += 1
            yield ids

    outputs = jf.generate(decoder_run, endless(), max_new_tokens=3, batch_size=4)
    assert read["prompts"] == 0
    alone = [decode_alone(decoder_run, ids, max_new_tokens=3) for ids in prompts(10, longest=8)]
    for i in range(50):
        assert next(outputs) == alone[i % 10]
        # Besides the requests read ahead, less than a batch waits, and others are in slots or completed out of order.
        assert read["prompts"] <= i + 1 + (2 * LOOKAHEAD_BATCHES + 2) * 4
    assert next(jf.search(decoder_run, endless(), 3, num_beams=2, batch_size=4))


def test_a_bad_prompt_of_an_iterator_is_named(decoder_run):
    outputs = jf.generate(decoder_run, iter([[5], [6], [999]]), max_new_tokens=3)
    with pytest.raises(jf.UserError, match="prompt 2: token id 999"):
        list(outputs)


# ---------------------------------------------------------------- compiled programs
PROGRAMS = ("prefill", "prefill_chunk", "start_decode", "insert_rows", "advance")


@pytest.fixture
def compiled():
    """Counts how often each program is compiled."""
    counts = Counter()

    def note(event: str, seconds: float, **about: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    yield counts
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.slow
def test_a_thousand_prompts_compile_few_programs(decoder_run, compiled):
    run = jf.Run(
        decoder_run.config, decoder_run.model.clone(name="fresh"), decoder_run.params, decoder_run.tokenizer, 0
    )
    outputs = jf.generate(run, prompts(1000, longest=60), max_new_tokens=2, batch_size=32)
    assert len(outputs) == 1000
    counts = {name: compiled[name] for name in PROGRAMS}
    # Five padded prompt lengths (16, 24, 32, 48, 64); after the first batch, slots are refilled a quarter at a time.
    assert counts["advance"] == 1
    assert 5 <= counts["prefill"] <= 6
    assert sum(counts.values()) <= 14, counts
    compiled.clear()
    jf.generate(run, prompts(200, longest=60, seed=3), max_new_tokens=2, batch_size=32)
    assert sum(compiled[name] for name in PROGRAMS) <= 2, compiled
