"""The feed-forward layer as a mixture of experts; the arithmetic is in `ops.experts`."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import Init, MoeConfig
from jaxformer.layers.initializers import initializer
from jaxformer.layers.linear import Linear, stored_matrix
from jaxformer.layers.runtime import Runtime
from jaxformer.ops.activations import ACTIVATIONS
from jaxformer.ops.experts import by_expert, router_losses, routes
from jaxformer.ops.quantized import Int8Matrix, dequantized
from jaxformer.typing import Array, Float, Int


class Moe(nn.Module):
    config: MoeConfig
    embed_dim: int
    kernel_init: Init
    output_scale: float
    runtime: Runtime

    def setup(self) -> None:
        cfg, D = self.config, self.embed_dim
        # Float32: a router that rounds sends tokens elsewhere (arXiv:2101.03961, section 2.4).
        self.router = Linear((D, cfg.num_experts), ("embed", None), self.kernel_init, dtype=jnp.float32)
        self.up = self._kernel("up", D, cfg.dim, 1.0)
        if cfg.gated:
            self.gate = self._kernel("gate", D, cfg.dim, 1.0)
        self.down = self._kernel("down", cfg.dim, D, self.output_scale)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        """The output, and the router's weighted loss: a mean over real tokens."""
        cfg = self.config
        x_MD = x_BTD.reshape(-1, self.embed_dim)
        logits_ME = self.router("MD,DE->ME", x_MD)
        chosen = routes(logits_ME, cfg.top_k, cfg.renormalize)
        y_MD = by_expert(x_MD, chosen, cfg.num_experts, self._experts)
        losses = router_losses(logits_ME, chosen, (segments_BT.reshape(-1) != 0).astype(jnp.float32))
        return y_MD.reshape(x_BTD.shape), cfg.load_balance * losses.load_balance + cfg.router_z * losses.router_z

    def _experts(self, x_RD: jax.Array, sizes_E: jax.Array) -> jax.Array:
        activation, dtype = ACTIVATIONS[self.config.activation], self.runtime.dtype
        up_RF = jax.lax.ragged_dot(x_RD, _in(dtype, self.up), sizes_E)
        if self.config.gated:
            hidden_RF = activation(jax.lax.ragged_dot(x_RD, _in(dtype, self.gate), sizes_E)) * up_RF
        else:
            hidden_RF = activation(up_RF)
        return jax.lax.ragged_dot(hidden_RF, _in(dtype, self.down), sizes_E)

    def _kernel(self, name: str, dim_in: int, dim_out: int, scale: float) -> jax.Array | Int8Matrix:
        matrix = stored_matrix(self, name)
        if matrix is not None:
            return matrix
        draw = initializer(self.kernel_init, 1, scale)

        def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.vmap(lambda k: draw(k, shape[1:]))(jax.random.split(key, shape[0]))

        axes = ("expert", "embed", "mlp") if name != "down" else ("expert", "mlp", "embed")
        boxed = nn.with_logical_partitioning(init, axes)
        return self.param(name, boxed, (self.config.num_experts, dim_in, dim_out))


def _in(dtype: jnp.dtype, kernel: jax.Array | Int8Matrix) -> jax.Array:
    """[E, in, out]; quantized kernels are stored with outputs first."""
    if isinstance(kernel, Int8Matrix):
        return dequantized(kernel, dtype).swapaxes(1, 2)
    return kernel.astype(dtype)
