"""Logits filters, one function each. Every setting has one value per row, so a batch can mix requests.

Results match transformers' LogitsProcessors: the same tokens are kept with the same float32 values, all others are
-inf. Exceptions are marked as deviations.

No filter sorts. Top-k, top-p and typical-p each need a threshold, which `_keep_largest` determines bit by bit in 32
passes over the row. This is several times faster than sorting the vocabulary, also on a CPU. Tokens that tie with the
last token kept are kept too, so the result does not depend on the order of token ids.

`ops/sampling.py` decides which filters run and in which order.
"""

import jax
import jax.numpy as jnp

from jaxformer.typing import Array, Bool, Float, Int

Logits = Float[Array, "B V"]


# ---------------------------------------------------------------- bias and penalties
def add_bias(logits_BV: Logits, bias_BV: Logits) -> Logits:
    return logits_BV + bias_BV


def apply_repetition_penalty(logits_BV: Logits, seen_BV: Bool[Array, "B V"], penalty_B: Float[Array, " B"]) -> Logits:
    """Penalise tokens that occurred before by a factor (arXiv:1909.05858, section 4.1); 1 changes nothing."""
    penalty_B1 = penalty_B[:, None]
    # Deviation: the paper always divides, which would raise a negative logit; transformers multiplies those, as here.
    penalised_BV = jnp.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1)
    return jnp.where(seen_BV, penalised_BV, logits_BV)


def apply_frequency_penalty(logits_BV: Logits, counts_BV: Int[Array, "B V"], frequency_B: Float[Array, " B"]) -> Logits:
    """Subtract `frequency` once per occurrence of a generated token, as the OpenAI API does; 0 changes nothing."""
    return logits_BV - frequency_B[:, None] * counts_BV


def apply_presence_penalty(logits_BV: Logits, counts_BV: Int[Array, "B V"], presence_B: Float[Array, " B"]) -> Logits:
    """Subtract `presence` once from every token generated so far, as the OpenAI API does; 0 changes nothing."""
    return logits_BV - presence_B[:, None] * (counts_BV > 0)


# ---------------------------------------------------------------- removals
def remove_banned(logits_BV: Logits, banned_BV: Bool[Array, "B V"]) -> Logits:
    return _remove(logits_BV, banned_BV)


def remove_repeated_ngrams(
    logits_BV: Logits, ids_BT: Int[Array, "B T"], lengths_B: Int[Array, " B"], n_B: Int[Array, " B"]
) -> Logits:
    """Remove tokens that would complete an n-gram that the row already contains; 0 changes nothing.

    Args:
      ids_BT: the tokens so far, right-padded.
    """
    length = ids_BT.shape[1]
    n_B1, lengths_B1, index_T = n_B[:, None], lengths_B[:, None], jnp.arange(length)

    def agree(back: Array, repeats_BT: Array) -> Array:
        """Keep n-grams whose token `back` before their last one equals the token `back` before the one to sample."""
        last_B1 = jnp.take_along_axis(ids_BT, jnp.clip(lengths_B1 - back, 0, length - 1), axis=1)
        return repeats_BT & ((jnp.roll(ids_BT, back, axis=1) == last_B1) | (back >= n_B1))

    ends_BT = (n_B1 > 0) & (index_T >= n_B1 - 1) & (index_T < lengths_B1)  # last positions of n-grams
    repeats_BT = jax.lax.fori_loop(1, jnp.minimum(n_B.max(), length), agree, ends_BT)
    return _remove(logits_BV, token_presence(jnp.where(repeats_BT, ids_BT, -1), logits_BV.shape[1]))


def remove_early_eos(
    logits_BV: Logits, num_new_B: Int[Array, " B"], min_new_B: Int[Array, " B"], eos_BE: Int[Array, "B E"]
) -> Logits:
    """Remove EOS tokens until a row has `min_new` new tokens; `eos_BE` is padded with -1."""
    early_B = num_new_B < min_new_B
    # There are few EOS tokens: comparing each with all indices avoids scattering into a [B, V] table.
    is_eos_BV = (jnp.arange(logits_BV.shape[1]) == eos_BE[:, :, None]).any(axis=1)
    return _remove(logits_BV, early_B[:, None] & is_eos_BV)


def force_token(logits_BV: Logits, token_B: Int[Array, " B"]) -> Logits:
    """Keep only `token` in rows where it is >= 0; other rows are unchanged."""
    is_token_BV = jnp.arange(logits_BV.shape[1]) == token_B[:, None]
    return jnp.where(token_B[:, None] >= 0, jnp.where(is_token_BV, 0.0, -jnp.inf), logits_BV)


# ---------------------------------------------------------------- temperature and truncation
def apply_temperature(logits_BV: Logits, temperature_B: Float[Array, " B"]) -> Logits:
    return logits_BV / temperature_B[:, None]


