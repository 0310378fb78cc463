"""Mixture of experts: routing, the grouped products, and the losses that keep the router honest.

No capacity and no dropped tokens: tokens are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`,
after arXiv:2211.15841). Other routers (sigmoid scores, shared experts) would stand beside `routes`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Routes(NamedTuple):
    """Where each of M tokens goes."""

    experts_MJ: Int[Array, "M J"]
    weights_MJ: Float[Array, "M J"]


class RouterLosses(NamedTuple):
    """Means over real tokens, not yet weighted."""

    load_balance: Float[Array, ""]
    router_z: Float[Array, ""]


def routes(logits_ME: Float[Array, "M E"], top_k: int, renormalize: bool) -> Routes:
    """The `top_k` likeliest experts of each token, with their softmax probabilities."""
    weights_MJ, experts_MJ = jax.lax.top_k(jax.nn.softmax(logits_ME, axis=-1), top_k)
    if renormalize:
        weights_MJ = weights_MJ / weights_MJ.sum(axis=-1, keepdims=True)
    return Routes(experts_MJ, weights_MJ)


def by_expert(
    x_MD: Float[Array, "M D"],
    chosen: Routes,
    num_experts: int,
    experts: Callable[[Float[Array, "R D"], Int[Array, " E"]], Float[Array, "R D"]],
) -> Float[Array, "M D"]:
    """The weighted sum of what each token's experts make of it.

    `experts(rows, sizes)` gets rows sorted by expert, `sizes[e]` of them for expert e.
    """
    top_k = chosen.experts_MJ.shape[1]
    order_R = jnp.argsort(chosen.experts_MJ.reshape(-1), stable=True)
    sizes_E = jnp.bincount(chosen.experts_MJ.reshape(-1), length=num_experts)
    token_R = order_R // top_k
    y_RD = experts(x_MD[token_R], sizes_E) * chosen.weights_MJ.reshape(-1)[order_R, None].astype(x_MD.dtype)
    return jnp.zeros_like(x_MD).at[token_R].add(y_RD.astype(x_MD.dtype))


def router_losses(logits_ME: Float[Array, "M E"], chosen: Routes, real_M: Float[Array, " M"]) -> RouterLosses:
    """Load balance: E * sum(share of tokens * mean probability), 1 if even times top_k (arXiv:2101.03961, eq. 4).

    Router z: the mean squared log-sum-exp (arXiv:2202.08906, eq. 5).
    """
    num_experts, total = logits_ME.shape[1], jnp.maximum(real_M.sum(), 1.0)
    chosen_ME = jax.nn.one_hot(chosen.experts_MJ, num_experts, dtype=jnp.float32).sum(axis=1)
    share_E = (chosen_ME * real_M[:, None]).sum(axis=0) / total
    probability_E = (jax.nn.softmax(logits_ME, axis=-1) * real_M[:, None]).sum(axis=0) / total
    z_M = jnp.square(jax.nn.logsumexp(logits_ME, axis=-1))
    return RouterLosses(num_experts * (share_E * probability_E).sum(), (z_M * real_M).sum() / total)
