"""Attention in blocks of queries, written in XLA operations, after FlashAttention (arXiv:2205.14135).

It computes the same function as `reference` in less time and memory: keys that no query of a block may see are skipped,
and the backward pass recomputes probabilities from the saved log-sum-exps instead of storing them.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxformer.ops.attention.inputs import SAVED_NAME, AttentionInputs, unsupported_shape
from jaxformer.ops.attention.logits import (
    Range,
    add_bias,
    apply_mask,
    einsum_f32,
    merge_heads,
    split_heads,
)
from jaxformer.ops.elementwise import apply_softcap, dropout
from jaxformer.ops.masks import Mask

# Smaller blocks skip more of the masked half of a causal matrix. The loop over blocks is unrolled, so a limit on their
# number bounds the size of the program.
MIN_BLOCK, MAX_BLOCKS = 64, 16


def unsupported(inputs: AttentionInputs, platform: str) -> str | None:
    return unsupported_shape(inputs)


def not_worthwhile(inputs: AttentionInputs, platform: str) -> str | None:
    if platform != "cpu":
        return f"its blocks are unrolled, which compiles slowly on {platform}"
    if inputs.num_queries <= MIN_BLOCK:
        return f"{inputs.num_queries} queries fit in a single block of {MIN_BLOCK}, so no keys can be skipped"
    return None


@jax.custom_vjp
def attend(inputs: AttentionInputs) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + bias + mask) v."""
    return _forward(inputs)[0]


Residuals = tuple[AttentionInputs, Float[Array, "B T N H"], Float[Array, "B K G T"]]


def _forward(inputs: AttentionInputs) -> tuple[Float[Array, "B T N H"], Residuals]:
    """The output and the residuals for the backward pass, which hold log-sum-exps instead of probabilities."""
    mask, params = inputs.mask, inputs.params
    q_BKGTH = split_heads(inputs.q_BTNH * params.scale, inputs.num_kv_heads)
    outs, log_sums = [], []
    for i, (queries, keys) in enumerate(block_ranges(mask, inputs.num_queries, inputs.num_keys)):
        k, v = inputs.k_BKSH[:, :, slice(*keys)], inputs.v_BKSH[:, :, slice(*keys)]
        logits = apply_softcap(einsum_f32("BKGTH,BKSH->BKGTS", q_BKGTH[..., slice(*queries), :], k), params.softcap)
        logits = apply_mask(add_bias(logits, mask, inputs.bias, queries, keys), mask, queries, keys)
        peak = logits.max(axis=-1, keepdims=True)
        p = jnp.exp(logits - peak)
        total = p.sum(axis=-1, keepdims=True)
        factors = _dropout_factors(inputs, i, p.shape)
        p = (p if factors is None else p * factors).astype(v.dtype)
        outs.append(einsum_f32("BKGTS,BKSH->BKGTH", p, v) / total)
        log_sums.append((peak + jnp.log(total))[..., 0])
    out_BTNH = merge_heads(jnp.concatenate(outs, axis=3)).astype(inputs.q_BTNH.dtype)
    # Named for rematerialisation policies: if these two are saved, the backward pass need not recompute attention.
    out_BTNH, log_sums_BKGT = checkpoint_name((out_BTNH, jnp.concatenate(log_sums, axis=3)), SAVED_NAME)
    return out_BTNH, (inputs, out_BTNH, log_sums_BKGT)


def _backward(saved: Residuals, d_out_BTNH: Float[Array, "B T N H"]) -> tuple[AttentionInputs]:
    inputs, out_BTNH, log_sums_BKGT = saved
    K, scale, k_BKSH = inputs.num_kv_heads, inputs.params.scale, inputs.k_BKSH
    q_BKGTH, d_out_BKGTH = split_heads(inputs.q_BTNH * scale, K), split_heads(d_out_BTNH, K)
    # The softmax's gradient needs sum(p * dp), which equals sum(out * d_out) (arXiv:2205.14135, appendix B.4).
    delta_BKGT = (d_out_BKGTH * split_heads(out_BTNH, K)).astype(jnp.float32).sum(axis=-1)
    dq, d_bias = [], jax.tree.map(jnp.zeros_like, inputs.bias)
    dk_BKSH, dv_BKSH = jnp.zeros(k_BKSH.shape, jnp.float32), jnp.zeros(k_BKSH.shape, jnp.float32)
    for i, (queries, keys) in enumerate(block_ranges(inputs.mask, inputs.num_queries, inputs.num_keys)):
        rows, columns = slice(*queries), slice(*keys)
        q, d_out, k = q_BKGTH[..., rows, :], d_out_BKGTH[..., rows, :], k_BKSH[:, :, columns]
        log_sums, delta = log_sums_BKGT[..., None, rows], delta_BKGT[..., None, rows]
        p, d_logits, d_block_bias = _block_gradients(inputs, i, q, d_out, (queries, keys), (log_sums, delta))
        d_bias = jax.tree.map(jnp.add, d_bias, d_block_bias)
        dq.append(einsum_f32("BKGST,BKSH->BKGTH", d_logits, k) * scale)
        dk_BKSH = dk_BKSH.at[:, :, columns].add(einsum_f32("BKGST,BKGTH->BKSH", d_logits, q))
        dv_BKSH = dv_BKSH.at[:, :, columns].add(einsum_f32("BKGST,BKGTH->BKSH", p, d_out))
    dq_BTNH = merge_heads(jnp.concatenate(dq, axis=3)).astype(inputs.q_BTNH.dtype)
    dk_BKSH, dv_BKSH = dk_BKSH.astype(k_BKSH.dtype), dv_BKSH.astype(inputs.v_BKSH.dtype)
    return (AttentionInputs(dq_BTNH, dk_BKSH, dv_BKSH, None, inputs.params, d_bias, None),)


