"""Small models of every architecture, their parameters, and jitted forward passes."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    BucketBias,
    EmbeddingConfig,
    Learned,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    Rope,
    StackConfig,
)
from jaxformer.layers import Runtime, Transformer, abstract_params
from jaxformer.sharding import path_name
from jaxformer.typing import Params


@pytest.fixture(scope="session")
def mixed() -> ModelConfig:
    """Five layers of a pattern of two blocks, so the last repeat is incomplete; windows, grouped-query, dropout."""
    full = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, causal=True, position=Rope(), dropout=0.1)
    near = full.model_copy(update={"window": 3, "num_kv_heads": 1})
    rms, layer = NormConfig(kind="rms"), NormConfig(kind="layer")
    pattern = (
        BlockConfig(attention=near, mlp=MlpConfig(dim=24, activation="silu", gated=True), norm=rms, dropout=0.1),
        BlockConfig(attention=full, mlp=MlpConfig(dim=32, bias=True), norm=layer, placement="sandwich", dropout=0.1),
    )
    return ModelConfig(
        vocab_size=31,
        embed_dim=16,
        embedding=EmbeddingConfig(dropout=0.1),
        decoder=StackConfig(num_layers=5, pattern=pattern, final_norm=rms),
    )


@pytest.fixture(scope="session")
def sparse() -> ModelConfig:
    """A first layer, then alternating layers with experts and a window or with sandwich norms; all six share a bias."""
    rms = NormConfig(kind="rms")
    full = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, causal=True, dropout=0.1)
    near = full.model_copy(update={"window": 3, "qk_norm": rms, "position": Rope(fraction=0.5)})
    experts = MoeConfig(num_experts=4, top_k=2, dim=12, load_balance=0.3, router_z=0.1)
    offset = NormConfig(kind="rms", unit_offset=True)
    capped = full.model_copy(update={"softcap": 2.0})
    dense = MlpConfig(dim=24, gated=True)
    return ModelConfig(
        vocab_size=31,
        embed_dim=16,
        embedding=EmbeddingConfig(dropout=0.1),
        decoder=StackConfig(
            num_layers=6,
            first=(BlockConfig(attention=full, mlp=dense, attention_norm=False, dropout=0.1),),
            pattern=(
                BlockConfig(attention=near, mlp=experts, norm=rms, dropout=0.1),
                BlockConfig(attention=capped, mlp=dense, norm=offset, placement="sandwich", dropout=0.1),
            ),
            final_norm=rms,
            relative_bias=BucketBias(num_buckets=8, max_distance=6),
        ),
    )


@pytest.fixture(scope="session")
def pair() -> ModelConfig:
    """A pre-norm encoder-decoder with three layers on each side."""
    attention = AttentionConfig(num_heads=2, head_dim=8)
    mlp = MlpConfig(dim=24)
    encoder = BlockConfig(attention=attention, mlp=mlp)
    causal = attention.model_copy(update={"causal": True})
    decoder = BlockConfig(attention=causal, cross_attention=attention, mlp=mlp)
    return ModelConfig(
        vocab_size=31,
        embed_dim=16,
        embedding=EmbeddingConfig(position=Learned(max_length=16)),
        encoder=StackConfig(num_layers=3, pattern=(encoder,), final_norm=NormConfig()),
        decoder=StackConfig(num_layers=3, pattern=(decoder,), final_norm=NormConfig()),
    )


@pytest.fixture(scope="session")
def reader(pair) -> ModelConfig:
    """An encoder-only model without a head, which returns hidden states."""
    return pair.model_copy(update={"decoder": None, "head": None})


@pytest.fixture(scope="session")
def params_of() -> Callable[[ModelConfig], Params]:
    """Parameters of a config, all of them random: biases of zero and scales of one would hide mistakes."""

    def random_leaf(rng, path, leaf) -> jax.Array:
        size = 0.5 if path_name(path).startswith("embedding") else 0.2
        centre = 1.0 if path_name(path).endswith("scale") else 0.0
        return jnp.array(centre + size * rng.normal(size=leaf.shape), jnp.float32)

    @cache
    def make(config: ModelConfig) -> Params:
        rng = np.random.default_rng(0)
        return jax.tree_util.tree_map_with_path(partial(random_leaf, rng), abstract_params(config)[0])

    return make


@pytest.fixture(scope="session")
def forward(params_of) -> Callable[..., jax.Array]:
    """`forward(config, tokens, source, key, runtime)` with the config's parameters; compilations are cached."""

    @cache
    def program(config: ModelConfig, runtime: Runtime):
        model = Transformer(config, runtime)
        return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs))

    def run(config, tokens, source=None, key=None, runtime=None, params=None):
        params = params_of(config) if params is None else params
        return program(config, runtime or Runtime())(params, tokens, source, key)

    return run
