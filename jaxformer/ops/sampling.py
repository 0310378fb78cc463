"""Everything between logits and the next token, for rows that each have settings of their own.

The filters run in the order of transformers' `_get_logits_processor`:

    1 bias   2 repetition, frequency, presence penalty   3 no-repeat n-grams   4 banned tokens   5 minimum length
    6 forced first token   7 forced last token   | sampled rows only:
    8 temperature   9 top-k   10 top-p   11 min-p   12 typical-p

transformers has no frequency and presence penalty; they follow the repetition penalty, as in vLLM. A forced token wins
over every removal. If removals leave a row nothing, they give way instead: first the n-grams, then the minimum length,
last the bans. That is why 3 runs after 5 here; removals commute otherwise.

A filter that no row of a batch uses is `None` in `Settings`, so the structure of the settings says which filters are
compiled and a greedy batch pays for none; their values are data, and do not compile again. Everything is float32.
What users may ask for is checked in `decode/settings.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.ops import filters
from jaxformer.ops.largest import top_k
from jaxformer.typing import Array, Bool, Float, Int

# A lower temperature is greedy: logits over it might overflow, and only a near tie could still be drawn otherwise.
LEAST_TEMPERATURE = 1e-6


class Settings(NamedTuple):
    """One entry a row; none for what no row uses. The value in brackets leaves a row as it is."""

    temperature: Float[Array, " B"] | None = None  # (0: the likeliest token, whatever the five filters below say)
    top_k: Int[Array, " B"] | None = None  # (0)
    top_p: Float[Array, " B"] | None = None  # (1)
    min_p: Float[Array, " B"] | None = None  # (0)
    typical_p: Float[Array, " B"] | None = None  # (1)
    repetition_penalty: Float[Array, " B"] | None = None  # (1) over the prompt's tokens and the new ones
    frequency_penalty: Float[Array, " B"] | None = None  # (0) over the new tokens
    presence_penalty: Float[Array, " B"] | None = None  # (0) over the new tokens
    no_repeat_ngram: Int[Array, " B"] | None = None  # (0) over the prompt's tokens and the new ones
    min_new_tokens: Int[Array, " B"] | None = None  # (0) needs eos
    max_new_tokens: Int[Array, " B"] | None = None  # where forced_last stands
    eos: Int[Array, "B E"] | None = None  # what ends a row; -1 is no token
    forced_first: Int[Array, " B"] | None = None  # (-1)
    forced_last: Int[Array, " B"] | None = None  # (-1) needs max_new_tokens
    bias: Float[Array, "B V"] | None = None  # (0) added to the logits
    banned: Bool[Array, "B V"] | None = None  # (false)


class History(NamedTuple):
    """The tokens of each row so far; penalties and repeats are read off them, so nothing else need be carried."""

    ids: Int[Array, "B T"]  # the prompt, then the new tokens; of an encoder-decoder, the decoder's
    prompt_lengths: Int[Array, " B"]
    lengths: Int[Array, " B"]  # what lies beyond is no token

    @property
    def num_new(self) -> Int[Array, " B"]:
        return self.lengths - self.prompt_lengths

    @property
    def all_ids(self) -> Int[Array, "B T"]:
        """-1 where no token is."""
        return jnp.where(jnp.arange(self.ids.shape[1]) < self.lengths[:, None], self.ids, -1)

    @property
    def new_ids(self) -> Int[Array, "B T"]:
        """-1 where no new token is."""
        return jnp.where(jnp.arange(self.ids.shape[1]) >= self.prompt_lengths[:, None], self.all_ids, -1)


class LogProbs(NamedTuple):
    chosen: Float[Array, " B"]
    top: Float[Array, "B N"]  # descending
    top_ids: Int[Array, "B N"]


# ---------------------------------------------------------------- tokens
def choose(logits_BV: Float[Array, "B V"], keys_B: jax.Array, settings: Settings, history: History) -> Int[Array, " B"]:
    """One token a row: the likeliest at temperature 0, else a draw that depends on the row and its key alone."""
    scores_BV = filtered(logits_BV, settings, history)
    best_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    if settings.temperature is None:
        return best_B
    drawn_B = jax.vmap(jax.random.categorical)(keys_B, scores_BV).astype(jnp.int32)
    return jnp.where(_is_greedy(settings), best_B, drawn_B)


def filtered(logits_BV: Float[Array, "B V"], settings: Settings, history: History) -> Float[Array, "B V"]:
    """The logits a row is chosen from: filters 1 to 7, and for sampled rows 8 to 12."""
    logits_BV = adjusted(logits_BV, settings, history)
    if settings.temperature is None:
        return logits_BV
    return jnp.where(_is_greedy(settings)[:, None], logits_BV, narrowed(logits_BV, settings))


def adjusted(logits_BV: Float[Array, "B V"], settings: Settings, history: History) -> Float[Array, "B V"]:
    """Filters 1 to 7, which greedy and beam search share with sampling."""
    logits_BV = _penalised(logits_BV.astype(jnp.float32), settings, history)
    if settings.banned is not None:
        logits_BV = filters.banned(logits_BV, settings.banned)
    if settings.min_new_tokens is not None:
        logits_BV = filters.min_length(logits_BV, history.num_new, settings.min_new_tokens, settings.eos)
    if settings.no_repeat_ngram is not None:
        logits_BV = filters.no_repeat_ngram(logits_BV, history.ids, history.lengths, settings.no_repeat_ngram)
    if settings.forced_first is not None:
        logits_BV = filters.forced(logits_BV, jnp.where(history.num_new == 0, settings.forced_first, -1))
    if settings.forced_last is not None:
        is_last_B = history.num_new == settings.max_new_tokens - 1
        logits_BV = filters.forced(logits_BV, jnp.where(is_last_B, settings.forced_last, -1))
    return logits_BV


def narrowed(logits_BV: Float[Array, "B V"], settings: Settings) -> Float[Array, "B V"]:
    """Filters 8 to 12, for rows that are sampled."""
    logits_BV = filters.tempered(logits_BV, jnp.where(_is_greedy(settings), 1.0, settings.temperature))
    for name in ("top_k", "top_p", "min_p", "typical_p"):
        value_B = getattr(settings, name)
        if value_B is not None:
            logits_BV = getattr(filters, name)(logits_BV, value_B)
    return logits_BV


def log_probs(logits_BV: Float[Array, "B V"], token_B: Int[Array, " B"], top_n: int = 0) -> LogProbs:
    """Of the tokens chosen, and of the `top_n` likeliest.

    The model's own where these are its logits; pass `filtered(...)` for those of the distribution that was drawn from,
    which is what transformers' `compute_transition_scores` reports.
    """
    logp_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
    chosen_B = jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]
    return LogProbs(chosen_B, *top_k(logp_BV, min(top_n, logp_BV.shape[-1])))


def _penalised(logits_BV: Array, settings: Settings, history: History) -> Float[Array, "B V"]:
    """Filters 1 and 2."""
    if settings.bias is not None:
        logits_BV = filters.biased(logits_BV, settings.bias)
    vocab_size = logits_BV.shape[1]
    if settings.repetition_penalty is not None:
        seen_BV = filters.tokens_in(history.all_ids, vocab_size)
        logits_BV = filters.repetition_penalised(logits_BV, seen_BV, settings.repetition_penalty)
    if settings.frequency_penalty is None and settings.presence_penalty is None:
        return logits_BV
    counts_BV = filters.token_counts(history.new_ids, vocab_size)
    if settings.frequency_penalty is not None:
        logits_BV = filters.frequency_penalised(logits_BV, counts_BV, settings.frequency_penalty)
    if settings.presence_penalty is not None:
        logits_BV = filters.presence_penalised(logits_BV, counts_BV, settings.presence_penalty)
    return logits_BV


def _is_greedy(settings: Settings) -> Bool[Array, " B"]:
    return settings.temperature < LEAST_TEMPERATURE