attend.defvjp(_forward, _backward)


def _block_gradients(
    inputs: AttentionInputs,
    block: int,
    q: Float[Array, "B K G T H"],
    d_out: Float[Array, "B K G T H"],
    ranges: tuple[Range, Range],
    saved: tuple[Float[Array, "B K G 1 T"], Float[Array, "B K G 1 T"]],
) -> tuple[Float[Array, "B K G S T"], Float[Array, "B K G S T"], object]:
    """Probabilities after dropout, the gradient of the scaled dot products, and the gradient of the bias.

    The first two have keys before queries ([B, K, G, S, T]), because two of the three matrix products that follow then
    read both operands contiguously.
    """
    (queries, keys), (log_sums, delta) = ranges, saved
    mask, softcap = inputs.mask, inputs.params.softcap
    k, v = inputs.k_BKSH[:, :, slice(*keys)], inputs.v_BKSH[:, :, slice(*keys)]
    capped = apply_softcap(einsum_f32("BKSH,BKGTH->BKGST", k, q), softcap)
    logits, pull_bias = jax.vjp(lambda b: add_bias(capped, mask, b, queries, keys, transposed=True), inputs.bias)
    p = jnp.exp(apply_mask(logits, mask, queries, keys, transposed=True) - log_sums)
    dp = einsum_f32("BKSH,BKGTH->BKGST", v, d_out)
    factors = _dropout_factors(inputs, block, (*p.shape[:3], p.shape[4], p.shape[3]))
    if factors is not None:
        factors = factors.swapaxes(-1, -2)
        dp = dp * factors
    d_logits = p * (dp - delta)
    (d_bias,) = pull_bias(d_logits)
    if softcap is not None:
        d_logits = d_logits * (1.0 - jnp.square(capped / softcap))  # the derivative of tanh
    p = p if factors is None else p * factors
    return p.astype(q.dtype), d_logits.astype(q.dtype), d_bias


def block_ranges(mask: Mask, num_queries: int, num_keys: int) -> list[tuple[Range, Range]]:
    """Ranges of queries, each with the range of keys that any of these queries may see."""
    size = max(MIN_BLOCK, -(-num_queries // MAX_BLOCKS))
    blocks = [(start, min(start + size, num_queries)) for start in range(0, num_queries, size)]
    # Offsets and key indices are only known at run time, so no key can be skipped at compile time.
    if mask.q_offset is not None or mask.kv_index is not None:
        return [(queries, (0, num_keys)) for queries in blocks]
    window = num_keys + num_queries if mask.window is None else mask.window
    # Which keys belong to a prefix is only known at run time too: any key ahead might, so only the window skips keys.
    ahead = 0 if mask.causal and mask.prefix is None else window - 1
    # Every block has at least one key: queries without any visible key must still give finite values.
    return [((a, b), (max(0, min(a - window + 1, num_keys - 1)), min(b + ahead, num_keys))) for a, b in blocks]


def _dropout_factors(inputs: AttentionInputs, block: int, shape: tuple[int, ...]) -> Array | None:
    """The scaled dropout mask for the probabilities of a block, identical in the forward and the backward pass."""
    if inputs.dropout_key is None or inputs.params.dropout_rate == 0.0:
        return None
    key = jax.random.fold_in(inputs.dropout_key, block)
    return dropout(jnp.ones(shape, jnp.float32), inputs.params.dropout_rate, key)
