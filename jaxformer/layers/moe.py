"""The feed-forward layer as a mixture of experts; the arithmetic is in `ops.experts`."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import Init, MoeConfig
from jaxformer.layers.linear import Linear, Runtime, initializer, weight_param
from jaxformer.ops.elementwise import ACTIVATIONS
from jaxformer.ops.experts import apply_experts, route_tokens, router_losses
from jaxformer.ops.weights import Weight
from jaxformer.typing import Array, Float, Int


class Moe(nn.Module):
    config: MoeConfig
    embed_dim: int
    kernel_init: Init
    output_scale: float
    runtime: Runtime

    def setup(self) -> None:
        cfg, D = self.config, self.embed_dim
        shape, axes = (D, cfg.num_experts), ("embed", "router")
        # In float32, because rounding would send tokens to other experts (arXiv:2101.03961, section 2.4).
        self.router = Linear(shape, axes, self.kernel_init, self.runtime, dtype=jnp.float32)
        self.up = self._kernel("up", (D, cfg.dim), ("embed", "mlp"), 1.0)
        if cfg.gated:
            self.gate = self._kernel("gate", (D, cfg.dim), ("embed", "mlp"), 1.0)
        self.down = self._kernel("down", (cfg.dim, D), ("mlp", "embed"), self.output_scale)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        """The output, and the weighted sum of the router's losses, each a mean over real tokens."""
        cfg = self.config
        with jax.named_scope("moe"):
            x_MD = x_BTD.reshape(-1, self.embed_dim)
            logits_ME = self.router(x_MD)
            routes = route_tokens(logits_ME, cfg.top_k, cfg.renormalize)
            y_MD = apply_experts(x_MD, routes, cfg.num_experts, self._experts)
            losses = router_losses(logits_ME, routes, (segments_BT.reshape(-1) != 0).astype(jnp.float32))
            return y_MD.reshape(x_BTD.shape), cfg.load_balance * losses.load_balance + cfg.router_z * losses.router_z

    def _experts(self, x_RD: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """Apply every expert to its group of rows; rows are sorted by expert."""
        activation, dtype = ACTIVATIONS[self.config.activation], self.runtime.dtype
        up_RF = jax.lax.ragged_dot(x_RD, self.up.to_array(1, dtype, num_lead=1), sizes_E)
        if self.config.gated:
            hidden_RF = activation(jax.lax.ragged_dot(x_RD, self.gate.to_array(1, dtype, num_lead=1), sizes_E)) * up_RF
        else:
            hidden_RF = activation(up_RF)
        return jax.lax.ragged_dot(hidden_RF, self.down.to_array(1, dtype, num_lead=1), sizes_E)

    def _kernel(self, name: str, shape: tuple[int, int], axes: tuple[str, str], scale: float) -> Weight:
        """The kernels of all experts, [E, in, out], each initialised independently of the others."""
        init_expert = initializer(self.kernel_init, 1, scale)

        def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.vmap(lambda k: init_expert(k, shape[1:]))(jax.random.split(key, shape[0]))

        boxed = nn.with_logical_partitioning(init, ("expert", *axes))
        return weight_param(self, name, boxed, (self.config.num_experts, *shape))
