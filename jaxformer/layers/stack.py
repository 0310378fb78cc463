"""A stack: a repeating pattern of blocks over parameters stacked along a leading `layers` axis.

Blocks are applied as pure functions of their slice of the stacked parameters, so that scanning, unrolling and
rematerialisation are run-time choices. A stack also accepts the result of `unstack_layers`, a tuple with one parameter
tree per layer: on a CPU, a decode loop would otherwise copy every weight out of the stack at every token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import BlockConfig, InitConfig, ModelConfig, StackConfig
from jaxformer.layers.attention import KeysValues
from jaxformer.layers.block import Block, Context, LayerCache
from jaxformer.layers.linear import Norm, Runtime, initializer
from jaxformer.layers.remat import rematerialize
from jaxformer.ops.biases import BucketedBias
from jaxformer.ops.elementwise import split_key
from jaxformer.typing import Params

Layer = tuple[Block, Params]
Losses = list[jax.Array | None]
Caches = list[LayerCache]


class CachePart(NamedTuple):
    """What one cache of a decoder belongs to: a layer, or all complete repeats of an entry of the pattern."""

    block: BlockConfig
    num_layers: int | None
    """Number of layers whose caches are stacked; None: a single layer, whose cache is not stacked."""


def cache_parts(config: StackConfig, runtime: Runtime) -> list[CachePart]:
    """The caches of a decoder in order of depth: one per layer, or a single one for the layers of a scan."""
    scanned = scanned_layers(config, runtime)
    before, after = range(scanned.start), range(scanned.stop, config.num_layers)
    repeats = [CachePart(block, config.num_repeats) for block in config.pattern] if scanned else []
    return [
        *(CachePart(config.block(layer), None) for layer in before),
        *repeats,
        *(CachePart(config.block(layer), None) for layer in after),
    ]


def scanned_layers(config: StackConfig, runtime: Runtime) -> range:
    """The layers that decoding scans over: the complete repeats of the pattern, or none."""
    first, repeats = len(config.first), config.num_repeats if runtime.scan_decode else 0
    return range(first, first + (repeats * len(config.pattern) if repeats > 1 else 0))


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
            init = initializer(self.init_config.embedding, num_in=0)
            shape = (cfg.relative_bias.num_buckets, cfg.pattern[0].attention.num_heads)
            self.relative_bias = self.param("relative_bias", nn.with_logical_partitioning(init, (None, "heads")), shape)
        for name, block in self._blocks().items():
            # Existing parameters are not declared, because Flax would compare them with the stacked shape, which
            # unstacked ones do not have. The blocks check their shapes when they are applied.
            if not self.has_variable("params", name):
                self.param(name, _init_stacked, block, cfg.sizes[name])

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run all layers over full rows, without caches.

        Returns the output and the mean router loss over layers, which is None without experts.
        """
        if self.is_initializing():  # `setup` has already initialised the blocks
            return self._normalize(x_BTD), None
        context, first = self._share(context), len(self.config.first)
        layers, keys = self._layers(), split_key(key, self.config.num_layers)
        unrolls = self.runtime.unroll == "all" or isinstance(self._params("blocks_0"), tuple)
        # Layers before the pattern, and an incomplete last repeat of the pattern, cannot be part of the scan.
        scan_end = first if unrolls else first + self.config.num_repeats * len(self.config.pattern)
        x_BTD, losses = self._run_layers(x_BTD, context, layers[:first], keys[:first])
        if scan_end > first:
            x_BTD, scan_losses = self._scan(x_BTD, context, keys[first:scan_end])
            losses += scan_losses
        x_BTD, last_losses = self._run_layers(x_BTD, context, layers[scan_end:], keys[scan_end:])
        return self._normalize(x_BTD), _mean(losses + last_losses)

    def extend(
        self, x_BTD: jax.Array, context: Context, caches: Sequence[LayerCache]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Run all layers over new tokens that follow those in the caches; there is one cache per `cache_parts`."""
        context, scanned = self._share(context), scanned_layers(self.config, self.runtime)
        start = scanned.start
        stop = start + (len(self.config.pattern) if scanned else 0)
        x_BTD, first = self._extend_layers(x_BTD, context, range(start), list(caches[:start]))
        x_BTD, repeats = self._extend_repeats(x_BTD, context, list(caches[start:stop])) if scanned else (x_BTD, [])
        last_layers = range(scanned.stop, self.config.num_layers)
        x_BTD, last = self._extend_layers(x_BTD, context, last_layers, list(caches[stop:]))
        return self._normalize(x_BTD), (*first, *repeats, *last)

    def cross_keys_values(self, source_BSD: jax.Array) -> tuple[KeysValues, ...]:
        """The cross-attention keys and values of the source, one for each of `cache_parts`."""
        blocks, scanned = self._blocks(), scanned_layers(self.config, self.runtime)

        def project(name: str, depth: int | jax.Array) -> KeysValues:
            params = {"params": layer_params(self._params(name), depth)}
            return blocks[name].apply(params, source_BSD, method="cross_keys_values")

        places, depths = self.config.places, jnp.arange(self.config.num_repeats)
        names = [f"blocks_{i}" for i in range(len(self.config.pattern))] if scanned else []
        repeats = [jax.lax.map(partial(project, name), depths) for name in names]
        return (
            *(project(*place) for place in places[: scanned.start]),
            *repeats,
            *(project(*place) for place in places[scanned.stop :]),
        )

    def _extend_layers(
        self, x_BTD: jax.Array, context: Context, layers: range, caches: Caches
    ) -> tuple[jax.Array, Caches]:
        """Run these layers one by one, each with its own cache."""
        blocks, updated = self._blocks(), []
        for layer, cache in zip(layers, caches, strict=True):
            name, depth = self.config.places[layer]
            params = layer_params(self._params(name), depth)
            x_BTD, cache, _ = blocks[name].apply({"params": params}, x_BTD, context, cache)
            updated.append(cache)
        return x_BTD, updated

    def _extend_repeats(self, x_BTD: jax.Array, context: Context, caches: Caches) -> tuple[jax.Array, Caches]:
        """Scan over the complete repeats of the pattern, with one stacked cache per entry of the pattern.

        The scan carries the caches, so that XLA writes new tokens in place. It indexes parameters instead of scanning
        over them: without the layers of an incomplete last repeat, they would first be copied.
        """
        names = [f"blocks_{i}" for i in range(len(self.config.pattern))]
        blocks, stacked = self._blocks(), [self._params(name) for name in names]

        def one_repeat(carry: tuple[jax.Array, Caches], depth: jax.Array) -> tuple[tuple[jax.Array, Caches], None]:
            (x_BTD, caches), updated = carry, []
            for name, params, cache in zip(names, stacked, caches, strict=True):
                params = {"params": layer_params(params, depth)}
                x_BTD, cache, _ = blocks[name].apply(params, x_BTD, context, cache._replace(layer=depth))
                updated.append(cache._replace(layer=None))
            return (x_BTD, updated), None

        return jax.lax.scan(one_repeat, (x_BTD, caches), jnp.arange(self.config.num_repeats))[0]

    def _run_layers(
        self, x_BTD: jax.Array, context: Context, layers: Sequence[Layer], keys: Sequence[jax.Array | None]
    ) -> tuple[jax.Array, Losses]:
        losses: Losses = []
        for (block, params), key in zip(layers, keys, strict=True):
            x_BTD, loss = self._block_function(block)(x_BTD, params, context, key)
            losses.append(loss)
        return x_BTD, losses

    def _scan(self, x_BTD: jax.Array, context: Context, keys: Sequence[jax.Array | None]) -> tuple[jax.Array, Losses]:
        """Run the complete repeats of the pattern as a scan, so that the pattern is traced and compiled only once."""
        names, repeats = [f"blocks_{i}" for i in range(len(self.config.pattern))], self.config.num_repeats
        blocks = [self._block_function(self._blocks()[name]) for name in names]

        def one_repeat(x_BTD, inputs):
            (layers, keys), losses = inputs, []
            for i, apply in enumerate(blocks):
                x_BTD, loss = apply(x_BTD, layers[i], context, None if keys is None else keys[i])
                losses.append(loss)
            return x_BTD, losses

        layers = [jax.tree.map(lambda a: a[:repeats], self._params(name)) for name in names]
        stacked_keys = None if keys[0] is None else jnp.stack(keys).reshape(repeats, len(blocks))
        unroll = min(self.runtime.unroll, repeats)
        return jax.lax.scan(one_repeat, x_BTD, (layers, stacked_keys), unroll=unroll)

    def _block_function(self, block: Block) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
        """A block without a cache as a function, with the rematerialisation of the runtime."""

        def apply(x_BTD, params, context, key):
            result = block.apply({"params": params}, x_BTD, context, key=key)
            return result.x_BTD, result.router_loss

        return rematerialize(apply, self.runtime.remat)

    def _normalize(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.config.final_norm is None else self.final_norm(x_BTD)

    def _share(self, context: Context) -> Context:
        """Add the rotary tables and the relative bias, which all layers share."""
        cfg, context = self.config, context.with_rope(self.config.blocks)
        if cfg.relative_bias is None:
            return context
        causal = cfg.pattern[0].attention.causal
        return replace(context, bias=BucketedBias(self.relative_bias, cfg.relative_bias.max_distance, causal))

    def _blocks(self) -> dict[str, Block]:
        """One module for each entry of `first` and of the pattern."""
        scale = (2 * self.config.num_layers) ** -0.5 if self.init_config.depth_scaled_output else 1.0
        shared = (self.embed_dim, self.init_config, scale, self.runtime)
        blocks = zip(self.config.sizes, self.config.blocks, strict=True)
        # Without a parent, a block is applied as a pure function; its name only labels it in profiles.
        return {name: Block(block, *shared, parent=None, name=name) for name, block in blocks}

    def _params(self, name: str) -> Params | tuple[Params, ...]:
        """The parameters of all layers that share an entry of `first` or of the pattern."""
        return nn.meta.unbox(self.get_variable("params", name))

    def _layers(self) -> list[Layer]:
        """Every layer's block and parameters, in order of depth."""
        blocks = self._blocks()
        params = {name: split_layers(self._params(name)) for name in blocks}
        return [(blocks[name], params[name][depth]) for name, depth in self.config.places]


def _mean(losses: Losses) -> jax.Array | None:
    """The mean over all layers; a scan returns the losses of several layers as one array."""
    present = [loss.reshape(-1) for loss in losses if loss is not None]
    return jnp.concatenate(present).mean() if present else None


def _init_stacked(key: jax.Array, block: Block, num_layers: int) -> Params:
    x_BTD = jnp.zeros((1, 1, block.embed_dim))
    ids_BT = jnp.ones((1, 1), jnp.int32)
    context = Context(ids_BT, ids_BT, x_BTD, ids_BT).with_rope([block.config])
    params = jax.vmap(lambda k: block.init(k, x_BTD, context)["params"])(jax.random.split(key, num_layers))
    return nn.meta.add_axis(params, 0, {nn.PARTITION_NAME: "layers"})


def split_layers(stored: Params | tuple[Params, ...]) -> tuple[Params, ...]:
    """The parameters of each layer, from stacked parameters or from a tuple that is already split."""
    if isinstance(stored, tuple):
        return stored
    leaves, structure = jax.tree.flatten(stored)
    # A single split instead of one slice per layer: its gradient is one concatenation, not a sum of padded arrays.
    parts = [[part[0] for part in jax.lax.split(leaf, [1] * len(leaf))] for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, layer) for layer in zip(*parts, strict=True))


def layer_params(stored: Params | tuple[Params, ...], depth: int | jax.Array) -> Params:
    """The parameters of one layer, from stacked parameters or from a tuple that is already split."""
    if isinstance(stored, tuple):
        return stored[depth]
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, depth, keepdims=False), stored)


def unstack_layers(params: Params, config: ModelConfig) -> Params:
    """The same parameters, with the stacked layers of encoder and decoder split into tuples of layers."""
    stacks = {"encoder": config.encoder, "decoder": config.decoder}
    unstacked = {
        name: {part: split_layers(tree) if part in stack.sizes else tree for part, tree in params[name].items()}
        for name, stack in stacks.items()
        if isinstance(stack, StackConfig)
    }
    return params | unstacked
