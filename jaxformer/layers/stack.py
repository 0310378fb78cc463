"""A stack: a repeating pattern of blocks over parameters stacked along a leading `layers` axis.

Blocks are applied as pure functions of their slice of the stacked parameters, so scanning, unrolling and
rematerialising are choices of the moment. `unstacked` parameters (a tuple of trees, one a layer) are accepted
too: a decode loop that reads every weight once per token must not pay for slicing them out of the stack.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import InitConfig, StackConfig
from jaxformer.layers.attention import KeysValues
from jaxformer.layers.block import Block, Context, LayerCache
from jaxformer.layers.norm import Norm
from jaxformer.layers.runtime import Runtime
from jaxformer.ops.dropout import split_key
from jaxformer.typing import Params

REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stack(nn.Module):
    config: StackConfig
    embed_dim: int
    init_config: InitConfig
    runtime: Runtime

    def setup(self) -> None:
        if self.config.final_norm is not None:
            self.final_norm = Norm(self.config.final_norm)
        for i, block in enumerate(self._blocks()):
            # Checked by the blocks themselves, layer by layer, when they are applied.
            if not self.has_variable("params", f"blocks_{i}"):
                self.param(f"blocks_{i}", _stacked_init, block, self.config.layers_at(i))

    def __call__(self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None) -> jax.Array:
        """All layers over whole rows, no cache."""
        blocks, params = self._blocks(), self._params()
        period, (repeats, rest) = len(blocks), divmod(self.config.num_layers, len(blocks))
        keys = split_key(key, repeats + 1)

        def one_period(x_BTD, inputs, count=period):
            layers, key = inputs
            for block, layer, block_key in zip(blocks[:count], layers[:count], split_key(key, period), strict=False):
                x_BTD, _ = block.apply({"params": layer}, x_BTD, context, key=block_key)
            return x_BTD, None

        if self.runtime.remat != "none":
            one_period = jax.checkpoint(one_period, policy=REMAT_POLICIES[self.runtime.remat], static_argnums=(2,))
        whole = tuple(jax.tree.map(lambda a: a[:repeats], p) for p in params)
        scan_keys = None if key is None else jnp.stack(keys[:repeats])
        unroll = repeats if self.runtime.unroll == "all" else min(self.runtime.unroll, repeats)
        x_BTD, _ = jax.lax.scan(lambda x, i: one_period(x, i, period), x_BTD, (whole, scan_keys), unroll=unroll)
        if rest:
            last = tuple(jax.tree.map(lambda a: a[repeats], p) for p in params[:rest])
            x_BTD, _ = one_period(x_BTD, (last, keys[repeats]), rest)
        return self._normed(x_BTD)

    def extend(
        self, x_BTD: jax.Array, context: Context, caches: Sequence[LayerCache]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """All layers over new tokens that follow what the caches hold; unrolled, one cache a layer."""
        updated = []
        for (block, layer), cache in zip(self._layers(), caches, strict=True):
            x_BTD, cache = block.apply({"params": layer}, x_BTD, context, cache)
            updated.append(cache)
        return self._normed(x_BTD), tuple(updated)

    def cross_keys_values(self, source_BSD: jax.Array) -> tuple[KeysValues, ...]:
        """Each layer's keys and values of the source."""
        return tuple(
            block.apply({"params": layer}, source_BSD, method="cross_keys_values") for block, layer in self._layers()
        )

    def _normed(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.config.final_norm is None else self.final_norm(x_BTD)

    def _blocks(self) -> list[Block]:
        scale = (2 * self.config.num_layers) ** -0.5 if self.init_config.depth_scaled_output else 1.0
        return [
            Block(b, self.embed_dim, self.init_config, scale, self.runtime, parent=None) for b in self.config.pattern
        ]

    def _params(self) -> list[Params | tuple[Params, ...]]:
        """The parameters of each place of the pattern."""
        return [nn.meta.unbox(self.get_variable("params", f"blocks_{i}")) for i in range(len(self.config.pattern))]

    def _layers(self) -> list[tuple[Block, Params]]:
        """Every layer's block and parameters, in order of depth."""
        blocks, params = self._blocks(), self._params()
        places = (divmod(layer, len(blocks)) for layer in range(self.config.num_layers))
        return [(blocks[place], layer_params(params[place], depth)) for depth, place in places]


def _stacked_init(key: jax.Array, block: Block, num_layers: int) -> Params:
    x_BTD = jnp.zeros((1, 1, block.embed_dim))
    ids_BT = jnp.ones((1, 1), jnp.int32)
    context = Context(ids_BT, ids_BT, x_BTD, ids_BT)
    params = jax.vmap(lambda k: block.init(k, x_BTD, context)["params"])(jax.random.split(key, num_layers))
    return nn.meta.add_axis(params, 0, {nn.PARTITION_NAME: "layers"})


def layer_params(stored: Params | tuple[Params, ...], depth: int) -> Params:
    """The parameters of one layer, from a stack or from a tuple of layers."""
    return stored[depth] if isinstance(stored, tuple) else jax.tree.map(lambda a: a[depth], stored)


def unstacked(params: Params) -> Params:
    """The same parameters with every `blocks_i` a tuple of layers."""

    def split(tree: Params) -> tuple[Params, ...]:
        return tuple(layer_params(tree, i) for i in range(len(jax.tree.leaves(tree)[0])))

    return {
        name: split(value) if name.startswith("blocks_") else unstacked(value) if isinstance(value, dict) else value
        for name, value in params.items()
    }
