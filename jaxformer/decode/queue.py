"""Continuous batching: requests stream through the slots of one batch, and answers come out in the order asked."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from jaxformer.decode.batch import Decoded, Row, Slots, refill_size, room_for
from jaxformer.decode.texts import tokenizer_of
from jaxformer.run import Run

LOOKAHEAD = 4  # batches of requests read ahead, so that prompts of similar lengths are read together
STEPS = 64  # tokens between looks at the rows: an interrupt waits no longer
STOP_STEPS = 16  # where a row may stop at a text


def answered(run: Run, requests: Iterable[Sequence[Row]], num_slots: int) -> Iterator[list[Decoded]]:
    """What becomes of the rows of each request, in the order of the requests; a request may have no rows."""
    pending, answers, first = _Pending(requests, num_slots), {}, 0
    slots: Slots | None = None
    owners: dict[int, tuple[int, int]] = {}  # slot -> request and place in it
    while pending.refill(answers) or owners:
        if pending.waiting and not owners:
            slots = _roomy(run, slots, [row for _, _, row in pending.waiting], num_slots)
        _fill(slots, pending, owners)
        if owners:
            _advance(slots, more=bool(pending.waiting))
            for slot, decoded in _ended(run, slots):
                request, place = owners.pop(slot)
                answers[request][place] = decoded
        while first in answers and None not in answers[first]:
            yield answers.pop(first)
            first += 1
    while first in answers:  # requests without rows, after the last that had some
        yield answers.pop(first)
        first += 1


class _Pending:
    """Requests read ahead of their turn."""

    def __init__(self, requests: Iterable[Sequence[Row]], num_slots: int) -> None:
        self.waiting: deque[tuple[int, int, Row]] = deque()
        self._requests, self._num_slots = enumerate(requests), num_slots

    def refill(self, answers: dict[int, list[Decoded | None]]) -> bool:
        """Read on when a batch would run short; longest first within what is read. Whether anything waits."""
        while len(self.waiting) < self._num_slots:
            read = list(islice(self._requests, LOOKAHEAD * self._num_slots))
            if not read:
                break
            entries = []
            for index, rows in read:
                answers[index] = [None] * len(rows)
                entries += [(index, place, row) for place, row in enumerate(rows)]
            self.waiting.extend(sorted(entries, key=lambda entry: -len(entry[2].ids)))
        return bool(self.waiting)


def _roomy(run: Run, slots: Slots | None, rows: list[Row], num_slots: int) -> Slots:
    """Empty slots with room for these rows: those at hand if they will do."""
    shape = room_for(run, rows, min(len(rows), num_slots))
    if slots is None or slots.shape.rows < shape.rows or not slots.shape.holds(shape):
        slots = Slots(run, shape)
    slots.expect(rows)
    return slots


def _fill(slots: Slots, pending: _Pending, owners: dict[int, tuple[int, int]]) -> None:
    """Put waiting rows into free slots, if there are enough of both to be worth reading prompts for."""
    free, refill = slots.free, refill_size(slots.shape.rows)
    count = len(free) if not owners else refill
    if not pending.waiting or len(free) < count:
        return
    taken = []
    while pending.waiting and len(taken) < count:
        row = pending.waiting[0][2]
        if not slots.shape.holds(room_for(slots.run, [row], 1)):
            break  # it waits until the batch is empty, and a larger one is made
        taken.append(pending.waiting.popleft())
    if taken:
        owners |= {slot: entry[:2] for slot, entry in zip(free, taken, strict=False)}
        slots.add([row for _, _, row in taken])


def _advance(slots: Slots, more: bool) -> None:
    size = slots.shape.rows
    until_done = min(size, len(slots.free) + refill_size(size)) if more else size
    stops = any(row is not None and row.config.stop for row in slots.rows)
    slots.advance(STOP_STEPS if stops else STEPS, until_done)


def _ended(run: Run, slots: Slots) -> Iterator[tuple[int, Decoded]]:
    """Rows that have come to their end, or to a text they stop at."""
    for slot, row in enumerate(slots.rows):
        if row is None or not row.config.stop:
            continue
        text = text_of(run, row, slots.new_ids(slot))
        end = stop_index(text, row.config.stop)
        if end is not None:
            kept = _tokens_before(run, row, slots.new_ids(slot), end)
            yield slot, slots.release(slot, kept)._replace(text=text[:end])
    for slot in slots.done:
        yield slot, slots.release(slot)


# ---------------------------------------------------------------- texts of rows
CONTEXT = 8  # tokens of the prompt that the text of new ones may depend on, such as for a space between words


def text_of(run: Run, row: Row, ids: Sequence[int]) -> str:
    """The text new tokens add to the prompt's."""
    tokenizer = tokenizer_of(run)
    if run.config.model.shape == "encoder-decoder":
        return tokenizer.decode(ids)
    before = [token for token in row.ids[-CONTEXT:] if token < tokenizer.vocab_size]
    known, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole[len(known) :] if whole.startswith(known) else tokenizer.decode(ids)


def stop_index(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop text begins that is complete first, however many tokens come between looks; none if none is."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


def _tokens_before(run: Run, row: Row, ids: list[int], end: int) -> int:
    """How many tokens have all their text before `end`."""
    return max(n for n in range(len(ids) + 1) if n == 0 or len(text_of(run, row, ids[:n])) <= end)
