"""One layer: self-attention, cross-attention if the block has it, and MLP, each with its norms and residual."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
from flax import linen as nn

from jaxformer.config import AttentionConfig, BlockConfig, InitConfig, Rope
from jaxformer.layers.attention import Attention, Cache, KeysValues
from jaxformer.layers.linear import Norm, Runtime
from jaxformer.layers.mlp import Mlp
from jaxformer.layers.moe import Moe
from jaxformer.ops.biases import Bias
from jaxformer.ops.elementwise import dropout, split_key
from jaxformer.ops.masks import Mask
from jaxformer.ops.positions import RopeTables, rope_tables
from jaxformer.sharding import constrain
from jaxformer.typing import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Inputs besides the hidden states that all layers of a stack share."""

    positions_BT: Int[Array, "B T"]
    segments_BT: Int[Array, "B T"]
    source_BSD: Float[Array, "B S D"] | None = None
    """Output of the encoder; None if the caches already hold its keys and values."""
    source_segments_BS: Int[Array, "B S"] | None = None
    start_B: Int[Array, " B"] | None = None
    """Index of the first of the T tokens in its row, if they extend caches. None: the caches are empty."""
    bias: Bias | None = None
    """The bias of every self-attention layer in the stack."""
    rope: tuple[RopeTables, ...] = ()
    """One entry for every distinct rotary encoding in the stack."""
    prefix_BT: Bool[Array, "B T"] | None = None
    """Tokens that earlier tokens of their segment attend to as well, despite a causal mask."""

    def with_rope(self, blocks: Sequence[BlockConfig]) -> "Context":
        """Add the rotary tables of these blocks, computed once per forward pass rather than in every layer."""
        specs = dict.fromkeys((block.attention.position, block.attention.head_dim) for block in blocks)
        tables = (rope_tables(self.positions_BT, *each) for each in specs if isinstance(each[0], Rope))
        return replace(self, rope=tuple(tables))

    def rope_of(self, attention: AttentionConfig) -> RopeTables | None:
        """The rotary tables of one layer; None if it has no rotary positions."""
        if not isinstance(attention.position, Rope):
            return None
        by_spec = {(tables.spec, tables.head_dim): tables for tables in self.rope}
        return by_spec[attention.position, attention.head_dim]


class LayerCache(NamedTuple):
    """The decoding state of one layer: its KV cache, and the cross-attention keys and values of the source.

    Layers that are scanned over share one, whose arrays are stacked: [L, B, K, S, H].
    """

    attention: Cache
    cross: KeysValues | None = None
    layer: Int[Array, ""] | None = None  # index of the current layer inside a scan

    def cross_keys_values(self) -> KeysValues:
        """Those of the current layer."""
        if self.layer is None:
            return self.cross
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, self.layer, keepdims=False), self.cross)


class BlockResult(NamedTuple):
    x_BTD: Float[Array, "B T D"]
    cache: LayerCache | None
    router_loss: Float[Array, ""] | None  # None without experts


