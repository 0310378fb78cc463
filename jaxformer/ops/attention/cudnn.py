"""cuDNN's fused attention kernel for NVIDIA GPUs (arXiv:2307.08691), through `jax.nn.dot_product_attention`.

Causal masks and causal windows are known to the kernel. Segments, and windows that look both ways, are passed to it as
a [T, S] mask in the dtype of the queries: cuDNN's own layout for packed rows has wrong offsets for grouped queries in
the versions of JAX that we support (jax-ml/jax#39521).
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxformer.ops.attention.inputs import SAVED_NAME, AttentionInputs, unsupported_features, unsupported_shape
from jaxformer.ops.masks import Mask, dense_mask

MAX_HEAD_DIM = 128  # 256 on Hopper and later, which JAX only allows if such a GPU is attached


def unsupported(inputs: AttentionInputs, platform: str) -> str | None:
    dtype, head_dim = inputs.q_BTNH.dtype, inputs.q_BTNH.shape[-1]
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and the inputs are {dtype}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"the head dimension must be a multiple of 8 and at most {MAX_HEAD_DIM}, and it is {head_dim}"
    if inputs.params.softcap is not None:
        return "it has no soft cap"
    reason = unsupported_shape(inputs) or unsupported_features(inputs)
    if reason is None and (inputs.num_queries % 2 or inputs.num_keys % 2):
        return f"lengths must be even, and they are {inputs.num_queries} and {inputs.num_keys}"
    return reason


def not_worthwhile(inputs: AttentionInputs, platform: str) -> str | None:
    return None


def attend(inputs: AttentionInputs, implementation: Literal["cudnn", "xla"] = "cudnn") -> Float[Array, "B T N H"]:
    """softmax(scale * q k^T + mask) v.

    Args:
      implementation: "xla" computes the same on any platform, for tests.
    """
    return _attend(implementation, inputs.params.scale, inputs.mask, inputs.q_BTNH, inputs.k_BKSH, inputs.v_BKSH)


def _call_kernel(
    implementation: str,
    scale: float,
    mask: Mask,
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
) -> Float[Array, "B T N H"]:
    has_causal_window = mask.causal and mask.window is not None
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BKSH.swapaxes(1, 2),
        v_BKSH.swapaxes(1, 2),
        mask=_remaining_mask(mask, q_BTNH.shape[1], k_BKSH.shape[2]),
        scale=scale,
        is_causal=mask.causal,
        local_window_size=(mask.window - 1, 0) if has_causal_window else None,
        implementation=implementation,
    )


_attend = jax.custom_vjp(_call_kernel, nondiff_argnums=(0, 1))


def _forward(implementation: str, scale: float, mask: Mask, *arrays: Array):
    """The output, and the gradient function of the kernel with names on its output and log-sum-exps.

    Rematerialisation policies can keep these only if they have names in the forward rule: JAX's own rule gives none,
    and a name on the output outside of it would not keep the backward pass from running the forward kernel again.
    """
    out_BTNH, pullback = jax.vjp(partial(_call_kernel, implementation, scale, mask), *arrays)
    named_BTNH = checkpoint_name(out_BTNH, SAVED_NAME)
    B, T, N, _ = out_BTNH.shape

    def named(leaf: Array) -> Array:
        if leaf is out_BTNH:
            return named_BTNH
        is_log_sum_exp = leaf.shape == (B, N, T) and leaf.dtype == jnp.float32
        return checkpoint_name(leaf, SAVED_NAME) if is_log_sum_exp else leaf

    return named_BTNH, jax.tree.map(named, pullback)


def _backward(implementation: str, scale: float, pullback, d_out_BTNH: Float[Array, "B T N H"]):
    return None, *pullback(d_out_BTNH)


_attend.defvjp(_forward, _backward)


def _remaining_mask(mask: Mask, num_queries: int, num_keys: int) -> Bool[Array, "B 1 T S"] | None:
    """What the kernel's own causal mask and window do not cover."""
    rest = Mask(window=None if mask.causal else mask.window, q_segments=mask.q_segments, kv_segments=mask.kv_segments)
    allowed_BTS = dense_mask(rest, (0, num_queries), (0, num_keys))
    return None if allowed_BTS is None else allowed_BTS[:, None]
