"""Scaled dot-product attention: one entry, `attend`, and its implementations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.ops.dropout import dropout
from jaxformer.ops.masks import Mask, allowed

# Finite, so that a row without any key gives a uniform average instead of NaN.
MASKED = -1e30


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask: Mask,
    *,
    scale: float,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    impl: str = "auto",
) -> Float[Array, "B T N H"]:
    """softmax(scale * q k^T + mask) v; N query heads share K key-value heads (arXiv:2305.13245)."""
    function = IMPLEMENTATIONS["reference" if impl == "auto" else impl]
    return function(q_BTNH, k_BSKH, v_BSKH, mask, scale, dropout_rate, key)


def reference(q_BTNH, k_BSKH, v_BSKH, mask: Mask, scale, dropout_rate, key):
    """The definition, with the whole [T, S] matrix in memory."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * scale
    allowed_BTS = allowed(mask, (0, T), (0, S))
    if allowed_BTS is not None:
        logits_BKGTS = jnp.where(allowed_BTS[:, None, None], logits_BKGTS, MASKED)
    p_BKGTS = dropout(jax.nn.softmax(logits_BKGTS, axis=-1), dropout_rate, key)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS.astype(v_BSKH.dtype), v_BSKH)
    return out_BTKGH.reshape(B, T, N, H)


IMPLEMENTATIONS = {"reference": reference}
