"""The text of one row in pieces, as its tokens come."""

from collections.abc import Iterator, Sequence

from jaxformer.decode.batch import Row, Slots, room_for
from jaxformer.decode.queue import stop_index, text_of
from jaxformer.run import Run

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are no character yet are shown as."""


def pieces(run: Run, row: Row) -> Iterator[str]:
    """Together, the row's text; a piece comes once nothing that follows can change it."""
    slots = Slots(run, room_for(run, [row], 1))
    slots.add([row])
    given = 0
    while True:
        ended = bool(slots.done)
        text = text_of(run, row, slots.new_ids(0))
        stop = stop_index(text, row.config.stop)
        if stop is not None:
            settled = stop
        else:
            settled = len(text) if ended else _settled(text, row.config.stop)
        if settled > given:
            yield text[given:settled]
            given = settled
        if ended or stop is not None:
            return
        slots.advance(max_steps=1, until_done=slots.shape.rows)


def _settled(text: str, stops: Sequence[str]) -> int:
    """How much of a text stays whatever follows: no unfinished character, no beginning of a stop text."""
    whole = text.rstrip(UNFINISHED)
    begun = [n for stop in stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
    return len(whole) - max(begun, default=0)
