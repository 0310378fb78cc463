"""What stands before and after the stacks: embeddings, the output projection, the pooler."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import EmbeddingConfig, HeadConfig, Init, Learned, PoolerConfig, TransformConfig
from jaxformer.layers.initializers import initializer
from jaxformer.layers.linear import Linear, stored_matrix
from jaxformer.layers.norm import Norm
from jaxformer.ops.activations import ACTIVATIONS
from jaxformer.ops.attention import softcapped
from jaxformer.ops.dropout import dropout
from jaxformer.ops.pooling import pooled
from jaxformer.ops.positions import sinusoidal
from jaxformer.ops.quantized import Int8Matrix, dequantized, matmul
from jaxformer.sharding import constrain
from jaxformer.typing import Tokens


class Embedding(nn.Module):
    """Token vectors plus those of positions and types.

    With `both_sides`, the encoder of an encoder-decoder has position tables and norms of its own, named `source_*`.
    """

    config: EmbeddingConfig
    vocab_size: int
    embed_dim: int
    kernel_init: Init
    dtype: Any = jnp.float32
    both_sides: bool = False

    def setup(self) -> None:
        cfg = self.config
        self.tokens = self._table("tokens", "vocab", self.vocab_size)
        if cfg.num_types:
            self.types = self._table("types", None, cfg.num_types)
        for side in ("", "source_") if self.both_sides else ("",):
            if isinstance(cfg.position, Learned):
                rows = cfg.position.max_length + cfg.position.offset
                setattr(self, f"{side}positions", self._table(f"{side}positions", "position", rows))
            if cfg.norm is not None:
                setattr(self, f"{side}norm", Norm(cfg.norm))

    def __call__(self, tokens: Tokens, key: jax.Array | None = None, source: bool = False) -> jax.Array:
        """`source` takes the encoder's side of an encoder-decoder."""
        cfg, side = self.config, "source_" if source and self.both_sides else ""
        x_BTD = self._vectors(tokens.ids)
        if cfg.scale:
            x_BTD = x_BTD * self.embed_dim**0.5
        if cfg.num_types:
            types_BT = jnp.zeros_like(tokens.ids) if tokens.types is None else tokens.types
            x_BTD = x_BTD + self.types.astype(self.dtype)[types_BT]
        if isinstance(cfg.position, Learned):
            table = _rows(getattr(self, f"{side}positions").astype(self.dtype), "position")
            x_BTD = x_BTD + table[tokens.positions + cfg.position.offset]
        elif cfg.position is not None:
            x_BTD = x_BTD + sinusoidal(tokens.positions, self.embed_dim, cfg.position).astype(self.dtype)
        if cfg.norm is not None:
            x_BTD = getattr(self, f"{side}norm")(x_BTD)
        return constrain(dropout(x_BTD, cfg.dropout, key), "batch", "length", None)

    def _vectors(self, ids_BT: jax.Array) -> jax.Array:
        if isinstance(self.tokens, Int8Matrix):
            values_VD, scales_V = _rows(self.tokens.values, "vocab"), constrain(self.tokens.scales, "vocab")
            return dequantized(Int8Matrix(values_VD[ids_BT], scales_V[ids_BT]), self.dtype)
        return _rows(self.tokens.astype(self.dtype), "vocab")[ids_BT]

    def _table(self, name: str, axis: str | None, rows: int) -> jax.Array | Int8Matrix:
        matrix = stored_matrix(self, name)
        if matrix is not None:
            return matrix
        # A row is one token's vector: nothing is summed over the vocabulary, so its size is not a fan-in.
        draw = initializer(self.kernel_init, num_in=0)
        return self.param(name, nn.with_logical_partitioning(draw, (axis, "embed")), (rows, self.embed_dim))


def _rows(table: jax.Array, axis: str) -> jax.Array:
    """The table gathered over `embed`: looking up split vectors would make XLA move activations instead."""
    return constrain(table, axis, None)


class Transform(nn.Module):
    """A dense layer of the model's width, an activation, perhaps a norm."""

    config: TransformConfig
    embed_dim: int
    kernel_init: Init
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, shape = self.config, (self.embed_dim, self.embed_dim)
        dense = Linear(shape, ("embed", "mlp"), self.kernel_init, bias=cfg.bias, dtype=self.dtype, name="dense")
        x = ACTIVATIONS[cfg.activation](dense("...D,DE->...E", x))
        return x if cfg.norm is None else Norm(cfg.norm, name="norm")(x)


class Head(nn.Module):
    """Logits in float32, from the token table if tied."""

    config: HeadConfig
    vocab_size: int
    embed_dim: int
    kernel_init: Init
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BTD: jax.Array, table_VD: jax.Array | Int8Matrix) -> jax.Array:
        cfg = self.config
        if cfg.transform is not None:
            x_BTD = Transform(cfg.transform, self.embed_dim, self.kernel_init, self.dtype, name="transform")(x_BTD)
        if cfg.scale:
            x_BTD = x_BTD * self.embed_dim**-0.5
        if cfg.tied and isinstance(table_VD, Int8Matrix):
            logits_BTV = matmul(x_BTD, table_VD, jnp.float32)
        elif cfg.tied:
            table_VD = table_VD.astype(self.dtype)
            logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
        else:
            shape, axes = (self.embed_dim, self.vocab_size), ("embed", "vocab")
            output = Linear(shape, axes, self.kernel_init, dtype=self.dtype, out_dtype=jnp.float32, name="output")
            logits_BTV = output("BTD,DV->BTV", x_BTD)
        if cfg.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",))
            logits_BTV = logits_BTV + self.param("bias", zeros, (self.vocab_size,))
        return constrain(softcapped(logits_BTV, cfg.softcap), "batch", "length", "vocab")


class Pooler(nn.Module):
    """One vector a row, and class logits in float32 from it."""

    config: PoolerConfig
    embed_dim: int
    kernel_init: Init
    dtype: Any = jnp.float32

    def setup(self) -> None:
        cfg = self.config
        self.transform = Transform(cfg.transform, self.embed_dim, self.kernel_init, self.dtype)
        if cfg.num_classes is not None:
            shape, axes = (self.embed_dim, cfg.num_classes), ("embed", None)
            self.classes = Linear(shape, axes, self.kernel_init, bias=True, dtype=jnp.float32)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Class logits [B, C], or the vectors [B, D] of a pooler without classes; rows hold one text each."""
        x_BD = self.transform(pooled(x_BTD, segments_BT, self.config.pooling))
        if self.config.num_classes is None:
            return x_BD
        return self.classes("BD,DC->BC", dropout(x_BD, self.config.dropout, key))
