"""The decode loop: `prefill` reads the prompts once, then a `while_loop` takes one token step at a time.

Everything that grows is preallocated. `State` is all there is between tokens, a pytree whose every array leads with the
row: a row may be put into any place of a running batch (`inserted`), and what it draws depends on its own tokens, its
own settings and its own seed alone, never on its neighbours or its place.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp

from jaxformer.decode.cache import make_caches
from jaxformer.decode.program import Options, program
from jaxformer.layers import Transformer
from jaxformer.layers.block import LayerCache
from jaxformer.ops.cpu import token_loop_options
from jaxformer.ops.sampling import History, SamplingParams, TokenLogProbs, sample_next, token_log_probs
from jaxformer.ops.weights import is_quantized
from jaxformer.typing import Array, Bool, Float, Int, Params, PyTree, Tokens


class Prompt(NamedTuple):
    """Right-padded rows."""

    ids: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    source: Tokens | None = None  # what the encoder reads


class Rows(NamedTuple):
    """What the model carries from token to token."""

    caches: tuple[LayerCache, ...]
    lengths_B: Int[Array, " B"]  # tokens in the cache
    source_segments_BS: Int[Array, "B S"] | None


class Chances(NamedTuple):
    """Log-probabilities the model gave, by index of the token; of what it likes best, N each."""

    chosen_BC: Float[Array, "B C"]
    top_BCN: Float[Array, "B C N"]
    top_ids_BCN: Int[Array, "B C N"]


class State(NamedTuple):
    rows: Rows
    tokens_BC: Int[Array, "B C"]  # prompt, then what was drawn; of an encoder-decoder, the decoder's
    prompt_lengths_B: Int[Array, " B"]
    lengths_B: Int[Array, " B"]  # of `tokens_BC`; the last one is not in the cache yet
    done_B: Bool[Array, " B"]
    seeds_B: Int[Array, " B"]
    chances: Chances | None  # none if nobody asks


# ---------------------------------------------------------------- the model
@program(static=("model", "capacity"))
def prefill(model: Transformer, params: Params, prompt: Prompt, *, capacity: int) -> tuple[Rows, Float[Array, "B V"]]:
    """Caches of `capacity` tokens with the prompts in them, and the logits after each row's last token."""
    cross = segments_BS = None
    if prompt.source is not None:
        source_BSD = model.apply({"params": params}, prompt.source, method="encode")
        cross = model.apply({"params": params}, source_BSD, method="cross_keys_values")
        segments_BS = prompt.source.segments
    caches = make_caches(model.config, prompt.ids.shape[0], capacity, model.runtime, cross)
    rows = Rows(caches, jnp.zeros_like(prompt.lengths), segments_BS)
    return _read(model, params, rows, prompt.ids, prompt.lengths)


@program(static=("model",), donate=("rows",))
def prefill_more(
    model: Transformer,
    params: Params,
    rows: Rows,
    logits_BV: Float[Array, "B V"],
    ids_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
) -> tuple[Rows, Float[Array, "B V"]]:
    """The next tokens of prompts that are read in parts; a row that has no more, of length 0 here, stays as it is."""
    rows, new_BV = _read(model, params, rows, ids_BT, lengths_B)
    return rows, jnp.where(lengths_B[:, None] > 0, new_BV, logits_BV)


def _read(
    model: Transformer, params: Params, rows: Rows, ids_BT: Int[Array, "B T"], lengths_B: Int[Array, " B"]
) -> tuple[Rows, Float[Array, "B V"]]:
    """Append right-padded tokens to each row; the logits after the last real one."""
    index_T = jnp.arange(ids_BT.shape[1])
    real_BT = (index_T < lengths_B[:, None]).astype(jnp.int32)
    tokens = Tokens(ids_BT, rows.lengths_B[:, None] + index_T, real_BT)
    hidden_BTD, caches = model.apply(
        {"params": params}, tokens, rows.lengths_B, rows.caches, rows.source_segments_BS, method="extend"
    )
    last_B1D = jnp.take_along_axis(hidden_BTD, jnp.maximum(lengths_B - 1, 0)[:, None, None], axis=1)
    logits_BV = model.apply({"params": params}, last_B1D, method="logits")[:, 0]
    return rows._replace(caches=caches, lengths_B=rows.lengths_B + lengths_B), logits_BV


def token_step(
    model: Transformer, params: Params, rows: Rows, token_B: Int[Array, " B"]
) -> tuple[Rows, Float[Array, "B V"]]:
    """Append one token to each row; the step that every way of decoding shares."""
    return _read(model, params, rows, token_B[:, None], jnp.ones_like(token_B))


# ---------------------------------------------------------------- the rows of a batch
@program()
def taken(read: PyTree, rows_B: Int[Array, " B"]) -> PyTree:
    """After a prefill, rows that start from these of it: several samples share a prompt."""
    return jax.tree.map(lambda array: jnp.asarray(array)[rows_B], read)


