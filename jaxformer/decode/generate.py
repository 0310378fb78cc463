"""The decode loop: `prefill` reads the prompts once, then a `while_loop` takes one token step at a time.

Everything that grows is preallocated; the loop's carry is the cache, the tokens so far and the rows' state.
What a row draws depends on its own seed and its own index alone, never on its neighbours.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.decode.cache import make_caches
from jaxformer.layers import Transformer
from jaxformer.layers.block import LayerCache
from jaxformer.ops.sampling import sample
from jaxformer.typing import Array, Bool, Float, Int, Params, Tokens, tokens_from_ids


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


class Prompt(NamedTuple):
    """Right-padded rows."""

    ids: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    seeds: Int[Array, " B"]
    active: Bool[Array, " B"]  # false for rows that only fill up the batch
    source: Tokens | None = None  # what the encoder reads


class Rows(NamedTuple):
    """What decoding carries from token to token."""

    caches: tuple[LayerCache, ...]
    lengths_B: Int[Array, " B"]  # tokens in the cache
    source_segments_BS: Int[Array, "B S"] | None


class Carry(NamedTuple):
    rows: Rows
    token_B: Int[Array, " B"]
    output_BT: Int[Array, "B T"]
    done_B: Bool[Array, " B"]
    count: Int[Array, ""]


@partial(jax.jit, static_argnames=("model", "capacity"))
def prefill(model: Transformer, params: Params, prompt: Prompt, *, capacity: int) -> tuple[Rows, Float[Array, "B V"]]:
    """Caches of `capacity` tokens with the prompts in them, and the logits after each row's last token."""
    cross = segments_BS = None
    if prompt.source is not None:
        source_BSD = model.apply({"params": params}, prompt.source, method="encode")
        cross = model.apply({"params": params}, source_BSD, method="cross_keys_values")
        segments_BS = prompt.source.segments
    batch, length = prompt.ids.shape
    caches = make_caches(model.config, batch, capacity, model.runtime.dtype, cross)
    tokens = tokens_from_ids(prompt.ids, jnp.arange(length) < prompt.lengths[:, None])
    start_B = jnp.zeros_like(prompt.lengths)
    hidden_BTD, caches = model.apply({"params": params}, tokens, start_B, caches, segments_BS, method="extend")
    last_B1D = jnp.take_along_axis(hidden_BTD, (prompt.lengths - 1)[:, None, None], axis=1)
    logits_BV = model.apply({"params": params}, last_B1D, method="logits")[:, 0]
    return Rows(caches, prompt.lengths, segments_BS), logits_BV


def token_step(
    model: Transformer, params: Params, rows: Rows, token_B: Int[Array, " B"]
) -> tuple[Rows, Float[Array, "B V"]]:
    """Append one token to each row; the step that every way of decoding shares."""
    tokens = Tokens(token_B[:, None], rows.lengths_B[:, None], jnp.ones_like(token_B)[:, None])
    hidden_B1D, caches = model.apply(
        {"params": params}, tokens, rows.lengths_B, rows.caches, rows.source_segments_BS, method="extend"
    )
    logits_BV = model.apply({"params": params}, hidden_B1D, method="logits")[:, 0]
    return rows._replace(caches=caches, lengths_B=rows.lengths_B + 1), logits_BV


@partial(
    jax.jit,
    static_argnames=("model", "max_new_tokens", "sampling", "eos_ids", "vocab_size"),
    donate_argnames="rows",
)
def continue_rows(
    model: Transformer,
    params: Params,
    rows: Rows,
    logits_BV: Float[Array, "B V"],
    prompt: Prompt,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    vocab_size: int,
) -> tuple[Int[Array, "B T"], Rows]:
    """At least one new token a row (after its end, the first of `eos_ids`), and the rows in the memory of those given.

    Ids from `vocab_size` on are never drawn: a model may have more rows in its table than its tokenizer has pieces.
    """
    filler = eos_ids[0] if eos_ids else 0

    def ends(token_B: Array) -> Bool[Array, " B"]:
        return jnp.isin(token_B, jnp.array(eos_ids, jnp.int32))

    def draw(logits_BV: Array, done_B: Array, count: Array) -> Int[Array, " B"]:
        logits_BV = logits_BV[:, :vocab_size]
        keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), count))(prompt.seeds)
        return jnp.where(done_B, filler, sample(logits_BV, keys, **vars(sampling)))

    def unfinished(carry: Carry) -> Bool[Array, ""]:
        return (carry.count < max_new_tokens) & ~carry.done_B.all()

    def one_token(carry: Carry) -> Carry:
        rows, logits_BV = token_step(model, params, carry.rows, carry.token_B)
        token_B = draw(logits_BV, carry.done_B, carry.count)
        output_BT = jax.lax.dynamic_update_slice(carry.output_BT, token_B[:, None], (0, carry.count))
        return Carry(rows, token_B, output_BT, carry.done_B | ends(token_B), carry.count + 1)

    first_B = draw(logits_BV, ~prompt.active, jnp.zeros((), jnp.int32))
    output_BT = jnp.full((first_B.shape[0], max_new_tokens), filler, jnp.int32).at[:, 0].set(first_B)
    start = Carry(rows, first_B, output_BT, ~prompt.active | ends(first_B), jnp.ones((), jnp.int32))
    end = jax.lax.while_loop(unfinished, one_token, start)
    return end.output_BT, end.rows
