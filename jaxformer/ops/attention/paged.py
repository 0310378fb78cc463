"""Paged attention: JAX's fused TPU kernel for one query per row over a KV cache, of which it reads only the used part.

The kernel reads keys in pages that may be anywhere in memory. The cache of a row is contiguous, so its pages are
consecutive, and nothing is copied: each KV head of each row is a separate sequence, and the layer of a stacked cache
is an offset. Other kernels would need the layer cut out of the stacked cache first. XLA cannot partition it, so it runs
on the shards of each device.
"""

from functools import partial

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jaxtyping import Array, Float, Int

from jaxformer.ops.attention.inputs import AttentionInputs, AttentionParams, unsupported_shape
from jaxformer.sharding import on_shards

LANES = 128  # the width of a TPU's vector registers
PAGES = (512, 256, 128, 64, 32, 16)  # entries per page; 16 rows of bfloat16 are the smallest tile that is contiguous


def unsupported(inputs: AttentionInputs, platform: str) -> str | None:
    cache, head_dim = inputs.cache, inputs.q_BTNH.shape[-1]
    if cache is None:
        return "it attends with one query per row to a KV cache in the dtype of the model"
    if cache.k.dtype != jnp.bfloat16:
        return f"it rounds keys and values to bfloat16, and the cache is {cache.k.dtype}"
    if inputs.bias is not None:
        return f"it adds no bias such as {type(inputs.bias).__name__} to the logits"
    if head_dim % LANES:
        return f"the head dimension must be a multiple of {LANES}, and it is {head_dim}"
    if inputs.num_keys % PAGES[-1]:
        return f"the capacity of the cache must be a multiple of {PAGES[-1]}, and it is {inputs.num_keys}"
    return unsupported_shape(inputs)


def not_worthwhile(inputs: AttentionInputs, platform: str) -> str | None:
    return None


def attend(inputs: AttentionInputs) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + mask) v."""
    cache, queries = inputs.cache, ("batch", None, "heads", None)
    stacked = () if cache.layer is None else ("layers",)
    keys = (*stacked, "batch", "kv_heads", None, None)
    layer = jnp.zeros((), jnp.int32) if cache.layer is None else cache.layer
    local = on_shards(partial(_attend, inputs.params), in_axes=(queries, keys, keys, (), ("batch",)), out_axes=queries)
    return local(inputs.q_BTNH, cache.k, cache.v, layer, cache.lengths_B)


def _attend(
    params: AttentionParams,
    q_BTNH: Float[Array, "B 1 N H"],
    k: Float[Array, "*L B K S H"],
    v: Float[Array, "*L B K S H"],
    layer: Int[Array, ""],
    lengths_B: Int[Array, " B"],
) -> Float[Array, "B 1 N H"]:
    """Attention on the shards of one device."""
    B, K, S, H = k.shape[-4:]
    page = next(size for size in PAGES if S % size == 0)
    num_sequences, num_pages = B * K, S // page
    # Queries of one KV head are consecutive.
    q = (q_BTNH * params.scale).astype(q_BTNH.dtype).reshape(num_sequences, -1, H)
    first = layer * num_sequences * num_pages
    pages = first + jnp.arange(num_sequences * num_pages, dtype=jnp.int32).reshape(num_sequences, num_pages)
    out = paged_attention(
        q,
        k.reshape(1, -1, page, H),
        v.reshape(1, -1, page, H),
        jnp.repeat(lengths_B.astype(jnp.int32), K),
        pages,
        attn_logits_soft_cap=params.softcap,
        pages_per_compute_block=1,
    )
    return out.reshape(q_BTNH.shape)
