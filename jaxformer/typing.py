"""Array aliases, the types of tokens and batches, and the letters that name dimensions.

The letters below name dimensions everywhere: in variable suffixes (`q_BTNH`), einsum strings and docs.

    B batch    T query/target length    S key/source length    D embed    N query heads    K kv heads
    G = N / K  H head dim               F mlp dim              V vocab    E experts        L layers

A suffix names the global shape, never the shape of a shard.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

PyTree = Any
Params = Mapping[str, Any]  # nested dictionaries of arrays
Key = UInt32[Array, "2"]  # raw key data: checkpoints hold plain arrays only


class Tokens(NamedTuple):
    """Input of an encoder or a decoder."""

    ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # restart at 0 with every packed document
    segments: Int[Array, "B T"]  # 1, 2, ... per packed document; 0 is padding
    types: Int[Array, "B T"] | None = None  # token types, for models with type embeddings; None: all 0
    prefix: Bool[Array, "B T"] | None = None  # tokens that earlier tokens may attend to as well; None: no token


class Batch(NamedTuple):
    """The inputs of one training or evaluation step: NumPy arrays on the host, global arrays on the devices.

    A field that an objective does not use is None, which is an empty pytree.
    """

    tokens: Tokens  # read by the decoder, or by the encoder of an encoder-only model
    targets: Int[Array, "B T"] | None = None  # [B, P] if only P positions are predicted
    weights: Float[Array, "B T"] | None = None  # 0 where a position has no target; [B] if whole rows are labelled
    source: Tokens | None = None  # read by the encoder of an encoder-decoder
    labels: Array | None = None  # labels of whole rows: class ids [B], or numbers [B, labels]
    predicted: Int[Array, "B P"] | None = None  # positions that the targets belong to; None: all positions
    negatives: Int[Array, "B T P N"] | None = None  # random words for each predicted one; targets are then [B, T, C]


class BatchLayout(NamedTuple):
    """Sizes of a batch, which determine its fields and their shapes."""

    length: int
    source_length: int = 0
    """Length of `Batch.source`; 0 if there is none."""
    num_predictions: int = 0
    """Number of predicted positions per row; 0 if every position is predicted."""
    has_types: bool = False
    """Whether `Batch.tokens` has token types."""
    has_prefix: bool = False
    """Whether `Batch.tokens` marks the tokens of a bidirectional prefix."""
    num_labels: int = 0
    """Number of labels per row; 0 if rows are not labelled."""
    float_labels: bool = False
    """Whether labels are numbers, as in regression and multi-label classification, not the id of one class."""
    num_contexts: int = 0
    """Number of context words per position, which are then the targets; 0 if targets are single tokens."""
    negatives: tuple[int, int] = (0, 0)
    """Number of predicted words per position, and of random words for each of them."""

    @property
    def loss_length(self) -> int:
        """Number of positions per row whose logits are computed."""
        return self.num_predictions or self.length


def abstract_batch(layout: BatchLayout, num_rows: int) -> Batch:
    """Shapes and dtypes of the fields of a batch."""

    def array(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *shape), dtype)

    def tokens(length: int) -> Tokens:
        ids = array(length)
        return Tokens(ids, ids, ids)

    target, source = tokens(layout.length), tokens(layout.source_length) if layout.source_length else None
    if layout.has_types:
        target = target._replace(types=target.ids)
    if layout.has_prefix:
        target = target._replace(prefix=array(layout.length, dtype=jnp.bool_))
    if layout.num_labels:
        labels = array(layout.num_labels, dtype=jnp.float32) if layout.float_labels else array()
        return Batch(target, weights=array(dtype=jnp.float32), source=source, labels=labels)
    if layout.num_contexts:
        contexts = (layout.length, layout.num_contexts)
        negatives = array(layout.length, *layout.negatives)
        return Batch(target, array(*contexts), array(*contexts, dtype=jnp.float32), negatives=negatives)
    targets, weights = array(layout.loss_length), array(layout.loss_length, dtype=jnp.float32)
    return Batch(target, targets, weights, source, predicted=targets if layout.num_predictions else None)


def tokens_from_ids(ids: Int[Array, "B T"], mask: Int[Array, "B T"] | None = None) -> Tokens:
    """Tokens of unpacked rows; `mask` is 1 for real tokens, 0 for padding on either side.

    Positions count real tokens only, so left padding does not shift them."""
    if mask is None:
        mask = jnp.ones_like(ids)
    mask = mask.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)
    return Tokens(ids, positions, mask)


__all__ = [
    "Array",
    "Batch",
    "BatchLayout",
    "Bool",
    "Float",
    "Int",
    "Key",
    "Params",
    "PyTree",
    "Tokens",
    "abstract_batch",
    "tokens_from_ids",
]
