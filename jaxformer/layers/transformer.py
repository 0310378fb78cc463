"""The model class of all architectures: embeddings, an optional encoder stack, an optional decoder stack, a head.

Every method is a pure function of parameters and explicit arguments: `Transformer(cfg).apply({"params": p}, ...)`.
"""

from collections.abc import Sequence

import jax
from flax import linen as nn

from jaxformer.config import ModelConfig
from jaxformer.layers.attention import KeysValues
from jaxformer.layers.block import Context, LayerCache
from jaxformer.layers.embed import Embedding, Head, Pooler
from jaxformer.layers.linear import Runtime
from jaxformer.layers.recurrent import Recurrent
from jaxformer.layers.stack import Stack
from jaxformer.ops.elementwise import split_key
from jaxformer.typing import Array, Float, Int, Tokens


class Transformer(nn.Module):
    config: ModelConfig
    runtime: Runtime = Runtime()

    def setup(self) -> None:
        cfg = self.config
        shared = (cfg.vocab_size, cfg.embed_dim)
        sides = (cfg.shape == "encoder-decoder", cfg.source_vocab_size)
        self.embedding = Embedding(cfg.embedding, *shared, cfg.init.embedding, self.runtime, *sides)
        if cfg.encoder is not None:
            self.encoder = Stack(cfg.encoder, cfg.embed_dim, cfg.init, self.runtime)
        if cfg.decoder is not None:
            kind = Recurrent if cfg.decoder.kind == "recurrent" else Stack
            self.decoder = kind(cfg.decoder, cfg.embed_dim, cfg.init, self.runtime)
        if cfg.head is not None:
            self.head = Head(cfg.head, *shared, cfg.init.kernel, self.runtime)
        if cfg.pooler is not None:
            self.pooler = Pooler(cfg.pooler, cfg.embed_dim, cfg.init.kernel, self.runtime)

    def __call__(
        self, tokens: Tokens, source: Tokens | None = None, key: jax.Array | None = None
    ) -> Float[Array, "B T V"]:
        """Logits of every position; hidden states [B, T, D] if the model has no head."""
        hidden_BTD = self.hidden(tokens, source, key)
        return hidden_BTD if self.config.head is None else self.logits(hidden_BTD)

    def hidden(
        self, tokens: Tokens, source: Tokens | None = None, key: jax.Array | None = None
    ) -> Float[Array, "B T D"]:
        """Output of the last stack; `source` is the input of the encoder of an encoder-decoder."""
        return self.hidden_and_router_loss(tokens, source, key)[0]

    def hidden_and_router_loss(
        self, tokens: Tokens, source: Tokens | None = None, key: jax.Array | None = None
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""] | None]:
        """Like `hidden`, with the auxiliary router loss as a mean over tokens; None without experts."""
        if self.config.shape == "embedding-only":
            return self.embedding(tokens, key), None
        if self.config.decoder is None:
            return self._encode(tokens, key)
        keys = split_key(key, 3)
        source_BSD, source_loss = (None, None) if source is None else self._encode(source, keys[0])
        context = Context(
            tokens.positions,
            tokens.segments,
            source_BSD,
            None if source is None else source.segments,
            prefix_BT=tokens.prefix,
        )
        hidden_BTD, loss = self.decoder(self.embedding(tokens, keys[1]), context, keys[2])
        losses = [part for part in (source_loss, loss) if part is not None]
        return hidden_BTD, sum(losses) if losses else None

    def encode(self, source: Tokens) -> Float[Array, "B S D"]:
        return self._encode(source, None)[0]

    def pool(self, tokens: Tokens, source: Tokens | None = None, key: jax.Array | None = None) -> Float[Array, "B C"]:
        """Class logits, [B, T, C] if the pooler labels tokens; one vector [B, D] per row if it has no classes."""
        return self.pool_and_router_loss(tokens, source, key)[0]

    def pool_and_router_loss(
        self, tokens: Tokens, source: Tokens | None = None, key: jax.Array | None = None
    ) -> tuple[Float[Array, "B C"], Float[Array, ""] | None]:
        """Like `pool`, with the auxiliary router loss as a mean over tokens; None without experts."""
        keys = split_key(key, 2)
        hidden_BTD, router_loss = self.hidden_and_router_loss(tokens, source, keys[0])
        return self.pooler(hidden_BTD, tokens.segments, keys[1]), router_loss

    def logits(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return self.head(hidden_BTD, self.embedding.tokens)

    def head_features(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the head multiplies by its output matrix."""
        return self.head.features(hidden_BTD)

    def cross_keys_values(self, source_BSD: Float[Array, "B S D"]) -> tuple[KeysValues, ...]:
        """Keys and values of the source for each decoder layer or scan of layers, projected once per request."""
        return self.decoder.cross_keys_values(source_BSD)

    def extend(
        self,
        tokens: Tokens,
        start_B: Int[Array, " B"] | None,
        caches: Sequence[LayerCache],
        source_segments_BS: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
        """Hidden states of new tokens that follow those in the caches, and the updated caches.

        Args:
          start_B: number of tokens in the caches; None if they are empty.
        """
        context = Context(
            tokens.positions,
            tokens.segments,
            source_segments_BS=source_segments_BS,
            start_B=start_B,
            prefix_BT=tokens.prefix,
        )
        return self.decoder.extend(self.embedding(tokens), context, caches)

    def _encode(self, source: Tokens, key: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        keys = split_key(key, 2)
        x_BSD = self.embedding(source, keys[0], source=True)
        return self.encoder(x_BSD, Context(source.positions, source.segments), keys[1])
