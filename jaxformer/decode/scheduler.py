"""Continuous batching: requests stream through the slots of one batch, and results come out in input order."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from jaxformer.decode.slots import Completion, DecodeRequest, Slots, make_shape, refill_size
from jaxformer.decode.text import count_tokens_before, find_stop, new_text, settled_length
from jaxformer.run import Run

LOOKAHEAD_BATCHES = 4  # batches of requests to read ahead, so that prompts of similar length are prefilled together
MAX_STEPS = 64  # tokens per call of the compiled loop; Ctrl-C takes effect between two calls
MAX_STEPS_WITH_STOP = 16  # fewer if a request has stop strings, which only the host can detect


def schedule(run: Run, requests: Iterable[Sequence[DecodeRequest]], num_slots: int) -> Iterator[list[Completion]]:
    """Yield the completions of each group of requests, in input order; a group may be empty."""
    queue, results, next_group = _Queue(requests, num_slots), {}, 0
    slots: Slots | None = None
    owners: dict[int, tuple[int, int]] = {}  # slot -> (group, index within the group)
    while queue.refill(results) or owners:
        if queue.waiting and not owners:
            slots = _make_slots(run, slots, [request for _, _, request in queue.waiting], num_slots)
        _fill_slots(slots, queue, owners)
        if owners:
            _advance(slots, has_waiting=bool(queue.waiting))
            for slot, completion in _release_ended(slots):
                group, index = owners.pop(slot)
                results[group][index] = completion
        # Results are in input order: a complete group waits until all groups before it are complete.
        while next_group in results and None not in results[next_group]:
            yield results.pop(next_group)
            next_group += 1
    while next_group in results:  # empty groups after the last request
        yield results.pop(next_group)
        next_group += 1


class _Queue:
    """Requests that have been read and wait for a slot."""

    def __init__(self, groups: Iterable[Sequence[DecodeRequest]], num_slots: int) -> None:
        self.waiting: deque[tuple[int, int, DecodeRequest]] = deque()  # (group, index within the group, request)
        self._groups, self._num_slots = enumerate(groups), num_slots

    def refill(self, results: dict[int, list[Completion | None]]) -> bool:
        """Read more groups if fewer requests than slots are waiting; returns whether any request is waiting."""
        while len(self.waiting) < self._num_slots:
            groups = list(islice(self._groups, LOOKAHEAD_BATCHES * self._num_slots))
            if not groups:
                break
            entries = []
            for group, requests in groups:
                results[group] = [None] * len(requests)
                entries += [(group, index, request) for index, request in enumerate(requests)]
            # Sorted by length, because a prefill pads every prompt to the longest of its batch.
            self.waiting.extend(sorted(entries, key=lambda entry: -len(entry[2].ids)))
        return bool(self.waiting)


def _make_slots(run: Run, slots: Slots | None, requests: list[DecodeRequest], num_slots: int) -> Slots:
    """Empty slots for these requests; reuses `slots` if they are large enough, to avoid a compilation."""
    shape = make_shape(run, requests, min(len(requests), num_slots))
    if slots is None or slots.shape.num_slots < shape.num_slots or not slots.shape.covers(shape):
        slots = Slots(run, shape)
    slots.reserve_settings(requests)
    return slots


def _fill_slots(slots: Slots, queue: _Queue, owners: dict[int, tuple[int, int]]) -> None:
    """Move waiting requests into free slots once enough slots are free to make a prefill worthwhile."""
    free = slots.free
    count = refill_size(slots.shape.num_slots) if owners else len(free)
    if not queue.waiting or len(free) < count:
        return
    entries = []
    while queue.waiting and len(entries) < count:
        request = queue.waiting[0][2]
        if not slots.shape.covers(make_shape(slots.run, [request], 1)):
            break  # too long: it waits until the batch is empty and a larger one is made
        entries.append(queue.waiting.popleft())
    if entries:
        owners |= {slot: entry[:2] for slot, entry in zip(free, entries, strict=False)}
        slots.add([request for _, _, request in entries])


def _advance(slots: Slots, has_waiting: bool) -> None:
    num_slots = slots.shape.num_slots
    # Leave the loop early only if there are requests to refill the slots with.
    until_done = min(num_slots, len(slots.free) + refill_size(num_slots)) if has_waiting else num_slots
    has_stop = any(request is not None and request.config.stop for request in slots.requests)
    slots.advance(MAX_STEPS_WITH_STOP if has_stop else MAX_STEPS, until_done)


def _release_ended(slots: Slots) -> Iterator[tuple[int, Completion]]:
    """Free the slots whose request has ended or has reached a stop string; yields each slot with its completion."""
    done = set(slots.done)
    for slot, request in enumerate(slots.requests):
        if request is None:
            continue
        ids, text, stop = slots.new_ids(slot), None, None
        if request.config.stop:
            text = new_text(slots.run, request.ids, ids)
            stop = find_stop(text, request.config.stop)
        if stop is not None:
            # A stop string may begin inside a token: the text is cut at the stop string, the ids before that token.
            text = text[:stop]
            completion = slots.release(slot, count_tokens_before(slots.run, request.ids, ids, stop))
        elif slot in done:
            completion = slots.release(slot)
        else:
            continue
        if request.as_text:
            text = new_text(slots.run, request.ids, completion.ids) if text is None else text
            completion = completion._replace(output=text)
        yield slot, completion


def stream_text(run: Run, request: DecodeRequest) -> Iterator[str]:
    """Yield the text of one request in pieces, each as soon as no later token can change it."""
    slots = Slots(run, make_shape(run, [request], 1))
    slots.add([request])
    num_yielded = 0
    while True:
        is_done = bool(slots.done)
        # Decode all tokens every time: a token may change the text of earlier ones, for example complete a character.
        text = new_text(run, request.ids, slots.new_ids(0))
        end = find_stop(text, request.config.stop)
        if end is not None:
            is_done = True
        else:
            end = len(text) if is_done else settled_length(text, request.config.stop)
        if end > num_yielded:
            yield text[num_yielded:end]
            num_yielded = end
        if is_done:
            return
        slots.advance(max_steps=1, until_done=slots.shape.num_slots)
