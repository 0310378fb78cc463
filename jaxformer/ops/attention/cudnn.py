"""cuDNN's fused attention kernel for NVIDIA GPUs (arXiv:2307.08691), through `jax.nn.dot_product_attention`.

Causal masks and causal windows are known to the kernel. Segments, and windows that look both ways, are passed to it as
a [T, S] mask in the dtype of the queries: cuDNN's own layout for packed rows has wrong offsets for grouped queries in
the versions of JAX that we support (jax-ml/jax#39521).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxformer.ops.attention.inputs import AttentionInputs, unsupported_features, unsupported_shape
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
    mask = inputs.mask
    has_causal_window = mask.causal and mask.window is not None
    out_BTNH = jax.nn.dot_product_attention(
        inputs.q_BTNH,
        inputs.k_BKSH.swapaxes(1, 2),
        inputs.v_BKSH.swapaxes(1, 2),
        mask=_remaining_mask(inputs),
        scale=inputs.params.scale,
        is_causal=mask.causal,
        local_window_size=(mask.window - 1, 0) if has_causal_window else None,
        implementation=implementation,
    )
    return checkpoint_name(out_BTNH, "attention")


def _remaining_mask(inputs: AttentionInputs) -> Bool[Array, "B 1 T S"] | None:
    """What the kernel's own causal mask and window do not cover."""
    mask = inputs.mask
    rest = Mask(window=None if mask.causal else mask.window, q_segments=mask.q_segments, kv_segments=mask.kv_segments)
    allowed_BTS = dense_mask(rest, (0, inputs.num_queries), (0, inputs.num_keys))
    return None if allowed_BTS is None else allowed_BTS[:, None]
