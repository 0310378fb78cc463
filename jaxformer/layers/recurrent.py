"""A recurrent stack (Elman or LSTM), as a baseline for transformers, with the interface of `Stack`.

The first layer reads embeddings and the other layers read states, which may differ in width, so each layer has separate
parameters (`layers_0`, `layers_1`, ...) instead of slices of stacked ones.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxformer.config import Init, InitConfig, RecurrentConfig
from jaxformer.layers.block import Context
from jaxformer.layers.linear import Linear, Runtime, initializer
from jaxformer.layers.remat import BLOCK_INPUT, POLICIES
from jaxformer.ops.elementwise import dropout, split_key
from jaxformer.ops.recurrence import NUM_GATES, RecurrentState, empty_state, recur
from jaxformer.sharding import constrain

FORGET = 1
"""Index of the forget gate among the four gates of an LSTM."""


class Recurrent(nn.Module):
    config: RecurrentConfig
    embed_dim: int
    init_config: InitConfig
    runtime: Runtime

    def setup(self) -> None:
        cfg, kernel_init = self.config, self.init_config.kernel
        # remat="dots" would save the gates, which are nearly everything that is saved anyway, so it is like "none".
        remat = self.runtime.remat
        layer = RecurrentLayer if remat in ("none", "dots") else nn.remat(RecurrentLayer, policy=POLICIES[remat])
        widths = [self.embed_dim] + [cfg.dim] * (cfg.num_layers - 1)
        self.layers = [layer(cfg, width, kernel_init, self.runtime) for width in widths]
        if cfg.dim != self.embed_dim:
            self.out = Linear((cfg.dim, self.embed_dim), ("mlp", "embed"), kernel_init, self.runtime)

    def __call__(self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None) -> tuple[jax.Array, None]:
        """Run all layers over full rows, starting from empty states; there is no auxiliary loss."""
        cfg = self.config
        states = [empty_state(cfg.cell, len(x_BTD), cfg.dim)] * cfg.num_layers
        return self._run(x_BTD, context, states, split_key(key, cfg.num_layers))[0], None

    def extend(
        self, x_BTD: jax.Array, context: Context, caches: Sequence[RecurrentState]
    ) -> tuple[jax.Array, tuple[RecurrentState, ...]]:
        """Run all layers over new tokens, continuing from the states in `caches`."""
        return self._run(x_BTD, context, caches, split_key(None, self.config.num_layers))

    def _run(
        self, x_BTD: jax.Array, context: Context, states: Sequence[RecurrentState], keys: list[jax.Array | None]
    ) -> tuple[jax.Array, tuple[RecurrentState, ...]]:
        updated = []
        for layer, state, key in zip(self.layers, states, keys, strict=True):
            x_BTD, state = layer(x_BTD, context, state)
            # arXiv:1409.2329, section 3.2: dropout between layers and before the head, never between tokens.
            x_BTD = dropout(x_BTD, self.config.dropout, key)
            updated.append(state)
        if self.config.dim != self.embed_dim:
            x_BTD = self.out(x_BTD)
        return constrain(x_BTD, "batch", "length", None), tuple(updated)


class RecurrentLayer(nn.Module):
    """One recurrent layer: all tokens are projected in one product, then the cell runs token by token."""

    config: RecurrentConfig
    input_dim: int
    kernel_init: Init
    runtime: Runtime

    @nn.compact
    def __call__(self, x_BTD: jax.Array, context: Context, state: RecurrentState) -> tuple[jax.Array, RecurrentState]:
        cfg, dtype, num_gates = self.config, self.runtime.dtype, NUM_GATES[self.config.cell]
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        shape, axes = (self.input_dim, num_gates, cfg.dim), ("embed", None, "mlp")
        inputs = Linear(shape, axes, self.kernel_init, self.runtime, out_dtype=jnp.float32, name="input")
        init = nn.with_logical_partitioning(initializer(self.kernel_init, 1), ("state", None, "mlp"))
        kernel_PGF = self.param("recurrent_kernel", init, (cfg.dim, num_gates, cfg.dim))
        bias_GF = self.param("bias", nn.with_logical_partitioning(_bias_init, axes[1:]), (num_gates, cfg.dim))
        inputs_TBGF = constrain(inputs(x_BTD).swapaxes(0, 1) + bias_GF, None, "batch", None, "mlp")
        # All-gather the kernel once, before the scan: inside the scan, every token would gather it again.
        kernel_PGF = constrain(kernel_PGF.astype(dtype), None, None, "mlp")
        real_TB = context.segments_BT.T > 0
        starts_TB = real_TB & (context.positions_BT.T == 0)
        h_TBF, state = recur(cfg.cell, kernel_PGF, inputs_TBGF, state, starts_TB, real_TB)
        return jnp.swapaxes(h_TBF, 0, 1).astype(dtype), state


def _bias_init(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Zeros, but 1 for the forget gate of an LSTM (Gers et al. 2000; Jozefowicz et al. 2015, section 2.2)."""
    bias_GF = jnp.zeros(shape, jnp.float32)
    return bias_GF.at[FORGET].set(1.0) if shape[0] == NUM_GATES["lstm"] else bias_GF
