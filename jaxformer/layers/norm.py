"""LayerNorm and RMSNorm with their parameters."""

import jax
from flax import linen as nn

from jaxformer.config import NormConfig
from jaxformer.ops.norms import layer_norm, rms_norm


class Norm(nn.Module):
    config: NormConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape, offset = x.shape[-1:], self.config.unit_offset
        start = nn.initializers.zeros if offset else nn.initializers.ones
        scale = self.param("scale", nn.with_logical_partitioning(start, ("norm",)), shape)
        scale = 1.0 + scale if offset else scale
        if self.config.kind == "rms":
            return rms_norm(x, scale, self.config.eps)
        bias = None
        if self.config.bias:
            bias = self.param("bias", nn.with_logical_partitioning(nn.initializers.zeros, ("norm",)), shape)
        return layer_norm(x, scale, bias, self.config.eps)
