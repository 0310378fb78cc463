"""A stack: a repeating pattern of blocks over parameters stacked along a leading `layers` axis.

Blocks are applied as pure functions of their slice of the stacked parameters, so scanning, unrolling and
rematerialising are choices of the moment. `unstacked` parameters (a tuple of trees, one a layer) are accepted
too: a decode loop that reads every weight once per token must not pay for slicing them out of the stack.
"""

from collections.abc import Callable, Sequence

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
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("attention"),
    ),
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
        keys = split_key(key, self.config.num_layers)
        unrolls = self.runtime.unroll == "all" or isinstance(self._params()[0], tuple)
        scanned = 0 if unrolls else self._repeats * len(self.config.pattern)
        if scanned:
            x_BTD = self._scan(x_BTD, context, keys[:scanned])
        for (block, layer), layer_key in zip(self._layers()[scanned:], keys[scanned:], strict=True):
            x_BTD = self._apply(block)(layer, x_BTD, context, layer_key)
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

    @property
    def _repeats(self) -> int:
        """How often the whole pattern occurs."""
        return self.config.num_layers // len(self.config.pattern)

    def _scan(self, x_BTD: jax.Array, context: Context, keys: list[jax.Array | None]) -> jax.Array:
        """The whole repeats of the pattern, one trace for all of them."""
        blocks, repeats = [self._apply(block) for block in self._blocks()], self._repeats

        def one_repeat(x_BTD, inputs):
            layers, keys = inputs
            for i, apply in enumerate(blocks):
                x_BTD = apply(layers[i], x_BTD, context, None if keys is None else keys[i])
            return x_BTD, None

        layers = [jax.tree.map(lambda a: a[:repeats], p) for p in self._params()]
        stacked_keys = None if keys[0] is None else jnp.stack(keys).reshape(repeats, len(blocks))
        unroll = min(self.runtime.unroll, repeats)
        return jax.lax.scan(one_repeat, x_BTD, (layers, stacked_keys), unroll=unroll)[0]

    def _apply(self, block: Block) -> Callable[..., jax.Array]:
        """One block without a cache as a function of its parameters, rematerialised as the runtime says."""

        def apply(params, x_BTD, context, key):
            return block.apply({"params": params}, x_BTD, context, key=key)[0]

        policy = REMAT_POLICIES.get(self.runtime.remat)
        return apply if self.runtime.remat == "none" else jax.checkpoint(apply, policy=policy)

    def _normed(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.config.final_norm is None else self.final_norm(x_BTD)

    def _blocks(self) -> list[Block]:
        scale = (2 * self.config.num_layers) ** -0.5 if self.init_config.depth_scaled_output else 1.0
        shared = (self.embed_dim, self.init_config, scale, self.runtime)
        return [Block(block, *shared, parent=None) for block in self.config.pattern]

    def _params(self) -> list[Params | tuple[Params, ...]]:
        """The parameters of each place of the pattern."""
        return [nn.meta.unbox(self.get_variable("params", f"blocks_{i}")) for i in range(len(self.config.pattern))]

    def _layers(self) -> list[tuple[Block, Params]]:
        """Every layer's block and parameters, in order of depth."""
        blocks, params = self._blocks(), [layers_of(p) for p in self._params()]
        places = (divmod(layer, len(blocks)) for layer in range(self.config.num_layers))
        return [(blocks[place], params[place][depth]) for depth, place in places]


def _stacked_init(key: jax.Array, block: Block, num_layers: int) -> Params:
    x_BTD = jnp.zeros((1, 1, block.embed_dim))
    ids_BT = jnp.ones((1, 1), jnp.int32)
    context = Context(ids_BT, ids_BT, x_BTD, ids_BT)
    params = jax.vmap(lambda k: block.init(k, x_BTD, context)["params"])(jax.random.split(key, num_layers))
    return nn.meta.add_axis(params, 0, {nn.PARTITION_NAME: "layers"})


def layers_of(stored: Params | tuple[Params, ...]) -> tuple[Params, ...]:
    """The parameters of each layer, from a stack or from a tuple of layers."""
    if isinstance(stored, tuple):
        return stored
    leaves, structure = jax.tree.flatten(stored)
    # One split rather than a slice a layer: its gradient is one concatenation, not a sum of padded stacks.
    parts = [[part[0] for part in jax.lax.split(leaf, [1] * len(leaf))] for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, layer) for layer in zip(*parts, strict=True))


def unstacked(params: Params) -> Params:
    """The same parameters with every `blocks_i` a tuple of layers."""
    if not isinstance(params, dict):
        return params
    return {n: layers_of(p) if n.startswith("blocks_") else unstacked(p) for n, p in params.items()}
