"""The position-wise feed-forward layer, plain or gated (arXiv:2002.05202)."""

import jax
from flax import linen as nn

from jaxformer.config import Init, MlpConfig
from jaxformer.layers.linear import Linear, Runtime
from jaxformer.ops.elementwise import ACTIVATIONS


class Mlp(nn.Module):
    config: MlpConfig
    embed_dim: int
    kernel_init: Init
    output_scale: float
    runtime: Runtime

    def setup(self) -> None:
        cfg = self.config
        shape, axes, shared = (self.embed_dim, cfg.dim), ("embed", "mlp"), (self.kernel_init, self.runtime)
        self.up = Linear(shape, axes, *shared, bias=cfg.bias)
        if cfg.gated:
            self.gate = Linear(shape, axes, *shared, bias=cfg.bias)
        self.down = Linear(shape[::-1], axes[::-1], *shared, init_scale=self.output_scale, bias=cfg.bias)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.config.activation]
        up_BTF = self.up(x_BTD)
        if self.config.gated:
            hidden_BTF = activation(self.gate(x_BTD)) * up_BTF
        else:
            hidden_BTF = activation(up_BTF)
        return self.down(hidden_BTF)
