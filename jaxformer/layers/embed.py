"""Token and position embeddings, and the output projection that may share the token table."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import EmbeddingConfig, HeadConfig, Init
from jaxformer.layers.initializers import initializer
from jaxformer.layers.linear import Linear
from jaxformer.layers.norm import Norm
from jaxformer.ops.dropout import dropout
from jaxformer.ops.positions import sinusoidal
from jaxformer.sharding import constrain
from jaxformer.typing import Tokens


class Embedding(nn.Module):
    config: EmbeddingConfig
    vocab_size: int
    embed_dim: int
    kernel_init: Init
    dtype: Any = jnp.float32

    def setup(self) -> None:
        # A row is one token's vector: nothing is summed over the vocabulary, so its size is not a fan-in.
        draw = initializer(self.kernel_init, num_in=0)
        table = nn.with_logical_partitioning(draw, ("vocab", "embed"))
        self.tokens = self.param("tokens", table, (self.vocab_size, self.embed_dim))
        position = self.config.position
        if position is not None and position.kind == "learned":
            table = nn.with_logical_partitioning(draw, ("position", "embed"))
            self.positions = self.param("positions", table, (position.max_length, self.embed_dim))
        if self.config.norm is not None:
            self.norm = Norm(self.config.norm)

    def __call__(self, tokens: Tokens, key: jax.Array | None = None) -> jax.Array:
        cfg = self.config
        x_BTD = _rows(self.tokens.astype(self.dtype), "vocab")[tokens.ids]
        if cfg.scale:
            x_BTD = x_BTD * self.embed_dim**0.5
        if cfg.position is not None:
            x_BTD = x_BTD + self._position_vectors(tokens.positions)
        if cfg.norm is not None:
            x_BTD = self.norm(x_BTD)
        return constrain(dropout(x_BTD, cfg.dropout, key), "batch", "length", None)

    def _position_vectors(self, positions_BT: jax.Array) -> jax.Array:
        if self.config.position.kind == "learned":
            return _rows(self.positions.astype(self.dtype), "position")[positions_BT]
        return sinusoidal(positions_BT, self.embed_dim).astype(self.dtype)


def _rows(table: jax.Array, axis: str) -> jax.Array:
    """The table gathered over `embed`: looking up split vectors would make XLA move activations instead."""
    return constrain(table, axis, None)


class Head(nn.Module):
    """Logits in float32, from the token table if tied."""

    config: HeadConfig
    vocab_size: int
    embed_dim: int
    kernel_init: Init
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BTD: jax.Array, table_VD: jax.Array) -> jax.Array:
        if self.config.tied:
            table_VD = table_VD.astype(self.dtype)
            logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
        else:
            shape, axes = (self.embed_dim, self.vocab_size), ("embed", "vocab")
            output = Linear(shape, axes, self.kernel_init, dtype=self.dtype, out_dtype=jnp.float32, name="output")
            logits_BTV = output("BTD,DV->BTV", x_BTD)
        if self.config.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",))
            logits_BTV = logits_BTV + self.param("bias", zeros, (self.vocab_size,))
        return constrain(logits_BTV, "batch", "length", "vocab")
