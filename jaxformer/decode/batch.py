"""Rows that are decoded together, each in a slot of its own: a finished row frees its slot for another.

The arrays are a `State` of `decode.generate`; here is what the host knows about them, and how requests of any length
become arrays of few shapes.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode.generate import (
    Chances,
    Prompt,
    Rows,
    State,
    advance,
    first_state,
    inserted,
    prefill,
    prefill_more,
    taken,
)
from jaxformer.decode.settings import SamplingConfig, batched, used
from jaxformer.decode.texts import decoder_start, eos_ids, num_drawable
from jaxformer.layers import Transformer
from jaxformer.ops.sampling import SamplingParams
from jaxformer.run import Run
from jaxformer.sharding import RULES
from jaxformer.typing import Array, Bool, Float, Int, Params, Tokens, tokens_from_ids

PART = 512  # prompt tokens read at once; longer prompts are read in parts, so that memory stays bounded


@dataclass(frozen=True)
class Row:
    """One output to make."""

    ids: Sequence[int]
    """What the model reads: a prompt, or the source of an encoder-decoder."""
    config: SamplingConfig
    sample: int = 0
    """Which of several outputs for the same ids."""

    @property
    def seed(self) -> int:
        """From the row's own tokens: the same wherever it stands, different from its neighbours'."""
        words = np.asarray([*self.ids, self.sample] if self.sample else self.ids, np.int32)
        return zlib.crc32(words.tobytes(), self.config.seed & 0xFFFFFFFF)


class Decoded(NamedTuple):
    """What became of a row."""

    ids: list[int]  # the new tokens, without the one that ended it
    finish: Literal["eos", "length", "stop"]
    log_probs: Float[np.ndarray, " T"] | None = None
    top: list[list[tuple[int, float]]] | None = None  # of every token, (id, log-probability) of the likeliest
    text: str | None = None  # where it is not simply that of the ids, because a stop text may begin within a token


class HostView(NamedTuple):
    """The small arrays of a state, fetched at once."""

    tokens_BC: Int[np.ndarray, "B C"]
    prompt_lengths_B: Int[np.ndarray, " B"]
    lengths_B: Int[np.ndarray, " B"]
    done_B: Bool[np.ndarray, " B"]
    chances: Chances | None


class Shape(NamedTuple):
    """How much room a batch has."""

    rows: int
    length: int  # of prompt and output together
    source: int  # 0 without an encoder
    top_n: int | None  # how many of the likeliest tokens are noted

    def holds(self, other: "Shape") -> bool:
        """Whether rows of the other shape fit in."""
        noted = other.top_n is None or (self.top_n is not None and other.top_n <= self.top_n)
        return self.length >= other.length and self.source >= other.source and noted


def room_for(run: Run, rows: Sequence[Row], num_slots: int) -> Shape:
    """The least shape for these rows."""
    longest, new = max(len(row.ids) for row in rows), max(row.config.max_new_tokens for row in rows)
    tops = [row.config.log_probs for row in rows if row.config.log_probs is not None]
    top_n = min(max(tops), num_drawable(run)) if tops else None
    size = padded_size(run, num_slots)
    if run.config.model.shape == "encoder-decoder":
        return Shape(size, bucket(1 + new), bucket(longest), top_n)
    needed = max(len(row.ids) + row.config.max_new_tokens for row in rows)
    return Shape(size, bucket(needed), 0, top_n)


class Slots:
    """The rows that are being decoded."""

    def __init__(self, run: Run, shape: Shape) -> None:
        self.run, self.shape = run, shape
        self.rows: list[Row | None] = [None] * shape.rows
        self._state: State | None = None
        self._seen: HostView | None = None
        self._settings: SamplingParams | None = None
        self._used: frozenset[str] = frozenset()

    @property
    def free(self) -> list[int]:
        return [slot for slot, row in enumerate(self.rows) if row is None]

    @property
    def _form(self) -> tuple[Transformer, Params]:
        return self.run.decoding_alone if self.shape.rows == 1 else self.run.decoding

    def expect(self, rows: Sequence[Row]) -> None:
        """Compile for the settings of these rows too: once, rather than again whenever one of them comes in."""
        self._used |= frozenset().union(*(used(row.config) for row in rows))

    def add(self, rows: Sequence[Row]) -> None:
        """Read the prompts of new rows, and put them into free slots; each has its first token then."""
        slots = self.free[: len(rows)]
        for slot, row in zip(slots, rows, strict=True):
            self.rows[slot] = row
        self.expect(rows)
        self._settings = self._batched([row.config if row else IDLE for row in self.rows])
        prompts, take = _distinct(rows)
        # Few shapes: a whole batch, or so many rows as are refilled at a time.
        size = self.shape.rows if len(rows) > refill_size(self.shape.rows) else refill_size(self.shape.rows)
        size = padded_size(self.run, size)
        self._seen = None
        with on_mesh(self.run):
            state = self._read(prompts, rows, take, size)
            if self._state is None and size == self.shape.rows:
                self._state = _widened(state, self.shape)
                return
            if self._state is None:
                self._state = self._idle_like(state)
            places = np.array(slots + [self.shape.rows] * (size - len(rows)), np.int32)
            self._state = inserted(self._state, state, places)

    def advance(self, max_steps: int, until_done: int) -> None:
        """Up to `max_steps` tokens a row, or until so many slots stand still, free ones among them."""
        model, params = self._form
        self._seen = None
        with on_mesh(self.run):
            self._state = advance(
                model, params, self._state, self._settings, np.int32(max_steps), np.int32(until_done),
                vocab_size=num_drawable(self.run),
            )  # fmt: skip

    def new_ids(self, slot: int) -> list[int]:
        """The tokens of a row so far, without the one that ended it."""
        ids = self._drawn_ids(slot)
        return ids[:-1] if ids and ids[-1] in eos_ids(self.run) else ids

    @property
    def done(self) -> list[int]:
        """Slots whose row has come to its end."""
        done_B = self._host_view().done_B
        return [slot for slot, row in enumerate(self.rows) if row is not None and done_B[slot]]

    def release(self, slot: int, cut: int | None = None) -> Decoded:
        """What became of a row, and its slot free again; `cut` ends it after so many tokens."""
        row, ids = self.rows[slot], self.new_ids(slot)
        self.rows[slot] = None
        finish = "length" if len(ids) == len(self._drawn_ids(slot)) else "eos"
        if cut is not None:
            finish, ids = "stop", ids[:cut]
            self._state = self._state._replace(done_B=self._state.done_B.at[slot].set(True))
        return Decoded(ids, finish, *self._noted(slot, row, len(ids)))

    def _drawn_ids(self, slot: int) -> list[int]:
        seen = self._host_view()
        return seen.tokens_BC[slot, seen.prompt_lengths_B[slot] : seen.lengths_B[slot]].tolist()

    def _host_view(self) -> HostView:
        if self._seen is None:
            state = self._state
            arrays = (state.tokens_BC, state.prompt_lengths_B, state.lengths_B, state.done_B, state.chances)
            self._seen = HostView(*jax.device_get(arrays))
        return self._seen

    def _noted(
        self, slot: int, row: Row, count: int
    ) -> tuple[Float[np.ndarray, " T"] | None, list[list[tuple[int, float]]] | None]:
        """Log-probabilities of the first `count` tokens, if the row asks for them."""
        top_n = row.config.log_probs
        if top_n is None:
            return None, None
        seen = self._host_view()
        start = seen.prompt_lengths_B[slot]
        chosen_T, top_TN, ids_TN = (part[slot, start : start + count] for part in seen.chances)
        likeliest = zip(ids_TN[:, :top_n].tolist(), top_TN[:, :top_n].tolist(), strict=True)
        return chosen_T, [list(zip(*pair, strict=True)) for pair in likeliest]

    def _read(self, prompts: list[Sequence[int]], rows: Sequence[Row], take: list[int], size: int) -> State:
        """The state of new rows alone."""
        run, filling = self.run, size - len(rows)
        shared = len(prompts) < len(rows)
        prompt = prompt_of(run, prompts, padded_size(run, len(prompts)) if shared else size)
        read = (*read_prompt(self._form, prompt, self.shape.length), prompt._replace(source=None))
        return first_state(
            *(taken(read, np.array(take + [0] * filling, np.int32)) if shared else read),
            self._batched([row.config for row in rows] + [IDLE] * filling),
            np.array([row.seed for row in rows] + [0] * filling, np.uint32),
            np.arange(size) < len(rows),
            vocab_size=num_drawable(run),
            capacity=self.shape.length,
            top_n=self.shape.top_n,
        )

    def _batched(self, configs: list[SamplingConfig]) -> SamplingParams:
        return batched(configs, vocab_size=num_drawable(self.run), eos_ids=eos_ids(self.run), keep=self._used)

    def _idle_like(self, state: State) -> State:
        """Rows that stand still, in the shape of the whole batch and split as it will be."""

        def zeros(array: Array) -> Array:
            where = None if self.run.mesh is None else array.sharding
            return jnp.zeros((self.shape.rows, *array.shape[1:]), array.dtype, device=where)

        idle = jax.tree.map(zeros, state)
        return _widened(idle._replace(done_B=jnp.ones(self.shape.rows, bool)), self.shape)


IDLE = SamplingConfig(max_new_tokens=0)
"""Of slots without a row."""


def refill_size(num_slots: int) -> int:
    """How many rows are read at a time once a batch is under way; fewer would read often, more leave slots idle."""
    return max(1, num_slots // 4)


def read_prompt(form: tuple[Transformer, Params], prompt: Prompt, capacity: int) -> tuple[Rows, Float[Array, "B V"]]:
    """Caches with the prompts in them, and the logits after each; long prompts go in part by part."""
    model, params = form
    length = prompt.ids.shape[1]
    first = prompt._replace(ids=prompt.ids[:, :PART], lengths=np.minimum(prompt.lengths, PART))
    rows, logits_BV = prefill(model, params, first, capacity=capacity)
    for start in range(PART, length, PART):
        ids_BT = prompt.ids[:, start : start + PART]  # the last part may be shorter: padded, it might exceed the cache
        lengths_B = np.clip(prompt.lengths - start, 0, PART)
        rows, logits_BV = prefill_more(model, params, rows, logits_BV, ids_BT, lengths_B)
    return rows, logits_BV


def _distinct(rows: Sequence[Row]) -> tuple[list[Sequence[int]], list[int]]:
    """The prompts, samples of one prompt sharing it, and for every row which is its own."""
    prompts: list[Sequence[int]] = []
    take = []
    for row in rows:
        if not (row.sample and prompts and prompts[-1] is row.ids):
            prompts.append(row.ids)
        take.append(len(prompts) - 1)
    return prompts, take


def prompt_of(run: Run, ids: list[Sequence[int]], size: int) -> Prompt:
    source = tokens_of(ids, size) if run.config.model.shape == "encoder-decoder" else None
    rows = ids if source is None else [[decoder_start(run)] for _ in ids]
    length = bucket(max(len(row) for row in rows)) if source is None else 1
    lengths = np.array([len(row) for row in rows] + [1] * (size - len(rows)), np.int32)
    return Prompt(padded(rows, size, length), lengths, source)


def _widened(state: State, shape: Shape) -> State:
    """With room for the longest source of the batch."""
    segments_BS = state.rows.source_segments_BS
    if segments_BS is None or segments_BS.shape[1] == shape.source:
        return state
    more = shape.source - segments_BS.shape[1]
    caches = tuple(
        cache._replace(cross=jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, more), (0, 0))), cache.cross))
        for cache in state.rows.caches
    )
    segments_BS = jnp.pad(segments_BS, ((0, 0), (0, more)))
    return state._replace(rows=state.rows._replace(caches=caches, source_segments_BS=segments_BS))


# ---------------------------------------------------------------- few shapes
def bucket(n: int, least: int = 16) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ...: few shapes, few compiled programs."""
    power = max(least, 1 << max(n - 1, 0).bit_length())
    return power * 3 // 4 if power > least and n <= power * 3 // 4 else power


def padded_size(run: Run, n: int) -> int:
    """The next power of two that the devices of the mesh divide."""
    ways = 1 if run.mesh is None else math.prod(run.mesh.shape[axis] for axis in RULES["batch"])
    power = 1 << max(n - 1, 0).bit_length()
    return -(-power // ways) * ways


def tokens_of(rows: Sequence[Sequence[int]], size: int) -> Tokens:
    length = bucket(max(len(row) for row in rows))
    mask_BT = padded([[1] * len(row) for row in rows], size, length)
    return tokens_from_ids(jnp.asarray(padded(rows, size, length)), jnp.asarray(mask_BT))


def padded(rows: Sequence[Sequence[int]], size: int, length: int) -> Int[np.ndarray, "B T"]:
    array = np.zeros((size, length), np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


@contextmanager
def on_mesh(run: Run) -> Iterator[None]:
    """Programs are split over the run's devices."""
    if run.mesh is None:
        yield
    else:
        with jax.set_mesh(run.mesh):
            yield