def keep_top_k(logits_BV: Logits, k_B: Int[Array, " B"]) -> Logits:
    """Keep the k most likely tokens and those that tie with the k-th; 0 keeps all."""
    removable_B = jnp.where(k_B > 0, logits_BV.shape[1] - k_B, -1)
    return _keep(logits_BV, _keep_largest(removable_B, logits_BV, jnp.ones_like(logits_BV, jnp.int32)))


def keep_top_p(logits_BV: Logits, p_B: Float[Array, " B"]) -> Logits:
    """Keep the smallest set of most likely tokens whose total probability reaches p (arXiv:1904.09751); 1 keeps all.

    Deviation: all tokens that tie with the last one kept are kept; transformers keeps only as many as are needed to
    reach p.
    """
    return _keep(logits_BV, _keep_largest(_removable_mass(p_B), logits_BV, jax.nn.softmax(logits_BV, axis=-1)))


def keep_min_p(logits_BV: Logits, p_B: Float[Array, " B"]) -> Logits:
    """Keep tokens at least p times as likely as the most likely one (arXiv:2407.01082); 0 keeps all."""
    ratio_BV = jnp.exp(logits_BV - logits_BV.max(axis=-1, keepdims=True))
    return _keep(logits_BV, ratio_BV >= p_B[:, None])


def keep_typical_p(logits_BV: Logits, p_B: Float[Array, " B"]) -> Logits:
    """Keep the tokens whose surprisal is closest to the entropy, up to a total probability of p; 1 keeps all.

    This is locally typical sampling (arXiv:2202.00666, section 5).
    """
    logp_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    p_BV = jnp.exp(logp_BV)
    entropy_B1 = -jnp.where(p_BV > 0, logp_BV * p_BV, 0.0).sum(axis=-1, keepdims=True)
    return _keep(logits_BV, _keep_largest(_removable_mass(p_B), -jnp.abs(logp_BV + entropy_B1), p_BV))


# ---------------------------------------------------------------- shared
def token_presence(ids_BN: Int[Array, "B N"], vocab_size: int) -> Bool[Array, "B V"]:
    """Which tokens occur in a row of ids; ids outside the vocabulary are ignored."""
    return token_counts(ids_BN, vocab_size) > 0


def token_counts(ids_BN: Int[Array, "B N"], vocab_size: int) -> Int[Array, "B V"]:
    """How often each token occurs in a row of ids."""
    batch = ids_BN.shape[0]
    ids_BN = jnp.where(ids_BN < 0, vocab_size, ids_BN)  # negative indices would wrap around
    return jnp.zeros((batch, vocab_size), jnp.int32).at[jnp.arange(batch)[:, None], ids_BN].add(1, mode="drop")


def _keep(logits_BV: Logits, kept_BV: Bool[Array, "B V"]) -> Logits:
    return jnp.where(kept_BV, logits_BV, -jnp.inf)


def _remove(logits_BV: Logits, removed_BV: Bool[Array, "B V"]) -> Logits:
    """Remove tokens, except from rows that would have none left."""
    left_BV = _keep(logits_BV, ~removed_BV)
    return jnp.where(left_BV.max(axis=-1, keepdims=True) > -jnp.inf, left_BV, logits_BV)


def _removable_mass(p_B: Float[Array, " B"]) -> Float[Array, " B"]:
    """The probability mass that may be removed; negative if p is 1, so that even tokens of probability 0 are kept."""
    return jnp.where(p_B < 1.0, 1.0 - p_B, -1.0)


def _keep_largest(removable_B: Array, values_BV: Float[Array, "B V"], weights_BV: Array) -> Bool[Array, "B V"]:
    """True for the values to keep: all but the smallest, whose weights sum to at most `removable`.

    Equal values are either all kept or all removed, and the largest value is always kept. Weights are summed from the
    smallest value up, as in transformers' top-p: in the other direction, sums close to 1 are too coarse in float32.
    """
    order_BV = _sortable_bits(values_BV)

    def one_bit(i: Array, threshold_B: Array) -> Array:
        higher_B = threshold_B + (jnp.int32(1) << (31 - i))  # the first addition overflows from the smallest int32 to 0
        removed_B = jnp.where(order_BV < higher_B[:, None], weights_BV, 0).sum(axis=-1)
        return jnp.where(removed_B <= removable_B, higher_B, threshold_B)

    lowest_B = jnp.full(values_BV.shape[0], jnp.iinfo(jnp.int32).min)
    threshold_B = jax.lax.fori_loop(0, 32, one_bit, lowest_B)
    return order_BV >= jnp.minimum(threshold_B, order_BV.max(axis=-1))[:, None]


def _sortable_bits(x: Float[Array, "*dims"]) -> Int[Array, "*dims"]:
    """Integers in the same order as the floats; the bits of negative floats are flipped, as they count downwards."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0.0 must equal 0.0
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
