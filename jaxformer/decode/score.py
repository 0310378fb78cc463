"""Log-probabilities of given tokens, teacher-forced: what `jf.score` gives and what perplexity is made of."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.layers import Transformer
from jaxformer.typing import Array, Bool, Float, Int, Params, Tokens


class TokenScores(NamedTuple):
    log_probs_BT: Float[Array, "B T"]
    correct_BT: Bool[Array, "B T"]
    """Whether the token is the likeliest."""


def token_scores(
    model: Transformer, params: Params, previous: Tokens, targets_BT: Int[Array, "B T"], source: Tokens | None = None
) -> TokenScores:
    """Of every target, given the tokens up to and with the previous one and, if there is one, the source."""
    logits_BTV = model.apply({"params": params}, previous, source).astype(jnp.float32)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    log_probs_BT = chosen_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
    # It wins if it reaches the maximum: as argmax, without a second pass over V for indices.
    return TokenScores(log_probs_BT, chosen_BT >= logits_BTV.max(axis=-1))
