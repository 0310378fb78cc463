"""One layer: attention, cross-attention if the block has it, MLP, each with its norms and residual."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from flax import linen as nn

from jaxformer.config import AttentionConfig, BlockConfig, InitConfig
from jaxformer.layers.attention import Attention, Cache, KeysValues
from jaxformer.layers.mlp import Mlp
from jaxformer.layers.moe import Moe
from jaxformer.layers.norm import Norm
from jaxformer.layers.runtime import Runtime
from jaxformer.ops.biases import Bias
from jaxformer.ops.dropout import dropout, split_key
from jaxformer.ops.masks import Mask
from jaxformer.sharding import constrain
from jaxformer.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What all layers of a stack share about the rows they work on."""

    positions_BT: Int[Array, "B T"]
    segments_BT: Int[Array, "B T"]
    source_BSD: Float[Array, "B S D"] | None = None
    """Output of the encoder; not needed when the caches hold its keys and values."""
    source_segments_BS: Int[Array, "B S"] | None = None
    start_B: Int[Array, " B"] | None = None
    """With caches: the index of the first of the T tokens in its row."""
    bias: Bias | None = None
    """Of all self-attention in the stack."""


class LayerCache(NamedTuple):
    """What one layer carries from token to token, and what it computed once per request."""

    attention: Cache
    cross: KeysValues | None = None


class BlockResult(NamedTuple):
    x_BTD: Float[Array, "B T D"]
    cache: LayerCache | None
    router_loss: Float[Array, ""] | None  # none without experts


class Block(nn.Module):
    config: BlockConfig
    embed_dim: int
    init_config: InitConfig
    output_scale: float
    runtime: Runtime

    def setup(self) -> None:
        cfg = self.config
        shared = (self.embed_dim, self.init_config.kernel, self.output_scale, self.runtime)
        self.attention = Attention(cfg.attention, *shared, self._query_scale(cfg.attention))
        self.mlp = (Moe if cfg.mlp.kind == "moe" else Mlp)(cfg.mlp, *shared)
        self.mlp_norm = Norm(cfg.norm)
        if cfg.attention_norm:
            self.attention_norm = Norm(cfg.norm)
        if cfg.cross_attention is not None:
            self.cross_attention = Attention(cfg.cross_attention, *shared, self._query_scale(cfg.cross_attention))
            self.cross_attention_norm = Norm(cfg.norm)
        if cfg.placement == "sandwich":
            self.attention_post_norm, self.mlp_post_norm = Norm(cfg.norm), Norm(cfg.norm)
            if cfg.cross_attention is not None:
                self.cross_attention_post_norm = Norm(cfg.norm)

    def _query_scale(self, attention: AttentionConfig) -> float:
        return attention.head_dim**-0.5 if self.init_config.scaled_queries else 1.0

    def cross_keys_values(self, source_BSD: jax.Array) -> KeysValues:
        return self.cross_attention.keys_values(source_BSD)

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: LayerCache | None = None, key: jax.Array | None = None
    ) -> BlockResult:
        keys = split_key(key, 5)
        router_loss = None

        def self_attention(h_BTD):
            nonlocal cache
            kv = self.attention.keys_values(h_BTD, context.positions_BT)
            kv, mask, cache = self._extended(kv, context, cache)
            return self.attention(h_BTD, kv, mask, context.positions_BT, context.bias, keys[0])

        def cross_attention(h_BTD):
            kv = self.cross_keys_values(context.source_BSD) if cache is None else cache.cross
            # Several rows may read one source, as beams do: they are then so many queries of one row.
            num_sources = kv.k_BKSH.shape[0]
            segments = context.segments_BT.reshape(num_sources, -1)
            mask = Mask(q_segments=segments, kv_segments=context.source_segments_BS)
            folded = h_BTD.reshape(num_sources, -1, h_BTD.shape[-1])
            return self.cross_attention(folded, kv, mask, key=keys[2]).reshape(h_BTD.shape)

        def feed_forward(h_BTD):
            nonlocal router_loss
            if self.config.mlp.kind == "mlp":
                return self.mlp(h_BTD)
            y_BTD, router_loss = self.mlp(h_BTD, context.segments_BT)
            return y_BTD

        x_BTD = self._residual(x_BTD, self_attention, "attention", keys[1])
        if self.config.cross_attention is not None:
            x_BTD = self._residual(x_BTD, cross_attention, "cross_attention", keys[3])
        x_BTD = self._residual(x_BTD, feed_forward, "mlp", keys[4])
        return BlockResult(constrain(x_BTD, "batch", "length", None), cache, router_loss)

    def _extended(
        self, kv: KeysValues, context: Context, cache: LayerCache | None
    ) -> tuple[KeysValues, Mask, LayerCache | None]:
        """All keys and values the tokens may see: their own, after those in the cache if there is one."""
        cfg = self.config.attention
        if cache is None:
            segments = context.segments_BT
            return kv, Mask(cfg.causal, cfg.window, q_segments=segments, kv_segments=segments), None
        lengths_B = (context.segments_BT != 0).sum(axis=1)
        store, kv, mask = cache.attention.extend(kv, context.start_B, lengths_B, cfg.window)
        return kv, mask, cache._replace(attention=store)

    def _residual(
        self, x_BTD: jax.Array, layer: Callable[[jax.Array], jax.Array], name: str, key: jax.Array | None
    ) -> jax.Array:
        """x plus what the sub-layer adds, normalised where the placement says."""
        rate = self.config.dropout
        norm = getattr(self, f"{name}_norm") if name != "attention" or self.config.attention_norm else lambda x: x
        if self.config.placement == "post":
            return norm(x_BTD + dropout(layer(x_BTD), rate, key))
        y_BTD = layer(norm(x_BTD))
        if self.config.placement == "sandwich":
            y_BTD = getattr(self, f"{name}_post_norm")(y_BTD)
        return x_BTD + dropout(y_BTD, rate, key)
