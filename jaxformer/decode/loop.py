"""The compiled programs of generation: prefill, the one-token step, and the `while_loop` around it.

All arrays are preallocated, and every array of a `DecodeState` has a dimension for the rows (`cache.row_dim`). A row
can therefore be inserted at any index of a running batch. Its tokens depend on its own prompt, settings and seed only,
never on its neighbours or on its index.

`decode.slots` keeps track of which request is in which row.
"""

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp

from jaxformer.decode.cache import make_caches, row_dim, row_index
from jaxformer.layers import Transformer
from jaxformer.layers.block import LayerCache
from jaxformer.ops.cpu import token_loop_options
from jaxformer.ops.sampling import History, NextTokenLogProbs, SamplingParams, sample_next, token_log_probs
from jaxformer.ops.weights import is_quantized
from jaxformer.typing import Array, Bool, Float, Int, Params, PyTree, Tokens


class Prompt(NamedTuple):
    """Right-padded prompts."""

    ids: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    source: Tokens | None = None  # input of the encoder, for an encoder-decoder


class ModelState(NamedTuple):
    """What the model carries from token to token."""

    caches: tuple[LayerCache, ...]
    lengths_B: Int[Array, " B"]  # tokens in the cache
    source_segments_BS: Int[Array, "B S"] | None


class Prefilled(NamedTuple):
    """Prompts after prefill."""

    model_state: ModelState
    logits_BV: Float[Array, "B V"]  # of the token after each prompt
    prompt: Prompt


class RequestArrays(NamedTuple):
    """The requests of a batch as arrays."""

    settings: SamplingParams
    seeds_B: Int[Array, " B"]
    active_B: Bool[Array, " B"]  # false for rows that only pad the batch


class TokenLogProbs(NamedTuple):
    """Log-probabilities, before any filter, of each chosen token and of the N most likely ids at its position."""

    chosen_BC: Float[Array, "B C"]
    top_BCN: Float[Array, "B C N"]
    top_ids_BCN: Int[Array, "B C N"]


class DecodeState(NamedTuple):
    """Everything the loop carries from token to token; C is the capacity for prompt and output together."""

    model_state: ModelState
    tokens_BC: Int[Array, "B C"]  # the prompt, then the new tokens; those of the decoder in an encoder-decoder
    prompt_lengths_B: Int[Array, " B"]
    lengths_B: Int[Array, " B"]  # number of tokens in `tokens_BC`; the last one is not in the cache yet
    done_B: Bool[Array, " B"]
    seeds_B: Int[Array, " B"]
    log_probs: TokenLogProbs | None  # None if no request needs them


# ---------------------------------------------------------------- the model
def prefill_prompt(
    model: Transformer, params: Params, prompt: Prompt, *, capacity: int
) -> tuple[ModelState, Float[Array, "B V"]]:
    """Run the prompts through the model; returns caches for `capacity` tokens and the logits after each prompt.

    A prefix language model reads the prompts bidirectionally, so they must be complete.
    """
    cross = segments_BS = None
    if prompt.source is not None:
        source_BSD = model.apply({"params": params}, prompt.source, method="encode")
        # The source does not change, so its keys and values are projected here and not at every token.
        cross = model.apply({"params": params}, source_BSD, method="cross_keys_values")
        segments_BS = prompt.source.segments
    caches = make_caches(model.config, prompt.ids.shape[0], capacity, model.runtime, cross)
    state = ModelState(caches, jnp.zeros_like(prompt.lengths), segments_BS)
    return append_tokens(model, params, state, prompt.ids, prompt.lengths, is_start=True)


prefill = jax.jit(prefill_prompt, static_argnames=("model", "capacity"))


@partial(jax.jit, static_argnames="model", donate_argnames="state")
def prefill_chunk(
    model: Transformer,
    params: Params,
    state: ModelState,
    logits_BV: Float[Array, "B V"],
    ids_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
) -> tuple[ModelState, Float[Array, "B V"]]:
    """Prefill the next chunk of long prompts; rows of length 0 have ended in an earlier chunk and do not change."""
    state, new_BV = append_tokens(model, params, state, ids_BT, lengths_B)
    return state, jnp.where(lengths_B[:, None] > 0, new_BV, logits_BV)


def token_step(
    model: Transformer, params: Params, state: ModelState, token_B: Int[Array, " B"]
) -> tuple[ModelState, Float[Array, "B V"]]:
    """Append one token to each row; returns the next logits. Sampling and beam search share this step."""
    return append_tokens(model, params, state, token_B[:, None], jnp.ones_like(token_B))


