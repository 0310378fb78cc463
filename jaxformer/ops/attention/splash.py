"""Splash attention: JAX's fused attention kernel for TPUs, which skips masked blocks (arXiv:2205.14135).

Supports causal masks, windows, segments, soft caps, grouped queries without repeated keys, and cross-attention. XLA
cannot partition it, so it runs on the shards of each device. Tests run it in Pallas' interpreter.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
    splash_attention_mask as masks,
)
from jaxtyping import Array, Float, Int

from jaxformer.ops.attention.inputs import (
    SAVED_NAME,
    AttentionInputs,
    AttentionParams,
    unsupported_features,
    unsupported_shape,
)
from jaxformer.sharding import on_shards

LANES = 128  # rows and blocks are multiples of the width of a TPU's vector registers
BLOCK = 512
PADDING = -1  # segment of the keys that pad a row to a multiple of `LANES`; no query has it


def unsupported(inputs: AttentionInputs, platform: str) -> str | None:
    return unsupported_shape(inputs) or unsupported_features(inputs)


def not_worthwhile(inputs: AttentionInputs, platform: str) -> str | None:
    if inputs.num_queries < LANES:
        return f"{inputs.num_queries} queries do not fill a block of {LANES}"
    return None


def attend(inputs: AttentionInputs, interpret: bool = False) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + mask) v.

    Args:
      interpret: emulate the kernel on any platform, for tests.
    """
    mask = inputs.mask
    segments = (mask.q_segments, mask.kv_segments)
    if mask.q_segments is None:
        B = len(inputs.q_BTNH)
        segments = (jnp.zeros((B, inputs.num_queries), jnp.int32), jnp.zeros((B, inputs.num_keys), jnp.int32))
    keys = ("batch", "kv_heads", None, None)
    queries = ("batch", None, "heads", None)
    local = on_shards(
        partial(_attend, mask.causal, mask.window, inputs.params, interpret),
        in_axes=(queries, keys, keys, ("batch", None), ("batch", None)),
        out_axes=queries,
    )
    return local(inputs.q_BTNH, inputs.k_BKSH, inputs.v_BKSH, *segments)


def _attend(
    causal: bool,
    window: int | None,
    params: AttentionParams,
    interpret: bool,
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    q_segments_BT: Int[Array, "B T"],
    kv_segments_BS: Int[Array, "B S"],
) -> Float[Array, "B T N H"]:
    """Attention on the shards of one device."""
    num_queries, num_heads = q_BTNH.shape[1:3]
    q_BNTH = _pad((q_BTNH * params.scale).astype(q_BTNH.dtype).swapaxes(1, 2), axis=2)
    k_BKSH, v_BKSH = _pad(k_BKSH, axis=2), _pad(v_BKSH, axis=2)
    segments = kernels.SegmentIds(_pad(q_segments_BT, axis=1), _pad(kv_segments_BS, axis=1, value=PADDING))
    kernel = _kernel(num_heads, q_BNTH.shape[2], k_BKSH.shape[2], causal, window, params.softcap, interpret)
    out_BNTH = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments)
    return out_BNTH[:, :, :num_queries].swapaxes(1, 2)


def _kernel(
    num_heads: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> kernels.SplashAttentionKernel:
    """The kernel for these shapes, which holds the table of blocks that are not masked."""
    q, kv = _block(num_queries), _block(num_keys)
    sizes = kernels.BlockSizes(block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv)
    mask = _mask((num_queries, num_keys), causal, window)
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED_NAME,
        interpret=interpret,
    )


def _mask(shape: tuple[int, int], causal: bool, window: int | None) -> masks.Mask:
    if window is not None:
        return masks.LocalMask(shape, (window - 1, 0 if causal else window - 1), offset=0)
    return masks.CausalMask(shape) if causal else masks.FullMask(shape)


def _block(length: int) -> int:
    """The largest block size that divides a length."""
    return next(size for size in range(BLOCK, 0, -LANES) if length % size == 0)


def _pad(array: Array, axis: int, value: int = 0) -> Array:
    """Extend an axis to a multiple of `LANES`."""
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, -array.shape[axis] % LANES)
    return jnp.pad(array, padding, constant_values=value)
