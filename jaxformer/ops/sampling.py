"""Sampling of the next token from logits, with separate sampling parameters for every row of a batch.

The filters run in the order of transformers' `_get_logits_processor`:

    1 bias   2 repetition, frequency, presence penalty   3 no-repeat n-grams   4 banned tokens   5 minimum length
    6 forced first token   7 forced last token   | sampled rows only:
    8 temperature   9 top-k   10 top-p   11 min-p   12 typical-p

transformers has no frequency and presence penalties; they follow the repetition penalty, as in vLLM. A forced token
overrides every removal. A removal that would leave a row without any token is skipped for that row: banned tokens take
precedence over the minimum length, which takes precedence over no-repeat n-grams. The code therefore applies 4, 5 and
then 3; the order of removals does not matter otherwise.

A filter that no row uses is `None` in `SamplingParams`. The pytree structure of the parameters thus selects the filters
that are compiled: a greedy batch pays for none of them, and changing only values does not recompile. All filters
compute in float32. `decode` validates the values that users pass.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.ops import filters
from jaxformer.ops.reductions import top_k
from jaxformer.typing import Array, Bool, Float, Int

# Rows with a lower temperature are decoded greedily: dividing by it could overflow, and sampling could differ from
# argmax only between nearly equal logits.
MIN_TEMPERATURE = 1e-6


class SamplingParams(NamedTuple):
    """Sampling parameters with one entry per row; None if no row uses the filter.

    The value in parentheses disables the filter for a row.
    """

    temperature: Float[Array, " B"] | None = None  # (0: greedy; top_k, top_p, min_p and typical_p are ignored)
    top_k: Int[Array, " B"] | None = None  # (0)
    top_p: Float[Array, " B"] | None = None  # (1)
    min_p: Float[Array, " B"] | None = None  # (0)
    typical_p: Float[Array, " B"] | None = None  # (1)
    repetition_penalty: Float[Array, " B"] | None = None  # (1) applies to prompt and new tokens
    frequency_penalty: Float[Array, " B"] | None = None  # (0) applies to new tokens only
    presence_penalty: Float[Array, " B"] | None = None  # (0) applies to new tokens only
    no_repeat_ngram: Int[Array, " B"] | None = None  # (0) applies to prompt and new tokens
    min_new_tokens: Int[Array, " B"] | None = None  # (0) requires eos
    max_new_tokens: Int[Array, " B"] | None = None  # required by forced_last
    eos: Int[Array, "B E"] | None = None  # ids of the EOS tokens, padded with -1
    forced_first: Int[Array, " B"] | None = None  # (-1)
    forced_last: Int[Array, " B"] | None = None  # (-1) requires max_new_tokens
    bias: Float[Array, "B V"] | None = None  # (0) added to the logits
    banned: Bool[Array, "B V"] | None = None  # (false)


class History(NamedTuple):
    """The tokens of each row so far; penalties are computed from them, so a decode loop need not carry token counts."""

    ids: Int[Array, "B T"]  # prompt, then new tokens; for an encoder-decoder, the tokens of the decoder
    prompt_lengths: Int[Array, " B"]
    lengths: Int[Array, " B"]  # number of valid tokens

    @property
    def num_new(self) -> Int[Array, " B"]:
        return self.lengths - self.prompt_lengths

    @property
    def all_ids(self) -> Int[Array, "B T"]:
        """Prompt and new tokens, -1 elsewhere."""
        return jnp.where(jnp.arange(self.ids.shape[1]) < self.lengths[:, None], self.ids, -1)

    @property
    def new_ids(self) -> Int[Array, "B T"]:
        """New tokens, -1 elsewhere."""
        return jnp.where(jnp.arange(self.ids.shape[1]) >= self.prompt_lengths[:, None], self.all_ids, -1)


class NextTokenLogProbs(NamedTuple):
    chosen: Float[Array, " B"]
    top: Float[Array, "B N"]  # descending
    top_ids: Int[Array, "B N"]


# ---------------------------------------------------------------- tokens
def sample_next(
    logits_BV: Float[Array, "B V"], keys_B: jax.Array, params: SamplingParams, history: History
) -> Int[Array, " B"]:
    """One token per row: greedy at temperature 0, else sampled. It depends only on the row itself and its key."""
    scores_BV = apply_filters(logits_BV, params, history)
    best_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    if params.temperature is None:
        return best_B
    sampled_B = jax.vmap(jax.random.categorical)(keys_B, scores_BV).astype(jnp.int32)
    return jnp.where(_is_greedy(params), best_B, sampled_B)


def apply_filters(logits_BV: Float[Array, "B V"], params: SamplingParams, history: History) -> Float[Array, "B V"]:
    """Filters 1 to 7, and for sampled rows also 8 to 12."""
    logits_BV = apply_shared_filters(logits_BV, params, history)
    if params.temperature is None:
        return logits_BV
    return jnp.where(_is_greedy(params)[:, None], logits_BV, apply_sampling_filters(logits_BV, params))


def apply_shared_filters(
    logits_BV: Float[Array, "B V"], params: SamplingParams, history: History
) -> Float[Array, "B V"]:
    """Filters 1 to 7, which greedy decoding and beam search share with sampling."""
    logits_BV = _apply_penalties(logits_BV.astype(jnp.float32), params, history)
    if params.banned is not None:
        logits_BV = filters.remove_banned(logits_BV, params.banned)
    if params.min_new_tokens is not None:
        logits_BV = filters.remove_early_eos(logits_BV, history.num_new, params.min_new_tokens, params.eos)
    if params.no_repeat_ngram is not None:
        logits_BV = filters.remove_repeated_ngrams(logits_BV, history.ids, history.lengths, params.no_repeat_ngram)
    if params.forced_first is not None:
        logits_BV = filters.force_token(logits_BV, jnp.where(history.num_new == 0, params.forced_first, -1))
    if params.forced_last is not None:
        is_last_B = history.num_new == params.max_new_tokens - 1
        logits_BV = filters.force_token(logits_BV, jnp.where(is_last_B, params.forced_last, -1))
    return logits_BV


def apply_sampling_filters(logits_BV: Float[Array, "B V"], params: SamplingParams) -> Float[Array, "B V"]:
    """Filters 8 to 12, for sampled rows."""
    logits_BV = filters.apply_temperature(logits_BV, jnp.where(_is_greedy(params), 1.0, params.temperature))
    if params.top_k is not None:
        logits_BV = filters.keep_top_k(logits_BV, params.top_k)
    if params.top_p is not None:
        logits_BV = filters.keep_top_p(logits_BV, params.top_p)
    if params.min_p is not None:
        logits_BV = filters.keep_min_p(logits_BV, params.min_p)
    if params.typical_p is not None:
        logits_BV = filters.keep_typical_p(logits_BV, params.typical_p)
    return logits_BV


def token_log_probs(logits_BV: Float[Array, "B V"], token_B: Int[Array, " B"], top_n: int = 0) -> NextTokenLogProbs:
    """Log-probabilities of the given tokens and of the `top_n` most likely ones.

    Pass the model's logits for the model's distribution, or the result of `apply_filters` for the distribution that
    tokens were sampled from. The latter is what transformers' `compute_transition_scores` reports.
    """
    logp_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
    chosen_B = jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]
    return NextTokenLogProbs(chosen_B, *top_k(logp_BV, min(top_n, logp_BV.shape[-1])))


def _apply_penalties(logits_BV: Array, params: SamplingParams, history: History) -> Float[Array, "B V"]:
    """Filters 1 and 2."""
    if params.bias is not None:
        logits_BV = filters.add_bias(logits_BV, params.bias)
    vocab_size = logits_BV.shape[1]
    if params.repetition_penalty is not None:
        seen_BV = filters.token_presence(history.all_ids, vocab_size)
        logits_BV = filters.apply_repetition_penalty(logits_BV, seen_BV, params.repetition_penalty)
    if params.frequency_penalty is None and params.presence_penalty is None:
        return logits_BV
    counts_BV = filters.token_counts(history.new_ids, vocab_size)
    if params.frequency_penalty is not None:
        logits_BV = filters.apply_frequency_penalty(logits_BV, counts_BV, params.frequency_penalty)
    if params.presence_penalty is not None:
        logits_BV = filters.apply_presence_penalty(logits_BV, counts_BV, params.presence_penalty)
    return logits_BV


def _is_greedy(params: SamplingParams) -> Bool[Array, " B"]:
    return params.temperature < MIN_TEMPERATURE
