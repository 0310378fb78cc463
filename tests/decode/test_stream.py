"""Streaming: the pieces together are the output of `generate`, and no piece changes later."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings, strategies as st

import jaxformer as jf
from jaxformer.decode import scheduler
from jaxformer.decode.sampling import SamplingConfig
from jaxformer.decode.scheduler import stream_text
from jaxformer.decode.slots import DecodeRequest
from jaxformer.decode.text import INCOMPLETE, find_stop, settled_length

PLAIN = {"max_new_tokens": 30, "seed": 1}
# Bytes of "a", "e", "é", "€" and an emoji: incomplete characters are likely, and complete ones occur.
BYTES = [b + 3 for b in {*b"ae", *"é€😀".encode()}]
MULTIBYTE = {"temperature": 3.0, "banned": [i for i in range(259) if i not in BYTES]}


@pytest.mark.parametrize("prompt", ["x", "€", [1, 229], [50]], ids=str)
@pytest.mark.parametrize("how", [{}, MULTIBYTE], ids=["greedy", "multibyte"])
def test_pieces_together_are_the_output(decoder_run, prompt, how):
    """Also if the model generates invalid UTF-8, or the prompt ends inside a character."""
    ids = [1, *decoder_run.tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
    (output,) = jf.generate(decoder_run, [ids], **PLAIN, **how)
    pieces = list(jf.stream(decoder_run, prompt, **PLAIN, **how))
    if isinstance(prompt, str):
        assert jf.generate(decoder_run, [prompt], **PLAIN, **how) == ["".join(pieces)]
    if prompt != [1, 229]:  # the first new byte completes a character of the prompt
        assert "".join(pieces) == decoder_run.tokenizer.decode(output)
    assert all(pieces)
    assert len(pieces) > 3


def test_an_encoder_decoder_streams(translator):
    (output,) = jf.generate(translator, ["abc"], **PLAIN, **MULTIBYTE)
    assert "".join(jf.stream(translator, "abc", **PLAIN, **MULTIBYTE)) == output
    assert INCOMPLETE in output


def test_the_first_piece_comes_before_the_last_token(decoder_run, monkeypatch):
    steps = []
    advance = scheduler.Slots.advance

    def count_steps(slots, max_steps, until_done):
        steps.append(max_steps)
        advance(slots, max_steps, until_done)

    monkeypatch.setattr(scheduler.Slots, "advance", count_steps)
    letters = {"banned": [i for i in range(259) if not 100 <= i < 126]}
    pieces = jf.stream(decoder_run, "x", **PLAIN, **letters)
    assert len(next(pieces)) == 1
    assert steps == []
    assert len(next(pieces)) == 1
    assert steps == [1]
    assert len(list(pieces)) == 28


@pytest.mark.parametrize("count", [0, 1])
def test_very_short_streams(decoder_run, count):
    (output,) = jf.generate(decoder_run, ["x"], max_new_tokens=count)
    assert "".join(jf.stream(decoder_run, "x", max_new_tokens=count)) == output
    assert list(jf.stream(decoder_run, "x", max_new_tokens=1, forced_first=2)) == []


# ---------------------------------------------------------------- streams of fixed tokens, without a model
def stream_ids(
    run: jf.Run, ids: list[int], stops: tuple[str, ...] = (), prompt: tuple[int, ...] = (1, 100)
) -> list[str]:
    """The pieces of a request whose new tokens are `ids`."""

    class Script:
        shape = SimpleNamespace(num_slots=1)

        def __init__(self, *args: object) -> None:
            self.count = min(1, len(ids))

        def add(self, requests: list[DecodeRequest]) -> None:
            assert len(requests) == 1

        def advance(self, max_steps: int, until_done: int) -> None:
            self.count += max_steps

        @property
        def done(self) -> list[int]:
            return [0] if self.count >= len(ids) else []

        def new_ids(self, slot: int) -> list[int]:
            return ids[: self.count]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "Slots", Script)
        return list(stream_text(run, DecodeRequest(prompt, SamplingConfig(max_new_tokens=40, stop=stops))))


TEXTS = st.text(
    st.one_of(st.sampled_from("ab€é😀\n"), st.characters(exclude_categories=["Cs"], exclude_characters=INCOMPLETE))
)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
@example(text="naïve €5 😀👩‍👩‍👧 日本語")
def test_no_piece_ends_inside_a_character(decoder_run, text):
    """With one byte per token, most tokens end inside a character, but no piece does."""
    pieces = stream_ids(decoder_run, decoder_run.tokenizer.encode(text))
    assert pieces == list(text)


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab€", max_size=20), stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3))
@example(text="aab", stops=["ab"])
@example(text="aabab€", stops=["ab€", "b€"])
@example(text="ba", stops=["ab"])
def test_the_pieces_end_before_a_stop_string(decoder_run, text, stops):
    pieces = stream_ids(decoder_run, decoder_run.tokenizer.encode(text), tuple(stops))
    assert "".join(pieces) == text[: find_stop(text, stops)]
    assert all(pieces)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=20))
@example(data=b"\xf0\x9f\x98")
@example(data=b"\xe2\x82a\xac")
@example(data=b"\xff\xfe")
def test_invalid_utf8_is_streamed_as_the_tokenizer_decodes_it(decoder_run, data):
    ids = [byte + 3 for byte in data]
    assert "".join(stream_ids(decoder_run, ids)) == decoder_run.tokenizer.decode(ids)


# ---------------------------------------------------------------- settled text
@pytest.mark.parametrize(
    ("text", "stops", "settled"),
    [
        ("", [], 0),
        ("abc", [], 3),
        ("ab" + INCOMPLETE, [], 2),
        ("ab" + INCOMPLETE * 3, [], 2),
        ("a" + INCOMPLETE + "b", [], 3),  # an invalid character inside stays
        ("abc", ["cd"], 2),
        ("abc", ["bcd"], 1),
        ("abc", ["bcd", "cd"], 1),
        ("aaa", ["aab"], 1),
        ("abc", ["x"], 3),
        ("abc", ["c"], 3),  # find_stop handles complete stop strings
        ("ab" + INCOMPLETE, ["bc"], 1),
        ("abc", ["abcd"], 0),
    ],
)
def test_settled_length(text, stops, settled):
    assert settled_length(text, stops) == settled
