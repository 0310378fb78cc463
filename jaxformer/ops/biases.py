"""Biases that attention adds to its logits, as functions of the distance between query and key.

Like a mask, a bias is passed to attention as a small spec; `bias_block` computes it for a block of queries and keys.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.ops.masks import Mask, distances


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlopeBias:
    """ALiBi: -slope * |distance|, with one slope per head (arXiv:2108.12409, section 3)."""

    num_heads: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BucketedBias:
    """A learned value for each head and bucket of distances (arXiv:1910.10683, section 2.1)."""

    table_RN: Float[Array, "R N"]
    max_distance: int = field(metadata={"static": True})
    causal: bool = field(metadata={"static": True})


Bias = SlopeBias | BucketedBias


def bias_block(bias: Bias, mask: Mask, queries: tuple[int, int], keys: tuple[int, int]) -> Float[Array, "#B N T S"]:
    """The bias for ranges [start, stop) of queries and keys."""
    distance_BTS = distances(mask, queries, keys)
    if isinstance(bias, SlopeBias):
        slopes_N = jnp.asarray(head_slopes(bias.num_heads), jnp.float32)
        return -slopes_N[:, None, None] * jnp.abs(distance_BTS)[:, None].astype(jnp.float32)
    bucket_BTS = distance_buckets(distance_BTS, bias.table_RN.shape[0], bias.max_distance, bias.causal)
    return jnp.moveaxis(bias.table_RN.astype(jnp.float32)[bucket_BTS], -1, 1)


def head_slopes(num_heads: int) -> list[float]:
    """ALiBi slopes: a geometric sequence if the number of heads is a power of two.

    Otherwise it is the sequence for the next lower power of two, followed by every other term of the sequence for the
    next higher one.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    terms = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return terms + between[: num_heads - power]


def distance_buckets(
    distance: Int[Array, "*dims"], num_buckets: int, max_distance: int, causal: bool
) -> Int[Array, "*dims"]:
    """The bucket of each distance: small distances have one each, larger ones share buckets of logarithmic width.

    `distance` is key minus query. Distances beyond `max_distance` share the last bucket. Without `causal`, keys after
    the query use the second half of the buckets.
    """
    first = jnp.zeros_like(distance)
    if not causal:
        num_buckets //= 2
        first = jnp.where(distance > 0, num_buckets, 0)
    steps = jnp.maximum(-distance, 0) if causal else jnp.abs(distance)
    exact = num_buckets // 2
    shared = num_buckets - exact
    # Bucket edges are Python integers: a logarithm in XLA rounds differently under jit than op by op, which would move
    # distances on an edge to another bucket.
    edges = (math.ceil(exact * (max_distance / exact) ** (i / shared) - 1e-6) for i in range(1, shared))
    wide = exact + sum((steps >= edge).astype(jnp.int32) for edge in edges)
    return first + jnp.where(steps < exact, steps, wide)
