"""Input embeddings, the output head and the pooler."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import EmbeddingConfig, HeadConfig, Init, Learned, PoolerConfig, TransformConfig
from jaxformer.layers.linear import Linear, Norm, Runtime, initializer, weight_param
from jaxformer.ops.elementwise import ACTIVATIONS, apply_softcap, dropout
from jaxformer.ops.positions import sinusoidal
from jaxformer.ops.reductions import pool
from jaxformer.ops.weights import DenseTable, Table, gather_rows
from jaxformer.sharding import constrain
from jaxformer.typing import Tokens


class Embedding(nn.Module):
    """The sum of token, position and token type embeddings.

    With `both_sides`, the encoder of an encoder-decoder has its own position table and norm, named `source_*`, and with
    `source_vocab_size` also its own token table.
    """

    config: EmbeddingConfig
    vocab_size: int
    embed_dim: int
    kernel_init: Init
    runtime: Runtime = Runtime()
    both_sides: bool = False
    source_vocab_size: int | None = None

    def setup(self) -> None:
        cfg = self.config
        self.tokens = self._token_table("tokens", self.vocab_size)
        if cfg.num_types:
            self.types = self.param("types", self._init(None), (cfg.num_types, self.embed_dim))
        self.positions, self.norm = self._position_table("positions"), self._norm()
        if self.both_sides:
            self.source_positions, self.source_norm = self._position_table("source_positions"), self._norm()
        if self.source_vocab_size is not None:
            self.source_tokens = self._token_table("source_tokens", self.source_vocab_size)

    def __call__(self, tokens: Tokens, key: jax.Array | None = None, source: bool = False) -> jax.Array:
        """`source` selects the tables and the norm of the encoder of an encoder-decoder."""
        cfg, dtype = self.config, self.runtime.dtype
        token_table, position_table, norm = self.tokens, self.positions, self.norm
        if source and self.both_sides:
            position_table, norm = self.source_positions, self.source_norm
        if source and self.source_vocab_size is not None:
            token_table = self.source_tokens
        x_BTD = token_table.take(tokens.ids, dtype)
        if cfg.scale:
            x_BTD = x_BTD * self.embed_dim**0.5
        if cfg.num_types:
            types_BT = jnp.zeros_like(tokens.ids) if tokens.types is None else tokens.types
            x_BTD = x_BTD + self.types.astype(dtype)[types_BT]
        if position_table is not None:
            positions_BT = tokens.positions + cfg.position.offset
            x_BTD = x_BTD + gather_rows(position_table.astype(dtype), "position")[positions_BT]
        elif cfg.position is not None:
            x_BTD = x_BTD + sinusoidal(tokens.positions, self.embed_dim, cfg.position).astype(dtype)
        if norm is not None:
            x_BTD = norm(x_BTD)
        return constrain(dropout(x_BTD, cfg.dropout, key), "batch", "length", None)

    def _token_table(self, name: str, vocab_size: int) -> Table:
        return weight_param(self, name, self._init("vocab"), (vocab_size, self.embed_dim), DenseTable)

    def _position_table(self, name: str) -> jax.Array | None:
        position = self.config.position
        if not isinstance(position, Learned):
            return None
        return self.param(name, self._init("position"), (position.max_length + position.offset, self.embed_dim))

    def _norm(self) -> Norm | None:
        return None if self.config.norm is None else Norm(self.config.norm)

    def _init(self, axis: str | None) -> nn.initializers.Initializer:
        # num_in=0: a lookup does not sum over the vocabulary, so the vocabulary size is not a fan-in.
        return nn.with_logical_partitioning(initializer(self.kernel_init, num_in=0), (axis, "embed"))


class Transform(nn.Module):
    """A dense layer of the model's width, an activation and optionally a norm."""

    config: TransformConfig
    embed_dim: int
    kernel_init: Init
    runtime: Runtime = Runtime()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, shape = self.config, (self.embed_dim, self.embed_dim)
        dense = Linear(shape, ("embed", "mlp"), self.kernel_init, self.runtime, bias=cfg.bias, name="dense")
        x = ACTIVATIONS[cfg.activation](dense(x))
        return x if cfg.norm is None else Norm(cfg.norm, name="norm")(x)


class Head(nn.Module):
    """The output head: logits in float32; a tied head multiplies by the token embedding table."""

    config: HeadConfig
    vocab_size: int
    embed_dim: int
    kernel_init: Init
    runtime: Runtime = Runtime()

    def setup(self) -> None:
        cfg = self.config
        if cfg.transform is not None:
            self.transform = Transform(cfg.transform, self.embed_dim, self.kernel_init, self.runtime)
        if not cfg.tied:
            shape, axes = (self.embed_dim, self.vocab_size), ("embed", "vocab")
            self.output = Linear(shape, axes, self.kernel_init, self.runtime, out_dtype=jnp.float32)
        if cfg.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",))
            self.bias = self.param("bias", zeros, (self.vocab_size,))

    def __call__(self, x_BTD: jax.Array, table: Table) -> jax.Array:
        cfg, x_BTD = self.config, self.features(x_BTD)
        if cfg.tied:
            logits_BTV = table.matmul(x_BTD, 1, jnp.float32, self.runtime.platform)
        else:
            logits_BTV = self.output(x_BTD)
        if cfg.bias:
            logits_BTV = logits_BTV + self.bias
        return constrain(apply_softcap(logits_BTV, cfg.softcap), "batch", "length", "vocab")

    def features(self, x_BTD: jax.Array) -> jax.Array:
        """What is multiplied by the output matrix."""
        if self.config.transform is not None:
            x_BTD = self.transform(x_BTD)
        if self.config.scale:
            x_BTD = x_BTD * self.embed_dim**-0.5
        return x_BTD.astype(self.runtime.dtype)


class Pooler(nn.Module):
    """Pools every row into one vector, or keeps every token, and projects to class logits in float32 if configured."""

    config: PoolerConfig
    embed_dim: int
    kernel_init: Init
    runtime: Runtime = Runtime()

    def setup(self) -> None:
        cfg = self.config
        if cfg.transform is not None:
            self.transform = Transform(cfg.transform, self.embed_dim, self.kernel_init, self.runtime)
        if cfg.num_classes is not None:
            shape, axes = (self.embed_dim, cfg.num_classes), ("embed", None)
            self.classes = Linear(shape, axes, self.kernel_init, self.runtime, bias=cfg.bias, dtype=jnp.float32)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Class logits [B, C], or pooled vectors [B, D] if there are no classes; pooled rows must not be packed."""
        cfg = self.config
        x = x_BTD if cfg.pooling == "none" else pool(x_BTD, segments_BT, cfg.pooling)
        if cfg.transform is not None:
            x = self.transform(x)
        return x if cfg.num_classes is None else self.classes(dropout(x, cfg.dropout, key))
