"""Multi-head, grouped-query and multi-query attention: projections, positions, cache, output.

Self-attention and cross-attention are one module: `keys_values` projects whatever is attended to, so that a
decoder projects its source once per request and passes the result in.
"""

from typing import NamedTuple, Protocol

import jax
from flax import linen as nn

from jaxformer.config import Alibi, AttentionConfig, Init, Rope
from jaxformer.layers.linear import Linear
from jaxformer.layers.norm import Norm
from jaxformer.layers.runtime import Runtime
from jaxformer.ops.attention import attend
from jaxformer.ops.biases import Bias, SlopeBias
from jaxformer.ops.masks import Mask
from jaxformer.ops.positions import rope
from jaxformer.typing import Array, Float, Int


class KeysValues(NamedTuple):
    k_BKSH: Float[Array, "B K S H"]
    v_BKSH: Float[Array, "B K S H"]


class Cache(Protocol):
    """What self-attention needs of a cache; the kinds of caches live in `decode`."""

    def extend(
        self, new: KeysValues, start_B: Int[Array, " B"], lengths_B: Int[Array, " B"], window: int | None
    ) -> tuple["Cache", KeysValues, Mask]:
        """Write the first `lengths_B` of `new` from index `start_B` on; give all that may be seen, and by whom."""


class Attention(nn.Module):
    config: AttentionConfig
    embed_dim: int
    kernel_init: Init
    output_scale: float
    runtime: Runtime
    query_scale: float = 1.0

    def setup(self) -> None:
        cfg, dtype, D = self.config, self.runtime.dtype, self.embed_dim
        heads, kv_heads = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        kv_shape = (D, cfg.kv_heads, cfg.head_dim)
        q_shape, q_scale = (D, cfg.num_heads, cfg.head_dim), self.query_scale
        self.q = Linear(q_shape, heads, self.kernel_init, init_scale=q_scale, bias=cfg.bias, dtype=dtype)
        self.k = Linear(kv_shape, kv_heads, self.kernel_init, bias=cfg.bias, dtype=dtype)
        self.v = Linear(kv_shape, kv_heads, self.kernel_init, bias=cfg.bias, dtype=dtype)
        self.out = Linear(
            (cfg.num_heads, cfg.head_dim, D),
            ("heads", "head_dim", "embed"),
            self.kernel_init,
            num_in=2,
            init_scale=self.output_scale,
            bias=cfg.output_bias,
            dtype=dtype,
        )
        if cfg.qk_norm is not None:
            self.q_norm, self.k_norm = Norm(cfg.qk_norm), Norm(cfg.qk_norm)

    def keys_values(self, x_BSD: jax.Array, positions_BS: jax.Array | None = None) -> KeysValues:
        """Keys, normalised and rotated where the config says so, and values."""
        k_BSKH = self.k("BSD,DKH->BSKH", x_BSD)
        if self.config.qk_norm is not None:
            k_BSKH = self.k_norm(k_BSKH)
        k_BSKH, v_BSKH = self._rotated(k_BSKH, positions_BS), self.v("BSD,DKH->BSKH", x_BSD)
        return KeysValues(k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2))

    def __call__(
        self,
        x_BTD: jax.Array,
        kv: KeysValues,
        mask: Mask,
        positions_BT: jax.Array | None = None,
        bias: Bias | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        cfg = self.config
        q_BTNH = self.q("BTD,DNH->BTNH", x_BTD)
        if cfg.qk_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        out_BTNH = attend(
            self._rotated(q_BTNH, positions_BT),
            *kv,
            mask,
            scale=cfg.scale or cfg.head_dim**-0.5,
            bias=SlopeBias(cfg.num_heads) if isinstance(cfg.position, Alibi) else bias,
            softcap=cfg.softcap,
            dropout_rate=cfg.dropout,
            key=key,
            impl=self.runtime.attention,
        )
        return self.out("BTNH,NHD->BTD", out_BTNH)

    def _rotated(self, x_BTNH: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        position = self.config.position
        return rope(x_BTNH, positions_BT, position) if isinstance(position, Rope) else x_BTNH
