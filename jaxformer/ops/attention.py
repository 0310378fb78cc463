"""Scaled dot-product attention: one entry, `attend`, and its implementations.

`reference` is the definition. `blocked` is the same function of its inputs in less time and memory: it works
through the queries in blocks, skips keys that no query of a block may see, and keeps no probabilities for the
backward pass (arXiv:2205.14135, with XLA's own matrix products in place of a kernel).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxformer.ops.biases import Bias, bias_block
from jaxformer.ops.dropout import dropout
from jaxformer.ops.masks import Mask, allowed

# Finite, so that a row without any key gives a uniform average instead of NaN.
MASKED = -1e30
# Small blocks skip more of the causal half; more blocks than this only add to the program.
MIN_BLOCK, MAX_BLOCKS = 64, 16


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    mask: Mask,
    *,
    scale: float,
    bias: Bias | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    impl: str = "auto",
) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + bias + mask) v; N query heads share K key-value heads (arXiv:2305.13245).

    Keys and values come with heads before positions, as caches store them: a product then reads them as they lie.
    """
    if impl == "auto":
        impl = "reference" if q_BTNH.shape[1] <= MIN_BLOCK else "blocked"
    terms = Terms(scale, softcap, 0.0 if key is None else dropout_rate)
    return IMPLEMENTATIONS[impl](terms, q_BTNH, k_BKSH, v_BKSH, mask, bias, key)


class Terms(NamedTuple):
    """The numbers of attention that are known before it runs."""

    scale: float
    softcap: float | None
    rate: float


