"""Rematerialisation by name: what the backward pass saves of a block, where, and what it recomputes.

Policies select values by their names: the input of a block, and what attention kernels name (`SAVED_NAME`). The latter
is small and expensive to recompute. It includes log-sum-exps, without which the backward pass of a kernel would run its
forward pass again.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxformer.config.run import Remat
from jaxformer.ops.attention import SAVED_NAME
from jaxformer.typing import Array

BLOCK_INPUT = "block_input"

_saves_attention = jax.checkpoint_policies.save_only_these_names(SAVED_NAME)
_offloads = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[BLOCK_INPUT, SAVED_NAME],
    offload_src="device",
    offload_dst="pinned_host",
)


def _offloads_large(primitive, *arrays: jax.core.ShapedArray, **params):
    """Offload what has a name, except log-sum-exps [B, N, T]: they are small, and the TPU compiler cannot do it."""
    is_log_sum_exp = params.get("name") == SAVED_NAME and arrays[0].ndim == 3
    return (_saves_attention if is_log_sum_exp else _offloads)(primitive, *arrays, **params)


POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": _saves_attention,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _saves_attention
    ),
    "offload": _offloads_large,
}


def rematerialize(block: Callable[..., Array], remat: Remat) -> Callable[..., Array]:
    """`block` with the rematerialisation of that name; its first argument is the input of the block."""
    if remat == "none":
        return block

    def named(x_BTD: Array, *rest):
        # Every policy keeps the input, because everything is recomputed from it. With a name, it can be on the host.
        return block(checkpoint_name(x_BTD, BLOCK_INPUT), *rest)

    return jax.checkpoint(named, policy=POLICIES[remat])
