"""The running batch: each request occupies a slot, and a finished request frees its slot for the next one.

The arrays are on the devices, in a `DecodeState` of `decode.loop`. This module keeps track of the requests on the host,
and pads requests of any length to few different shapes, because every shape is compiled separately.
"""

import math
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode.cache import row_dim
from jaxformer.decode.loop import (
    DecodeState,
    Prefilled,
    Prompt,
    RequestArrays,
    TokenLogProbs,
    advance,
    insert_rows,
    prefill,
    prefill_chunk,
    select_rows,
    start_decode,
)
from jaxformer.decode.sampling import SamplingConfig, active_settings, batch_settings
from jaxformer.decode.text import decoder_start_id, eos_ids, sampleable_vocab_size
from jaxformer.layers import Transformer
from jaxformer.ops.sampling import SamplingParams
from jaxformer.run import Run
from jaxformer.sharding import RULES
from jaxformer.typing import Array, Bool, Float, Int, Params, Tokens, tokens_from_ids

# Prompt tokens per row and prefill. On a CPU, it limits the memory of attention scores. On accelerators, prompts that
# one prefill covers are attended to by a fused kernel, and the limit on all rows is one for the other activations.
PREFILL_CHUNK = 512
PREFILL_TOKENS = 2**17


@dataclass(frozen=True)
class DecodeRequest:
    """One output to generate; a prompt with several samples makes several requests."""

    ids: Sequence[int]
    """Token ids of the prompt, or of the source of an encoder-decoder."""
    config: SamplingConfig
    sample: int = 0
    """Index of this output among the samples of the same prompt."""
    as_text: bool = False
    """Whether the prompt was a text; the output is then a text too."""

    @property
    def seed(self) -> int:
        """A hash of the seed setting, the prompt and the sample index; the position in the batch has no effect."""
        words = np.asarray([*self.ids, self.sample] if self.sample else self.ids, np.int32)
        return zlib.crc32(words.tobytes(), self.config.seed & 0xFFFFFFFF)


class Completion(NamedTuple):
    """One generated output."""

    output: str | list[int]
    """The new tokens without eos: a text if the prompt was a text, otherwise ids."""
    ids: list[int]
    finish: Literal["eos", "length", "stop"]
    """What ended the output: an eos token, max_new_tokens, or a stop string."""
    log_probs: Float[np.ndarray, " T"] | None = None
    """Log-probability of each token under the model, before any filter; None unless `log_probs` is set."""
    top: list[list[tuple[int, float]]] | None = None
    """For each token, the `log_probs` most likely ids as (id, log-probability), most likely first."""


class SlotShape(NamedTuple):
    """The shape of a batch of slots."""

    num_slots: int
    length: int  # tokens of prompt and output together
    source_length: int  # 0 for a decoder-only model
    top_n: int | None  # how many of the most likely ids are recorded; None records no log-probabilities

    def covers(self, other: "SlotShape") -> bool:
        """Whether requests of the other shape fit into slots of this one."""
        has_top = other.top_n is None or (self.top_n is not None and other.top_n <= self.top_n)
        return self.length >= other.length and self.source_length >= other.source_length and has_top


def make_shape(run: Run, requests: Sequence[DecodeRequest], num_slots: int) -> SlotShape:
    """The smallest shape for these requests."""
    longest = max(len(request.ids) for request in requests)
    top_ns = [request.config.log_probs for request in requests if request.config.log_probs is not None]
    top_n = min(max(top_ns), sampleable_vocab_size(run)) if top_ns else None
    size = pad_batch_size(run, num_slots)
    if run.config.model.shape == "encoder-decoder":
        num_new = max(request.config.max_new_tokens for request in requests)
        return SlotShape(size, bucket_length(1 + num_new), bucket_length(longest), top_n)
    length = max(len(request.ids) + request.config.max_new_tokens for request in requests)
    return SlotShape(size, bucket_length(length), 0, top_n)


class _HostCopy(NamedTuple):
    """The small arrays of a `DecodeState`, fetched in one transfer."""

    tokens_BC: Int[np.ndarray, "B C"]
    prompt_lengths_B: Int[np.ndarray, " B"]
    lengths_B: Int[np.ndarray, " B"]
    done_B: Bool[np.ndarray, " B"]
    log_probs: TokenLogProbs | None