def reference(terms: Terms, q_BTNH, k_BKSH, v_BKSH, mask: Mask, bias: Bias | None, key):
    """The definition, with the whole [T, S] matrix in memory."""
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    logits_BKGTS = _einsum("BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH) * terms.scale
    logits_BKGTS = _biased(softcapped(logits_BKGTS, terms.softcap), mask, bias, (0, T), (0, S))
    p_BKGTS = dropout(jax.nn.softmax(_masked(logits_BKGTS, mask, (0, T), (0, S)), axis=-1), terms.rate, key)
    out_BKGTH = jax.lax.dot_general(p_BKGTS.astype(v_BKSH.dtype), v_BKSH, (((4,), (2,)), ((0, 1), (0, 1))))
    return _by_position(out_BKGTH)


def softcapped(x: Float[Array, "*dims"], cap: float | None) -> Float[Array, "*dims"]:
    """x bent into (-cap, cap)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


# ---------------------------------------------------------------- blocked
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked(terms: Terms, q_BTNH, k_BKSH, v_BKSH, mask: Mask, bias: Bias | None, key):
    return _blocked_forward(terms, q_BTNH, k_BKSH, v_BKSH, mask, bias, key)[0]


def _blocked_forward(terms: Terms, q_BTNH, k_BKSH, v_BKSH, mask: Mask, bias: Bias | None, key):
    """The output, and what the backward pass needs: log-sum-exps instead of probabilities."""
    K = k_BKSH.shape[1]
    q_BKGTH = _by_head(q_BTNH * terms.scale, K)
    outs, log_sums = [], []
    for i, (queries, keys) in enumerate(_blocks(mask, q_BTNH.shape[1], k_BKSH.shape[2])):
        logits = _einsum("BKGTH,BKSH->BKGTS", q_BKGTH[..., slice(*queries), :], k_BKSH[:, :, slice(*keys)])
        logits = _biased(softcapped(logits, terms.softcap), mask, bias, queries, keys)
        logits = _masked(logits, mask, queries, keys)
        peak = logits.max(axis=-1, keepdims=True)
        p = jnp.exp(logits - peak)
        total = p.sum(axis=-1, keepdims=True)
        keep = _kept(p.shape, terms.rate, _block_key(key, i))
        p = (p if keep is None else p * keep).astype(v_BKSH.dtype)
        outs.append(_einsum("BKGTS,BKSH->BKGTH", p, v_BKSH[:, :, slice(*keys)]) / total)
        log_sums.append((peak + jnp.log(total))[..., 0])
    out_BTNH = _by_position(jnp.concatenate(outs, axis=3)).astype(q_BTNH.dtype)
    # Named for rematerialisation: with these two kept, the backward pass need not attend again.
    out_BTNH, log_sums = checkpoint_name((out_BTNH, jnp.concatenate(log_sums, axis=3)), "attention")
    return out_BTNH, (q_BTNH, k_BKSH, v_BKSH, mask, bias, key, out_BTNH, log_sums)


def _blocked_backward(terms: Terms, saved, d_out_BTNH):
    q_BTNH, k_BKSH, v_BKSH, mask, bias, key, out_BTNH, log_sums = saved
    K = k_BKSH.shape[1]
    q_BKGTH = _by_head(q_BTNH * terms.scale, K)
    d_out_BKGTH, out_BKGTH = _by_head(d_out_BTNH, K), _by_head(out_BTNH, K)
    # The softmax's gradient needs sum(p * dp), which equals sum(out * d_out) (arXiv:2205.14135, appendix B.4).
    delta = (d_out_BKGTH * out_BKGTH).astype(jnp.float32).sum(axis=-1)
    dq, d_bias = [], jax.tree.map(jnp.zeros_like, bias)
    dk_BKSH, dv_BKSH = jnp.zeros(k_BKSH.shape, jnp.float32), jnp.zeros(v_BKSH.shape, jnp.float32)
    for i, (queries, keys) in enumerate(_blocks(mask, q_BTNH.shape[1], k_BKSH.shape[2])):
        rows, columns = slice(*queries), slice(*keys)
        q, d_out, k, v = q_BKGTH[..., rows, :], d_out_BKGTH[..., rows, :], k_BKSH[:, :, columns], v_BKSH[:, :, columns]
        # Keys before queries: two of the three products then read p and its gradient as they lie in memory.
        capped = softcapped(_einsum("BKSH,BKGTH->BKGST", k, q), terms.softcap)
        logits, pull_bias = jax.vjp(lambda b, c=capped, q=queries, k=keys: _biased(c, mask, b, q, k, True), bias)
        p = jnp.exp(_masked(logits, mask, queries, keys, transposed=True) - log_sums[..., None, rows])
        keep = _kept((*p.shape[:3], p.shape[4], p.shape[3]), terms.rate, _block_key(key, i))
        dp = _einsum("BKSH,BKGTH->BKGST", v, d_out)
        if keep is not None:
            keep = keep.swapaxes(-1, -2)
            dp = dp * keep
        d_logits = p * (dp - delta[..., None, rows])
        d_bias = jax.tree.map(jnp.add, d_bias, pull_bias(d_logits)[0])
        if terms.softcap is not None:
            d_logits = d_logits * (1.0 - jnp.square(capped / terms.softcap))
        d_logits = d_logits.astype(q.dtype)
        p = (p if keep is None else p * keep).astype(q.dtype)
        dq.append(_einsum("BKGST,BKSH->BKGTH", d_logits, k) * terms.scale)
        dk_BKSH = dk_BKSH.at[:, :, columns].add(_einsum("BKGST,BKGTH->BKSH", d_logits, q))
        dv_BKSH = dv_BKSH.at[:, :, columns].add(_einsum("BKGST,BKGTH->BKSH", p, d_out))
    dq_BTNH = _by_position(jnp.concatenate(dq, axis=3)).astype(q_BTNH.dtype)
    return dq_BTNH, dk_BKSH.astype(k_BKSH.dtype), dv_BKSH.astype(v_BKSH.dtype), None, d_bias, None


blocked.defvjp(_blocked_forward, _blocked_backward)


def _blocks(mask: Mask, T: int, S: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Index ranges of queries, each with the range of keys it may see at all."""
    size = max(MIN_BLOCK, -(-T // MAX_BLOCKS))
    bounds = [(start, min(start + size, T)) for start in range(0, T, size)]
    # An offset moves the queries by an amount known only at run time; then every key stays in reach.
    known = mask.q_offset is None and mask.prefix is None and mask.kv_index is None
    window = S + T if mask.window is None else mask.window
    ahead = 0 if mask.causal else window - 1
    # At least one key: a block of queries beyond all keys in reach must still give numbers.
    reach = [(max(0, min(a - window + 1, S - 1)), min(b + ahead, S)) for a, b in bounds]
    return [(queries, keys if known else (0, S)) for queries, keys in zip(bounds, reach, strict=True)]


def _biased(logits, mask: Mask, bias: Bias | None, queries: tuple[int, int], keys: tuple[int, int], transposed=False):
    """Logits, [.., T, S] or transposed, plus the bias of their block."""
    if bias is None:
        return logits
    bias_BNTS = bias_block(bias, mask, queries, keys)
    if transposed:
        bias_BNTS = bias_BNTS.swapaxes(2, 3)
    heads = logits.shape[1:3]
    return logits + bias_BNTS.reshape(bias_BNTS.shape[0], *heads, *bias_BNTS.shape[2:])


def _masked(logits, mask: Mask, queries: tuple[int, int], keys: tuple[int, int], transposed: bool = False):
    allowed_BTS = allowed(mask, queries, keys)
    if allowed_BTS is None:
        return logits
    if transposed:
        allowed_BTS = allowed_BTS.swapaxes(1, 2)
    return jnp.where(allowed_BTS[:, None, None], logits, MASKED)


def _kept(shape: tuple[int, ...], rate: float, key: jax.Array | None) -> Array | None:
    """What dropout multiplies probabilities with; the same in both passes."""
    return None if key is None or rate == 0.0 else dropout(jnp.ones(shape, jnp.float32), rate, key)


def _by_head(q_BTNH, K: int):
    """Heads before positions, so that the products need no further transposes."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)


def _by_position(x_BKGTH):
    B, K, G, T, H = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


def _block_key(key: jax.Array | None, block: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, block)


_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)

IMPLEMENTATIONS = {"reference": reference, "blocked": blocked}
