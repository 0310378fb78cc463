"""Mixture of experts: routing, grouped matrix products, and the auxiliary losses of the router.

Experts have no capacity limit and no token is dropped: tokens are sorted by expert and multiplied group by group
(`jax.lax.ragged_dot`, see arXiv:2211.15841). Other routers (sigmoid scores, shared experts) belong next to
`route_tokens`.

Letters used only here: M tokens of the whole batch, J = top_k, R = M * J pairs of a token and one of its experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.sharding import sum_devices


class Routes(NamedTuple):
    """The experts chosen for each token, and their weights."""

    experts_MJ: Int[Array, "M J"]
    weights_MJ: Float[Array, "M J"]


class RouterLosses(NamedTuple):
    """Means over real tokens, before they are multiplied by the loss weights of the config."""

    load_balance: Float[Array, ""]
    router_z: Float[Array, ""]


def route_tokens(logits_ME: Float[Array, "M E"], top_k: int, renormalize: bool) -> Routes:
    """The `top_k` most probable experts of each token, with their softmax probabilities."""
    weights_MJ, experts_MJ = jax.lax.top_k(jax.nn.softmax(logits_ME, axis=-1), top_k)
    if renormalize:
        weights_MJ = weights_MJ / weights_MJ.sum(axis=-1, keepdims=True)
    return Routes(experts_MJ, weights_MJ)


def apply_experts(
    x_MD: Float[Array, "M D"],
    routes: Routes,
    num_experts: int,
    experts: Callable[[Float[Array, "R D"], Int[Array, " E"]], Float[Array, "R D"]],
) -> Float[Array, "M D"]:
    """The weighted sum of the outputs of each token's experts.

    `experts(rows, sizes)` receives the rows sorted by expert; `sizes[e]` is the number of rows of expert e.
    """
    top_k = routes.experts_MJ.shape[1]
    order_R = jnp.argsort(routes.experts_MJ.reshape(-1), stable=True)
    sizes_E = jnp.bincount(routes.experts_MJ.reshape(-1), length=num_experts)
    token_R = order_R // top_k
    y_RD = experts(x_MD[token_R], sizes_E) * routes.weights_MJ.reshape(-1)[order_R, None].astype(x_MD.dtype)
    return jnp.zeros_like(x_MD).at[token_R].add(y_RD.astype(x_MD.dtype))


def router_losses(logits_ME: Float[Array, "M E"], routes: Routes, real_M: Float[Array, " M"]) -> RouterLosses:
    """The load-balancing loss and the router z-loss.

    Load balance: E * sum over experts of (fraction of tokens * mean probability), which is `top_k` if the load is
    perfectly balanced (arXiv:2101.03961, eq. 4). Router z: the mean squared log-sum-exp (arXiv:2202.08906, eq. 5).
    """
    num_experts = logits_ME.shape[1]
    chosen_ME = jax.nn.one_hot(routes.experts_MJ, num_experts, dtype=jnp.float32).sum(axis=1)
    z_M = jnp.square(jax.nn.logsumexp(logits_ME, axis=-1))
    values = (chosen_ME, jax.nn.softmax(logits_ME, axis=-1), z_M[:, None], jnp.ones_like(z_M)[:, None])
    # The shares are those of the whole batch, also where each device has only some of its rows.
    *sums, total = sum_devices(tuple((value * real_M[:, None]).sum(axis=0) for value in values))
    share_E, probability_E, z = (value / jnp.maximum(total, 1.0) for value in sums)
    return RouterLosses(num_experts * (share_E * probability_E).sum(), z[0])
