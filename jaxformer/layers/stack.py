"""A stack: a repeating pattern of blocks over parameters stacked along a leading `layers` axis.

Blocks are applied as pure functions of their slice of the stacked parameters, so scanning, unrolling and
rematerialising are choices of the moment. `unstacked` parameters (a tuple of trees, one a layer) are accepted
too: a decode loop that reads every weight once per token must not pay for slicing them out of the stack.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import InitConfig, StackConfig
from jaxformer.layers.attention import KeysValues
from jaxformer.layers.block import Block, Context, LayerCache
from jaxformer.layers.initializers import initializer
from jaxformer.layers.norm import Norm
from jaxformer.layers.runtime import Runtime
from jaxformer.ops.biases import BucketedBias
from jaxformer.ops.dropout import split_key
from jaxformer.typing import Params

REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("attention"),
    ),
}
_STACKED = re.compile(r"(first|blocks)_\d+")


class Stack(nn.Module):
    config: StackConfig
    embed_dim: int
    init_config: InitConfig
    runtime: Runtime

    def setup(self) -> None:
        cfg = self.config
        if cfg.final_norm is not None:
            self.final_norm = Norm(cfg.final_norm)
        if cfg.relative_bias is not None:
            draw = initializer(self.init_config.embedding, num_in=0)
            shape = (cfg.relative_bias.num_buckets, cfg.pattern[0].attention.num_heads)
            self.relative_bias = self.param("relative_bias", nn.with_logical_partitioning(draw, (None, "heads")), shape)
        for name, block in self._blocks().items():
            # Checked by the blocks themselves, layer by layer, when they are applied.
            if not self.has_variable("params", name):
                self.param(name, _stacked_init, block, cfg.sizes[name])

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """All layers over whole rows, no cache; and the mean of the routers' losses, none without experts."""
        if self.is_initializing():  # the blocks have been made one by one in `setup`
            return self._normed(x_BTD), None
        context, first = self._with_bias(context), len(self.config.first)
        keys = split_key(key, self.config.num_layers)
        unrolls = self.runtime.unroll == "all" or isinstance(self._params("blocks_0"), tuple)
        scanned = 0 if unrolls else self._repeats * len(self.config.pattern)
        layers, losses = self._layers(), []

        def one_by_one(x_BTD: jax.Array, start: int, stop: int) -> jax.Array:
            for (block, layer), layer_key in zip(layers[start:stop], keys[start:stop], strict=True):
                x_BTD, loss = self._apply(block)(layer, x_BTD, context, layer_key)
                losses.append(loss)
            return x_BTD

        x_BTD = one_by_one(x_BTD, 0, first)
        if scanned:
            x_BTD, loss = self._scan(x_BTD, context, keys[first : first + scanned])
            losses += loss
        x_BTD = one_by_one(x_BTD, first + scanned, self.config.num_layers)
        return self._normed(x_BTD), _mean(losses)

    def extend(
        self, x_BTD: jax.Array, context: Context, caches: Sequence[LayerCache]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """All layers over new tokens that follow what the caches hold; unrolled, one cache a layer."""
        context, updated = self._with_bias(context), []
        for (block, layer), cache in zip(self._layers(), caches, strict=True):
            x_BTD, cache, _ = block.apply({"params": layer}, x_BTD, context, cache)
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
        return (self.config.num_layers - len(self.config.first)) // len(self.config.pattern)

    def _scan(
        self, x_BTD: jax.Array, context: Context, keys: list[jax.Array | None]
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        """The whole repeats of the pattern, one trace for all of them."""
        names, repeats = [f"blocks_{i}" for i in range(len(self.config.pattern))], self._repeats
        blocks = [self._apply(self._blocks()[name]) for name in names]

        def one_repeat(x_BTD, inputs):
            (layers, keys), losses = inputs, []
            for i, apply in enumerate(blocks):
                x_BTD, loss = apply(layers[i], x_BTD, context, None if keys is None else keys[i])
                losses.append(loss)
            return x_BTD, losses

        layers = [jax.tree.map(lambda a: a[:repeats], self._params(name)) for name in names]
        stacked_keys = None if keys[0] is None else jnp.stack(keys).reshape(repeats, len(blocks))
        unroll = min(self.runtime.unroll, repeats)
        return jax.lax.scan(one_repeat, x_BTD, (layers, stacked_keys), unroll=unroll)

    def _apply(self, block: Block) -> Callable[..., jax.Array]:
        """One block without a cache as a function of its parameters, rematerialised as the runtime says."""

        def apply(params, x_BTD, context, key):
            result = block.apply({"params": params}, x_BTD, context, key=key)
            return result.x_BTD, result.router_loss

        policy = REMAT_POLICIES.get(self.runtime.remat)
        return apply if self.runtime.remat == "none" else jax.checkpoint(apply, policy=policy)

    def _normed(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.config.final_norm is None else self.final_norm(x_BTD)

    def _with_bias(self, context: Context) -> Context:
        cfg = self.config
        if cfg.relative_bias is None:
            return context
        causal = cfg.pattern[0].attention.causal
        return replace(context, bias=BucketedBias(self.relative_bias, cfg.relative_bias.max_distance, causal))

    def _blocks(self) -> dict[str, Block]:
        """The block of each place."""
        scale = (2 * self.config.num_layers) ** -0.5 if self.init_config.depth_scaled_output else 1.0
        shared = (self.embed_dim, self.init_config, scale, self.runtime)
        blocks = zip(self.config.sizes, self.config.blocks, strict=True)
        return {name: Block(block, *shared, parent=None) for name, block in blocks}

    def _params(self, name: str) -> Params | tuple[Params, ...]:
        """The parameters of one place."""
        return nn.meta.unbox(self.get_variable("params", name))

    def _layers(self) -> list[tuple[Block, Params]]:
        """Every layer's block and parameters, in order of depth."""
        blocks = self._blocks()
        params = {name: layers_of(self._params(name)) for name in blocks}
        return [(blocks[name], params[name][depth]) for name, depth in self.config.places]


def _mean(losses: list[jax.Array | None]) -> jax.Array | None:
    """Of single layers' losses and stacks of them."""
    present = [loss.reshape(-1) for loss in losses if loss is not None]
    return jnp.concatenate(present).mean() if present else None


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
    """The same parameters with every place of a stack a tuple of layers."""
    if not isinstance(params, dict):
        return params
    return {n: layers_of(p) if _STACKED.fullmatch(n) else unstacked(p) for n, p in params.items()}
