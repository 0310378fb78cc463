"""Multi-head, grouped-query and multi-query attention: projections, norms, rotary positions, output.

One module serves self-attention and cross-attention. Keys and values are projected by a separate method, `keys_values`,
so that decoding projects the source only once per request.
"""

from typing import NamedTuple, Protocol

import jax
from flax import linen as nn

from jaxformer.config import Alibi, AttentionConfig, Init
from jaxformer.layers.linear import Linear, Norm, Runtime
from jaxformer.ops.attention import AttentionInputs, AttentionParams, CachedKeysValues, attend
from jaxformer.ops.biases import Bias, SlopeBias
from jaxformer.ops.masks import Mask
from jaxformer.ops.positions import RopeTables, apply_rope
from jaxformer.typing import Array, Bool, Float, Int


class KeysValues(NamedTuple):
    k_BKSH: Float[Array, "B K S H"]
    v_BKSH: Float[Array, "B K S H"]
    cache: CachedKeysValues | None = None
    """Where a KV cache stores them; only for one new token per row."""


class Cache(Protocol):
    """The interface of a KV cache that self-attention uses; `decode` has the implementations."""

    def extend(
        self,
        new: KeysValues,
        start_B: Int[Array, " B"] | None,
        lengths_B: Int[Array, " B"],
        window: int | None,
        prefix_BT: Bool[Array, "B T"] | None = None,
        layer: Int[Array, ""] | None = None,
    ) -> tuple["Cache", KeysValues, Mask]:
        """Write the first `lengths_B` tokens of `new` at index `start_B`; return all keys and values and their mask.

        Args:
          start_B: None if the cache is empty; attention is then over the new keys and values only.
          prefix_BT: new tokens that are visible to all new tokens.
          layer: which layer to extend, if the cache holds several.
        """


class Attention(nn.Module):
    config: AttentionConfig
    embed_dim: int
    kernel_init: Init
    output_scale: float
    runtime: Runtime
    query_scale: float = 1.0

    def setup(self) -> None:
        cfg, D, H, shared = self.config, self.embed_dim, self.config.head_dim, (self.kernel_init, self.runtime)
        heads, kv_heads = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.q = Linear((D, cfg.num_heads, H), heads, *shared, init_scale=self.query_scale, bias=cfg.bias)
        self.k = Linear((D, cfg.kv_heads, H), kv_heads, *shared, bias=cfg.bias)
        self.v = Linear((D, cfg.kv_heads, H), kv_heads, *shared, bias=cfg.bias)
        self.out = Linear(
            (cfg.num_heads, H, D),
            ("heads", "head_dim", "embed"),
            *shared,
            num_in=2,
            init_scale=self.output_scale,
            bias=cfg.output_bias,
        )
        if cfg.qk_norm is not None:
            self.q_norm, self.k_norm = Norm(cfg.qk_norm), Norm(cfg.qk_norm)

    def keys_values(self, x_BSD: jax.Array, rope: RopeTables | None = None) -> KeysValues:
        """Keys (normalised and rotated if configured) and values, with heads before positions as in the KV cache."""
        k_BSKH, v_BSKH = self.k(x_BSD), self.v(x_BSD)
        if self.config.qk_norm is not None:
            k_BSKH = self.k_norm(k_BSKH)
        if rope is not None:
            k_BSKH = apply_rope(k_BSKH, rope)
        return KeysValues(k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2))

    def __call__(
        self,
        x_BTD: jax.Array,
        kv: KeysValues,
        mask: Mask,
        rope: RopeTables | None = None,
        bias: Bias | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        cfg = self.config
        q_BTNH = self.q(x_BTD)
        if cfg.qk_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        if rope is not None:
            q_BTNH = apply_rope(q_BTNH, rope)
        inputs = AttentionInputs(
            q_BTNH,
            kv.k_BKSH,
            kv.v_BKSH,
            mask,
            AttentionParams(cfg.scale or cfg.head_dim**-0.5, cfg.softcap, cfg.dropout),
            bias=SlopeBias(cfg.num_heads) if isinstance(cfg.position, Alibi) else bias,
            dropout_key=key,
            cache=kv.cache,
        )
        return self.out(attend(inputs, impl=self.runtime.attention, platform=self.runtime.platform))