class Slots:
    """A batch of fixed shape, and which request is in which slot."""

    def __init__(self, run: Run, shape: SlotShape) -> None:
        self.run, self.shape = run, shape
        self.requests: list[DecodeRequest | None] = [None] * shape.num_slots
        self._state: DecodeState | None = None
        self._host_copy: _HostCopy | None = None
        self._settings: SamplingParams | None = None
        self._active_settings: frozenset[str] = frozenset()

    @property
    def free(self) -> list[int]:
        return [slot for slot, request in enumerate(self.requests) if request is None]

    @property
    def done(self) -> list[int]:
        """Slots whose request has ended."""
        done_B = self._fetch().done_B
        return [slot for slot, request in enumerate(self.requests) if request is not None and done_B[slot]]

    def reserve_settings(self, requests: Sequence[DecodeRequest]) -> None:
        """Compile for the settings of these requests as well, so that adding them later compiles nothing."""
        self._active_settings |= frozenset().union(*(active_settings(request.config) for request in requests))

    def add(self, requests: Sequence[DecodeRequest]) -> None:
        """Prefill new requests, sample the first token of each, and insert them into free slots."""
        slots, num_slots = self.free[: len(requests)], self.shape.num_slots
        for slot, request in zip(slots, requests, strict=True):
            self.requests[slot] = request
        self.reserve_settings(requests)
        self._settings = self._batch_settings([request.config if request else IDLE for request in self.requests])
        # Only two prefill sizes, so that few programs are compiled: the whole batch, or one refill.
        size = num_slots if len(requests) > refill_size(num_slots) else refill_size(num_slots)
        size = pad_batch_size(self.run, size)
        self._host_copy = None
        with use_mesh(self.run):
            new = self._prefill(requests, size)
            if self._state is None and size == num_slots:
                self._state = _pad_source(new, self.shape.source_length)
                return
            if self._state is None:
                self._state = self._make_idle(new)
            # Padding rows get an index beyond the last slot, so that `insert_rows` drops them.
            rows = np.array(slots + [num_slots] * (size - len(requests)), np.int32)
            self._state = insert_rows(self._state, new, rows)

    def advance(self, max_steps: int, until_done: int) -> None:
        """Generate up to `max_steps` tokens per slot, or until `until_done` slots are done, free ones included."""
        model, params = self._model_and_params
        self._host_copy = None
        with use_mesh(self.run):
            self._state = advance(
                model, params, self._state, self._settings, np.int32(max_steps), np.int32(until_done),
                vocab_size=sampleable_vocab_size(self.run),
            )  # fmt: skip

    def new_ids(self, slot: int) -> list[int]:
        """The new tokens of a request so far, without eos."""
        ids = self._ids_with_eos(slot)
        return ids[:-1] if ids and ids[-1] in eos_ids(self.run) else ids

    def release(self, slot: int, stop_after: int | None = None) -> Completion:
        """Free the slot and return its result; `stop_after` truncates it to that many tokens."""
        request, ids = self.requests[slot], self.new_ids(slot)
        self.requests[slot] = None
        finish = "length" if len(ids) == len(self._ids_with_eos(slot)) else "eos"
        if stop_after is not None:
            finish, ids = "stop", ids[:stop_after]
            # The compiled loop does not know about stop strings and would continue this row.
            self._state = self._state._replace(done_B=self._state.done_B.at[slot].set(True))
        return Completion(ids, ids, finish, *self._log_probs(slot, request.config.log_probs, len(ids)))

    # ------------------------------------------------------------ host side
    def _fetch(self) -> _HostCopy:
        if self._host_copy is None:
            state = self._state
            arrays = (state.tokens_BC, state.prompt_lengths_B, state.lengths_B, state.done_B, state.log_probs)
            self._host_copy = _HostCopy(*jax.device_get(arrays))
        return self._host_copy

    def _ids_with_eos(self, slot: int) -> list[int]:
        host = self._fetch()
        return host.tokens_BC[slot, host.prompt_lengths_B[slot] : host.lengths_B[slot]].tolist()

    def _log_probs(
        self, slot: int, top_n: int | None, count: int
    ) -> tuple[Float[np.ndarray, " T"] | None, list[list[tuple[int, float]]] | None]:
        """Log-probabilities of the first `count` new tokens, and the `top_n` most likely ids of each."""
        if top_n is None:
            return None, None
        host = self._fetch()
        start = host.prompt_lengths_B[slot]
        chosen_T, top_TN, ids_TN = (part[slot, start : start + count] for part in host.log_probs)
        pairs = zip(ids_TN[:, :top_n].tolist(), top_TN[:, :top_n].tolist(), strict=True)
        return chosen_T, [list(zip(*pair, strict=True)) for pair in pairs]

    # ------------------------------------------------------------ device side
    @property
    def _model_and_params(self) -> tuple[Transformer, Params]:
        return self.run.decoding_alone if self.shape.num_slots == 1 else self.run.decoding

    def _prefill(self, requests: Sequence[DecodeRequest], size: int) -> DecodeState:
        """The decode state of only the new requests, padded to `size` rows."""
        run, num_padding = self.run, size - len(requests)
        prompts, prompt_index = _unique_prompts(requests)
        shares_prompts = len(prompts) < len(requests)
        prompt = make_prompt(run, prompts, pad_batch_size(run, len(prompts)) if shares_prompts else size)
        prefilled = prefill_in_chunks(*self._model_and_params, prompt, self.shape.length)
        if shares_prompts:
            prefilled = select_rows(prefilled, np.array(prompt_index + [0] * num_padding, np.int32))
        arrays = RequestArrays(
            self._batch_settings([request.config for request in requests] + [IDLE] * num_padding),
            np.array([request.seed for request in requests] + [0] * num_padding, np.uint32),
            np.arange(size) < len(requests),
        )
        return start_decode(
            *prefilled,
            arrays,
            vocab_size=sampleable_vocab_size(run),
            capacity=self.shape.length,
            top_n=self.shape.top_n,
        )

    def _batch_settings(self, configs: list[SamplingConfig]) -> SamplingParams:
        return batch_settings(
            configs, vocab_size=sampleable_vocab_size(self.run), eos_ids=eos_ids(self.run), keep=self._active_settings
        )

    def _make_idle(self, new: DecodeState) -> DecodeState:
        """A full batch of idle slots, with the shapes and shardings of `new`."""

        def zeros(array: Array) -> Array:
            # Arrays without a sharding would be on one device and have to be moved at the first insertion.
            sharding = None if self.run.mesh is None else array.sharding
            shape = list(array.shape)
            shape[row_dim(array.ndim)] = self.shape.num_slots
            return jnp.zeros(shape, array.dtype, device=sharding)

        idle = jax.tree.map(zeros, new)
        return _pad_source(idle._replace(done_B=jnp.ones(self.shape.num_slots, bool)), self.shape.source_length)