@program(static=("vocab_size", "capacity", "top_n"), donate=("rows",))
def first_state(
    rows: Rows,
    logits_BV: Float[Array, "B V"],
    prompt: Prompt,
    settings: SamplingParams,
    seeds_B: Int[Array, " B"],
    active_B: Bool[Array, " B"],
    *,
    vocab_size: int,
    capacity: int,
    top_n: int | None,
) -> State:
    """After a prefill, with the first token drawn.

    Args:
      active_B: false for rows that only fill up the batch.
      top_n: how many of the likeliest tokens to note with every token; none notes nothing.
    """
    num_rows, chances = active_B.shape[0], None
    if top_n is not None:
        shape = (num_rows, capacity, top_n)
        chances = Chances(jnp.zeros(shape[:2]), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))
    lengths_B = jnp.asarray(prompt.lengths)
    state = State(
        rows=rows,
        tokens_BC=jnp.pad(prompt.ids, ((0, 0), (0, capacity - prompt.ids.shape[1]))),
        prompt_lengths_B=lengths_B,
        lengths_B=lengths_B,
        done_B=~active_B | (settings.max_new_tokens == 0),
        seeds_B=seeds_B,
        chances=chances,
    )
    return drawn(state, logits_BV, settings, vocab_size)


@program(donate=("state",))
def inserted(state: State, new: State, slots_N: Int[Array, " N"]) -> State:
    """`state` with the rows of `new` in these places; a place beyond the last drops its row."""

    def put(old: Array, rows: Array) -> Array:
        # Sources may be longer here than in the batch that was read.
        room = [(0, 0), *((0, a - b) for a, b in zip(old.shape[1:], rows.shape[1:], strict=True))]
        return old.at[slots_N].set(jnp.pad(rows, room), mode="drop")

    return jax.tree.map(put, state, new)


def _advance_options(model: Transformer, params: Params, state: State, *args: object, **kwargs: object) -> Options:
    return token_loop_options(model.runtime.platform, state.done_B.shape[0], is_quantized(params))


@program(static=("model", "vocab_size"), donate=("state",), options=_advance_options)
def advance(
    model: Transformer,
    params: Params,
    state: State,
    settings: SamplingParams,
    max_steps: Int[Array, ""],
    until_done: Int[Array, ""],
    *,
    vocab_size: int,
) -> State:
    """At most `max_steps` tokens more for every row that goes on, or until `until_done` rows are done."""

    def unfinished(carry: tuple[State, Array]) -> Bool[Array, ""]:
        state, count = carry
        return (count < max_steps) & (state.done_B.sum() < until_done)

    def one_token(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, count = _unpacked(carry[0]), carry[1]
        last_B1 = jnp.take_along_axis(state.tokens_BC, state.lengths_B[:, None] - 1, axis=1)
        rows, logits_BV = token_step(model, params, state.rows, last_B1[:, 0])
        # A row that is done stands still: what it writes to its cache is beyond its length.
        rows = rows._replace(lengths_B=jnp.where(state.done_B, state.rows.lengths_B, rows.lengths_B))
        return _packed(drawn(state._replace(rows=rows), logits_BV, settings, vocab_size)), count + 1

    start = (_packed(state), jnp.zeros((), jnp.int32))
    return _unpacked(jax.lax.while_loop(unfinished, one_token, start)[0])


def _packed(state: State) -> State:
    """As the loop carries it: a single row's caches without their batch dimension.

    XLA drops that dimension from products, and would copy a cache that is carried with it once a token.
    """
    return _with_caches(state, lambda array: array[0]) if len(state.done_B) == 1 else state


def _unpacked(state: State) -> State:
    return _with_caches(state, lambda array: array[None]) if len(state.done_B) == 1 else state


def _with_caches(state: State, change: Callable[[Array], Array]) -> State:
    caches = jax.tree.map(change, state.rows.caches)
    return state._replace(rows=state.rows._replace(caches=caches))


def drawn(state: State, logits_BV: Float[Array, "B V"], settings: SamplingParams, vocab_size: int) -> State:
    """One more token for every row that goes on.

    Ids from `vocab_size` on are never drawn: a model may have more rows in its table than its tokenizer has pieces.
    """
    num_new_B = state.lengths_B - state.prompt_lengths_B
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.key(seed), n))(state.seeds_B, num_new_B)
    history = History(state.tokens_BC, state.prompt_lengths_B, state.lengths_B)
    token_B = sample_next(logits_BV[:, :vocab_size], keys, settings, history)
    rows_B = jnp.arange(token_B.shape[0])
    # Beyond the capacity nothing is written.
    place_B = jnp.where(state.done_B, state.tokens_BC.shape[1], state.lengths_B)
    state = state._replace(tokens_BC=state.tokens_BC.at[rows_B, place_B].set(token_B, mode="drop"))
    if state.chances is not None:
        found = _model_log_probs(logits_BV, token_B, state.chances.top_BCN.shape[2], vocab_size)
        noted = [old.at[rows_B, place_B].set(new, mode="drop") for old, new in zip(state.chances, found, strict=True)]
        state = state._replace(chances=Chances(*noted))
    ends_B = (token_B[:, None] == settings.eos).any(axis=1) | (num_new_B + 1 >= settings.max_new_tokens)
    return state._replace(
        lengths_B=jnp.where(state.done_B, state.lengths_B, state.lengths_B + 1), done_B=state.done_B | ends_B
    )


def _model_log_probs(
    logits_BV: Float[Array, "B V"], token_B: Int[Array, " B"], top_n: int, vocab_size: int
) -> TokenLogProbs:
    """Of tokens that may be drawn, yet as likely as the model finds them among all it has rows for."""
    drawable_BV = logits_BV[:, :vocab_size].astype(jnp.float32)
    found = token_log_probs(drawable_BV, token_B, top_n)
    share_B = logsumexp(drawable_BV, axis=-1) - logsumexp(logits_BV.astype(jnp.float32), axis=-1)
    return TokenLogProbs(found.chosen + share_B, found.top + share_B[:, None], found.top_ids)