def append_tokens(
    model: Transformer,
    params: Params,
    state: ModelState,
    ids_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    is_start: bool = False,
) -> tuple[ModelState, Float[Array, "B V"]]:
    """Append right-padded tokens to each row; returns the logits after the last real token of each.

    Args:
      is_start: the caches are empty. In a prefix language model, all tokens of a prompt attend to each other.
    """
    index_T = jnp.arange(ids_BT.shape[1])
    real_BT = index_T < lengths_B[:, None]
    positions_BT = state.lengths_B[:, None] + index_T
    prefix_BT = real_BT if is_start and model.config.prefix else None
    tokens = Tokens(ids_BT, positions_BT, real_BT.astype(jnp.int32), prefix=prefix_BT)
    start_B = None if is_start else state.lengths_B
    hidden_BTD, caches = model.apply(
        {"params": params}, tokens, start_B, state.caches, state.source_segments_BS, method="extend"
    )
    # The head runs on one position per row: logits of a whole prompt would be [B, T, V].
    last_B1D = jnp.take_along_axis(hidden_BTD, jnp.maximum(lengths_B - 1, 0)[:, None, None], axis=1)
    logits_BV = model.apply({"params": params}, last_B1D, method="logits")[:, 0]
    return state._replace(caches=caches, lengths_B=state.lengths_B + lengths_B), logits_BV


# ---------------------------------------------------------------- rows of a batch
@jax.jit
def select_rows(prefilled: PyTree, rows_B: Int[Array, " B"]) -> PyTree:
    """Row i of the result is row `rows_B[i]`; several samples of one prompt share its prefill this way."""
    return jax.tree.map(lambda array: jnp.asarray(array)[row_index(array.ndim, rows_B)], prefilled)


@partial(jax.jit, static_argnames=("vocab_size", "capacity", "top_n"), donate_argnames="model_state")
def start_decode(
    model_state: ModelState,
    logits_BV: Float[Array, "B V"],
    prompt: Prompt,
    requests: RequestArrays,
    *,
    vocab_size: int,
    capacity: int,
    top_n: int | None,
) -> DecodeState:
    """The state after a prefill, with the first token of every row sampled.

    Args:
      top_n: how many of the most likely ids to record with each token; None records no log-probabilities at all.
    """
    num_rows, token_log_probs = requests.active_B.shape[0], None
    if top_n is not None:
        shape = (num_rows, capacity, top_n)
        token_log_probs = TokenLogProbs(jnp.zeros(shape[:2]), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))
    lengths_B = jnp.asarray(prompt.lengths)
    state = DecodeState(
        model_state=model_state,
        tokens_BC=jnp.pad(prompt.ids, ((0, 0), (0, capacity - prompt.ids.shape[1]))),
        prompt_lengths_B=lengths_B,
        lengths_B=lengths_B,
        done_B=~requests.active_B | (requests.settings.max_new_tokens == 0),
        seeds_B=requests.seeds_B,
        log_probs=token_log_probs,
    )
    return sample_tokens(state, logits_BV, requests.settings, vocab_size)


@partial(jax.jit, donate_argnames="state")
def insert_rows(state: DecodeState, new: DecodeState, rows_N: Int[Array, " N"]) -> DecodeState:
    """Write row i of `new` to row `rows_N[i]` of `state`; a row with an index beyond the last one is dropped."""

    def insert(old: Array, rows: Array) -> Array:
        row = row_dim(old.ndim)
        # The new rows were prefilled by themselves, so their longest source may be shorter than that of the batch.
        padding = [(0, 0 if i == row else a - b) for i, (a, b) in enumerate(zip(old.shape, rows.shape, strict=True))]
        return old.at[row_index(old.ndim, rows_N)].set(jnp.pad(rows, padding), mode="drop")

    return jax.tree.map(insert, state, new)