IDLE = SamplingConfig(max_new_tokens=0)
"""The settings of a slot without a request."""


def refill_size(num_slots: int) -> int:
    """How many slots are refilled at a time: fewer would prefill too often, more would leave slots idle too long."""
    return max(1, num_slots // 4)


def _pad_source(state: DecodeState, length: int) -> DecodeState:
    """Pad the cross-attention keys and values to the source length of the batch."""
    model_state = state.model_state
    segments_BS = model_state.source_segments_BS
    if segments_BS is None or segments_BS.shape[1] == length:
        return state
    padding = length - segments_BS.shape[1]
    caches = tuple(
        cache._replace(cross=jax.tree.map(partial(_pad_positions, padding=padding), cache.cross))
        for cache in model_state.caches
    )
    # Segment 0 is padding: cross-attention does not see the new positions.
    segments_BS = jnp.pad(segments_BS, ((0, 0), (0, padding)))
    return state._replace(model_state=model_state._replace(caches=caches, source_segments_BS=segments_BS))


def _pad_positions(array: Float[Array, "*L B K S H"], padding: int) -> Float[Array, "*L B K S2 H"]:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, padding), (0, 0)])


# ---------------------------------------------------------------- prompts
def prefill_in_chunks(model: Transformer, params: Params, prompt: Prompt, capacity: int) -> Prefilled:
    """Prefill prompts of any length, a limited number of tokens at a time."""
    rows, length = prompt.ids.shape
    chunk = prefill_length(model, rows, length)
    first = prompt._replace(ids=prompt.ids[:, :chunk], lengths=np.minimum(prompt.lengths, chunk))
    state, logits_BV = prefill(model, params, first, capacity=capacity)
    for start in range(chunk, length, chunk):
        # The last chunk may be shorter. Padding it to a full one could exceed the capacity of the cache:
        # `dynamic_update_slice` would then shift the write back and overwrite earlier tokens.
        ids_BT = prompt.ids[:, start : start + chunk]
        lengths_B = np.clip(prompt.lengths - start, 0, chunk)
        state, logits_BV = prefill_chunk(model, params, state, logits_BV, ids_BT, lengths_B)
    return Prefilled(state, logits_BV, prompt._replace(source=None))