class Block(nn.Module):
    config: BlockConfig
    embed_dim: int
    init_config: InitConfig
    output_scale: float
    runtime: Runtime

    def setup(self) -> None:
        cfg = self.config
        shared = (self.embed_dim, self.init_config.kernel, self.output_scale, self.runtime)
        has_cross, is_sandwich = cfg.cross_attention is not None, cfg.placement == "sandwich"
        self.attention = Attention(cfg.attention, *shared, self._query_scale(cfg.attention))
        self.attention_norm = Norm(cfg.norm) if cfg.attention_norm else None
        self.attention_post_norm = Norm(cfg.norm) if is_sandwich else None
        if has_cross:
            self.cross_attention = Attention(cfg.cross_attention, *shared, self._query_scale(cfg.cross_attention))
            self.cross_attention_norm = Norm(cfg.norm)
            self.cross_attention_post_norm = Norm(cfg.norm) if is_sandwich else None
        self.mlp = (Moe if cfg.mlp.kind == "moe" else Mlp)(cfg.mlp, *shared)
        self.mlp_norm = Norm(cfg.norm)
        self.mlp_post_norm = Norm(cfg.norm) if is_sandwich else None

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: LayerCache | None = None, key: jax.Array | None = None
    ) -> BlockResult:
        attention_key, attention_drop_key, cross_key, cross_drop_key, mlp_drop_key = split_key(key, 5)

        h_BTD = self._normalize_input(x_BTD, self.attention_norm)
        y_BTD, cache = self._self_attention(h_BTD, context, cache, attention_key)
        x_BTD = self._add(x_BTD, y_BTD, self.attention_norm, self.attention_post_norm, attention_drop_key)

        if self.config.cross_attention is not None:
            h_BTD = self._normalize_input(x_BTD, self.cross_attention_norm)
            y_BTD = self._cross_attention(h_BTD, context, cache, cross_key)
            x_BTD = self._add(x_BTD, y_BTD, self.cross_attention_norm, self.cross_attention_post_norm, cross_drop_key)

        h_BTD = self._normalize_input(x_BTD, self.mlp_norm)
        y_BTD, router_loss = self._feed_forward(h_BTD, context)
        x_BTD = self._add(x_BTD, y_BTD, self.mlp_norm, self.mlp_post_norm, mlp_drop_key)

        return BlockResult(constrain(x_BTD, "batch", "length", None), cache, router_loss)

    def cross_keys_values(self, source_BSD: jax.Array) -> KeysValues:
        return self.cross_attention.keys_values(source_BSD)

    # ---------------------------------------------------------------- sub-layers
    def _self_attention(
        self, h_BTD: jax.Array, context: Context, cache: LayerCache | None, key: jax.Array | None
    ) -> tuple[jax.Array, LayerCache | None]:
        cfg, segments, prefix = self.config.attention, context.segments_BT, context.prefix_BT
        rope = context.rope_of(cfg)
        kv = self.attention.keys_values(h_BTD, rope)
        if cache is None:
            mask = Mask(cfg.causal, cfg.window, q_segments=segments, kv_segments=segments, prefix=prefix)
        else:
            lengths_B = (segments != 0).sum(axis=1)
            store, kv, mask = cache.attention.extend(kv, context.start_B, lengths_B, cfg.window, prefix, cache.layer)
            cache = cache._replace(attention=store)
        return self.attention(h_BTD, kv, mask, rope, context.bias, key), cache

    def _cross_attention(
        self, h_BTD: jax.Array, context: Context, cache: LayerCache | None, key: jax.Array | None
    ) -> jax.Array:
        kv = self.cross_keys_values(context.source_BSD) if cache is None else cache.cross_keys_values()
        # Several rows may share one source, for example in beam search. They are folded into one row with more queries,
        # so that the keys and values of the source need not be repeated.
        num_sources = kv.k_BKSH.shape[0]
        segments = context.segments_BT.reshape(num_sources, -1)
        mask = Mask(q_segments=segments, kv_segments=context.source_segments_BS)
        folded = h_BTD.reshape(num_sources, -1, h_BTD.shape[-1])
        return self.cross_attention(folded, kv, mask, key=key).reshape(h_BTD.shape)

    def _feed_forward(self, h_BTD: jax.Array, context: Context) -> tuple[jax.Array, jax.Array | None]:
        if self.config.mlp.kind == "mlp":
            return self.mlp(h_BTD), None
        return self.mlp(h_BTD, context.segments_BT)

    # ---------------------------------------------------------------- norms and residuals
    def _normalize_input(self, x_BTD: jax.Array, norm: Norm | None) -> jax.Array:
        """Normalise the input of a sub-layer in pre-norm and sandwich blocks."""
        return x_BTD if norm is None or self.config.placement == "post" else norm(x_BTD)

    def _add(
        self, x_BTD: jax.Array, y_BTD: jax.Array, norm: Norm | None, post_norm: Norm | None, key: jax.Array | None
    ) -> jax.Array:
        """Add a sub-layer's output to the residual stream; post-norm blocks normalise the sum."""
        if post_norm is not None:
            y_BTD = post_norm(y_BTD)
        x_BTD = x_BTD + dropout(y_BTD, self.config.dropout, key)
        return norm(x_BTD) if norm is not None and self.config.placement == "post" else x_BTD

    def _query_scale(self, attention: AttentionConfig) -> float:
        return attention.head_dim**-0.5 if self.init_config.scaled_queries else 1.0