# ---------------------------------------------------------------- the loop over tokens
def jit_token_loop(
    num_rows: Callable[..., int], static: tuple[str, ...], donate: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """`jax.jit` for a loop over single tokens, with compiler options for its platform and its number of rows.

    Args:
      num_rows: computes the number of rows from the arguments that follow `model` and `params`.
    """

    def decorate(function: Callable) -> Callable:
        @cache
        def jit_with(options: frozenset[tuple[str, str]]) -> Any:
            return jax.jit(
                function, static_argnames=static, donate_argnames=donate, compiler_options=dict(options) or None
            )

        def jit_for(model: Transformer, params: Params, *args: Any, **kwargs: Any) -> Any:
            rows = num_rows(*args, **kwargs)
            return jit_with(token_loop_options(model.runtime.platform, rows, is_quantized(params)))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return jit_for(*args, **kwargs)(*args, **kwargs)

        call.lower = lambda *args, **kwargs: jit_for(*args, **kwargs).lower(*args, **kwargs)
        return call

    return decorate


@jit_token_loop(lambda state, *args, **kwargs: state.done_B.shape[0], static=("model", "vocab_size"), donate=("state",))
def advance(
    model: Transformer,
    params: Params,
    state: DecodeState,
    settings: SamplingParams,
    max_steps: Int[Array, ""],
    until_done: Int[Array, ""],
    *,
    vocab_size: int,
) -> DecodeState:
    """Generate up to `max_steps` tokens per row, or until `until_done` rows are done."""

    def is_unfinished(carry: tuple[DecodeState, Array]) -> Bool[Array, ""]:
        state, count = carry
        return (count < max_steps) & (state.done_B.sum() < until_done)

    def one_token(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, count = _unsqueeze_single_row(carry[0]), carry[1]
        last_B1 = jnp.take_along_axis(state.tokens_BC, state.lengths_B[:, None] - 1, axis=1)
        model_state, logits_BV = token_step(model, params, state.model_state, last_B1[:, 0])
        # Finished rows go through the model with the others, but their length does not change: what they write to the
        # cache lies beyond it, where attention never reads.
        lengths_B = jnp.where(state.done_B, state.model_state.lengths_B, model_state.lengths_B)
        state = state._replace(model_state=model_state._replace(lengths_B=lengths_B))
        return _squeeze_single_row(sample_tokens(state, logits_BV, settings, vocab_size)), count + 1

    start = (_squeeze_single_row(state), jnp.zeros((), jnp.int32))
    return _unsqueeze_single_row(jax.lax.while_loop(is_unfinished, one_token, start)[0])


def _squeeze_single_row(state: DecodeState) -> DecodeState:
    """Drop the batch dimension of the caches if there is only one row.

    XLA removes a batch dimension of size 1 from matmuls. A cache that the loop carries with this dimension would be
    copied at every token.
    """
    if len(state.done_B) > 1:
        return state
    return _map_caches(state, lambda array: jnp.squeeze(array, row_dim(array.ndim)))


def _unsqueeze_single_row(state: DecodeState) -> DecodeState:
    if len(state.done_B) > 1:
        return state
    return _map_caches(state, lambda array: jnp.expand_dims(array, row_dim(array.ndim + 1)))


def _map_caches(state: DecodeState, change: Callable[[Array], Array]) -> DecodeState:
    caches = jax.tree.map(change, state.model_state.caches)
    return state._replace(model_state=state.model_state._replace(caches=caches))


def sample_tokens(
    state: DecodeState, logits_BV: Float[Array, "B V"], settings: SamplingParams, vocab_size: int
) -> DecodeState:
    """Sample one token for every row that is not done, and append it.

    Ids from `vocab_size` on are never sampled: the embedding of a model may have more rows than its tokenizer has ids.
    """
    num_new_B = state.lengths_B - state.prompt_lengths_B
    # The key depends only on the row's seed and token count: neither batch nor slot changes what a request samples.
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.key(seed), n))(state.seeds_B, num_new_B)
    history = History(state.tokens_BC, state.prompt_lengths_B, state.lengths_B)
    token_B = sample_next(logits_BV[:, :vocab_size], keys, settings, history)
    rows_B = jnp.arange(token_B.shape[0])
    # Finished rows write at an index beyond the capacity, which `mode="drop"` ignores.
    index_B = jnp.where(state.done_B, state.tokens_BC.shape[1], state.lengths_B)
    state = state._replace(tokens_BC=state.tokens_BC.at[rows_B, index_B].set(token_B, mode="drop"))
    if state.log_probs is not None:
        new = _token_log_probs(logits_BV, token_B, state.log_probs.top_BCN.shape[2], vocab_size)
        updated = [
            old.at[rows_B, index_B].set(value, mode="drop") for old, value in zip(state.log_probs, new, strict=True)
        ]
        state = state._replace(log_probs=TokenLogProbs(*updated))
    ends_B = (token_B[:, None] == settings.eos).any(axis=1) | (num_new_B + 1 >= settings.max_new_tokens)
    return state._replace(
        lengths_B=jnp.where(state.done_B, state.lengths_B, state.lengths_B + 1), done_B=state.done_B | ends_B
    )


def _token_log_probs(
    logits_BV: Float[Array, "B V"], token_B: Int[Array, " B"], top_n: int, vocab_size: int
) -> NextTokenLogProbs:
    """Log-probabilities of sampleable ids, normalised over the full vocabulary as `score` does."""
    sampleable_BV = logits_BV[:, :vocab_size].astype(jnp.float32)
    among_sampleable = token_log_probs(sampleable_BV, token_B, top_n)
    share_B = logsumexp(sampleable_BV, axis=-1) - logsumexp(logits_BV.astype(jnp.float32), axis=-1)
    return NextTokenLogProbs(
        among_sampleable.chosen + share_B, among_sampleable.top + share_B[:, None], among_sampleable.top_ids
    )