def prefill_length(model: Transformer, num_rows: int, length: int) -> int:
    """How many tokens of each prompt are prefilled at a time, given the length of the longest prompt."""
    # The first token of a bidirectional prompt attends to the last one, so both must be in the same chunk.
    if model.config.prefix:
        return length
    limit = PREFILL_CHUNK
    if model.runtime.platform != "cpu":
        limit = max(limit, PREFILL_TOKENS // num_rows)
    return min(length, limit)


def _unique_prompts(requests: Sequence[DecodeRequest]) -> tuple[list[Sequence[int]], list[int]]:
    """The prompts, with consecutive samples of one prompt merged, and the prompt index of each request."""
    prompts: list[Sequence[int]] = []
    prompt_index = []
    for request in requests:
        # Samples of one prompt share the same list object, so there is no need to compare ids.
        if not (request.sample and prompts and prompts[-1] is request.ids):
            prompts.append(request.ids)
        prompt_index.append(len(prompts) - 1)
    return prompts, prompt_index


def make_prompt(run: Run, ids: list[Sequence[int]], batch_size: int) -> Prompt:
    """Padded prompts; for an encoder-decoder `ids` are the sources, and the prompt is the decoder start token."""
    source = make_tokens(ids, batch_size) if run.config.model.shape == "encoder-decoder" else None
    rows = ids if source is None else [[decoder_start_id(run)] for _ in ids]
    length = bucket_length(max(len(row) for row in rows)) if source is None else 1
    lengths = np.array([len(row) for row in rows] + [1] * (batch_size - len(rows)), np.int32)
    return Prompt(pad_rows(rows, batch_size, length), lengths, source)


def make_tokens(rows: Sequence[Sequence[int]], batch_size: int) -> Tokens:
    length = bucket_length(max(len(row) for row in rows))
    mask_BT = pad_rows([[1] * len(row) for row in rows], batch_size, length)
    return tokens_from_ids(jnp.asarray(pad_rows(rows, batch_size, length)), jnp.asarray(mask_BT))


def pad_rows(rows: Sequence[Sequence[int]], batch_size: int, length: int) -> Int[np.ndarray, "B T"]:
    array = np.zeros((batch_size, length), np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


# ---------------------------------------------------------------- padding to few shapes
def bucket_length(n: int, least: int = 16) -> int:
    """Round up to one of 16, 24, 32, 48, 64, 96, ...: beyond 16, at most a third of a row is padding."""
    power = max(least, 1 << max(n - 1, 0).bit_length())
    return power * 3 // 4 if power > least and n <= power * 3 // 4 else power


def pad_batch_size(run: Run, n: int) -> int:
    """Round up to a power of two, and to a multiple of the number of shards of the batch dimension."""
    num_ways = 1 if run.mesh is None else math.prod(run.mesh.shape[axis] for axis in RULES["batch"])
    power = 1 << max(n - 1, 0).bit_length()
    return -(-power // num_ways) * num_ways


def use_mesh(run: Run) -> AbstractContextManager:
    """A context in which programs run on the mesh of the run, if it has one."""
    return nullcontext() if run.mesh is None else jax.set_mesh(run.mesh)
