"""Array aliases and the letter legend.

The letters below name dimensions everywhere: in variable suffixes (`q_BTNH`), einsum strings and docs.

    B batch    T query/target length    S key/source length    D embed    N query heads    K kv heads
    G = N / K  H head dim               F mlp dim              V vocab    E experts        L layers

A suffix is the logical shape, never the shape of a shard.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

PyTree = Any
Params = Mapping[str, Any]  # nested dictionaries of arrays
Key = UInt32[Array, "2"]  # raw key data: checkpoints hold plain arrays only


class Tokens(NamedTuple):
    """One side of a batch: what the encoder or the decoder reads."""

    ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # restart at 0 with every packed document
    segments: Int[Array, "B T"]  # 1, 2, ... per packed document; 0 is padding
    types: Int[Array, "B T"] | None = None  # for models that tell kinds of tokens apart; none is all 0


def tokens_from_ids(ids: Int[Array, "B T"], mask: Int[Array, "B T"] | None = None) -> Tokens:
    """Unpacked rows; `mask` is 1 on real tokens. Positions count real tokens, so left padding is harmless."""
    if mask is None:
        mask = jnp.ones_like(ids)
    mask = mask.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)
    return Tokens(ids, positions, mask)


def model_inputs(batch: Mapping[str, Array]) -> tuple[Tokens, Tokens | None]:
    """The decoder's (or only) side and the encoder's side of a batch."""
    target = Tokens(batch["tokens"], batch["positions"], batch["segments"])
    if "inputs" not in batch:
        return target, None
    return target, Tokens(batch["inputs"], batch["input_positions"], batch["input_segments"])


__all__ = ["Array", "Bool", "Float", "Int", "Key", "Params", "PyTree", "Tokens", "model_inputs", "tokens_from_ids"]
