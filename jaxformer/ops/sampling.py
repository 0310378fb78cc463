"""Choosing the next token from logits: filters, then a draw that depends on its own row alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def top_k_filter(logits: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """Keep the k largest logits of each row (ties with the k-th stay)."""
    k = min(k, logits.shape[-1])
    threshold = jax.lax.top_k(logits, k)[0][:, -1:]
    return jnp.where(logits < threshold, -jnp.inf, logits)


def top_p_filter(logits: Float[Array, "B V"], p: float) -> Float[Array, "B V"]:
    """Keep the smallest set of likeliest tokens whose probability reaches p (arXiv:1904.09751); never empty."""
    descending = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.where(before < p, descending, jnp.inf)
    return jnp.where(logits < kept.min(axis=-1, keepdims=True), -jnp.inf, logits)


def sample(
    logits: Float[Array, "B V"],
    keys: jax.Array,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, " B"]:
    """One token a row; temperature 0 is the argmax, and then keys and filters do not matter."""
    logits = logits.astype(jnp.float32)
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None:
        logits = top_k_filter(logits, top_k)
    if top_p is not None and top_p < 1.0:
        logits = top_p_filter(logits, top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
