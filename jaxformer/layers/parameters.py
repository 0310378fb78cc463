"""Parameters of a model: their shapes and logical axes without allocating anything, and their initial values."""

from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import ModelConfig
from jaxformer.layers.transformer import Transformer
from jaxformer.typing import Params, PyTree, Tokens, tokens_from_ids


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Randomly initialised float32 parameters."""
    return nn.meta.unbox(_boxed(config, key))


@lru_cache(maxsize=64)  # tracing a model takes seconds, and every command needs the result several times
def abstract_params(config: ModelConfig) -> tuple[PyTree, PyTree]:
    """Trees of `ShapeDtypeStruct`s and of logical axes (tuples of names); no arrays are allocated."""
    boxed = jax.eval_shape(lambda: _boxed(config, jax.random.key(0)))
    axes = jax.tree.map(lambda box: box.names, boxed, is_leaf=_is_box)
    return nn.meta.unbox(boxed), axes


def num_params(config: ModelConfig) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)[0]))


def _boxed(config: ModelConfig, key: jax.Array) -> Params:
    tokens = tokens_from_ids(jnp.zeros((1, 1), jnp.int32))
    source = tokens if config.shape == "encoder-decoder" else None
    return Transformer(config).init(key, tokens, source, method=_touch_all)["params"]


def _touch_all(model: Transformer, tokens: Tokens, source: Tokens | None) -> None:
    """Call every submodule, because Flax initialises a parameter when it is first used."""
    model(tokens, source)
    if model.config.pooler is not None:
        model.pool(tokens, source)


def _is_box(leaf: object) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)
