"""The position-wise feed-forward layer, plain or gated (arXiv:2002.05202)."""

import jax
from flax import linen as nn

from jaxformer.config import Init, MlpConfig
from jaxformer.layers.linear import Linear
from jaxformer.layers.runtime import Runtime
from jaxformer.ops.activations import ACTIVATIONS


class Mlp(nn.Module):
    config: MlpConfig
    embed_dim: int
    kernel_init: Init
    output_scale: float
    runtime: Runtime

    def setup(self) -> None:
        cfg, dtype = self.config, self.runtime.dtype
        shape, axes = (self.embed_dim, cfg.dim), ("embed", "mlp")
        self.up = Linear(shape, axes, self.kernel_init, bias=cfg.bias, dtype=dtype)
        if cfg.gated:
            self.gate = Linear(shape, axes, self.kernel_init, bias=cfg.bias, dtype=dtype)
        self.down = Linear(
            shape[::-1], axes[::-1], self.kernel_init, init_scale=self.output_scale, bias=cfg.bias, dtype=dtype
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.config.activation]
        up_BTF = self.up("BTD,DF->BTF", x_BTD)
        if self.config.gated:
            hidden_BTF = activation(self.gate("BTD,DF->BTF", x_BTD)) * up_BTF
        else:
            hidden_BTF = activation(up_BTF)
        return self.down("BTF,FD->BTD", hidden_BTF)
