"""Parameters: their names, shapes and logical axes are API; their initial values follow the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    BucketBias,
    EmbeddingConfig,
    FanInInit,
    HeadConfig,
    Learned,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    PoolerConfig,
    StackConfig,
    TransformConfig,
)
from jaxformer.layers import abstract_params, init_params, num_params
from jaxformer.layers.linear import initializer
from jaxformer.models import preset
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.llama import llama
from jaxformer.models.vaswani import vaswani
from jaxformer.sharding import RULES, path_name


# ---------------------------------------------------------------- names
def decoder_only() -> ModelConfig:
    return gpt2(num_layers=3, embed_dim=8, num_heads=2, vocab_size=11, context_length=5)


def encoder_decoder() -> ModelConfig:
    return vaswani(num_layers=3, embed_dim=8, num_heads=2, mlp_dim=12, vocab_size=11)


def encoder_only() -> ModelConfig:
    """A pattern of two blocks over three layers, with optional parameters that the two models above do not have."""
    rms = NormConfig(kind="rms")
    pattern = (
        BlockConfig(
            attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
            mlp=MlpConfig(dim=12, gated=True),
            norm=rms,
            placement="sandwich",
        ),
        BlockConfig(
            attention=AttentionConfig(num_heads=2, head_dim=4), mlp=MlpConfig(dim=12), norm=NormConfig(bias=False)
        ),
    )
    return ModelConfig(
        vocab_size=11,
        embed_dim=8,
        embedding=EmbeddingConfig(norm=NormConfig()),
        encoder=StackConfig(num_layers=3, pattern=pattern, final_norm=rms),
        head=HeadConfig(tied=False, bias=True),
    )


def sparse_decoder() -> ModelConfig:
    """A first layer, experts, normalised queries and keys, and a bias that all layers share."""
    rms = NormConfig(kind="rms")
    attention = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, causal=True, qk_norm=rms)
    first = BlockConfig(attention=attention, mlp=MlpConfig(dim=12), norm=rms, attention_norm=False)
    experts = BlockConfig(attention=attention, mlp=MoeConfig(num_experts=5, top_k=2, dim=6), norm=rms)
    stack = StackConfig(num_layers=3, first=(first,), pattern=(experts,), relative_bias=BucketBias(num_buckets=6))
    return ModelConfig(vocab_size=11, embed_dim=8, decoder=stack)


def classifier() -> ModelConfig:
    """Token types, a head with a transform, and a pooler with classes."""
    block = BlockConfig(attention=AttentionConfig(num_heads=2, head_dim=4), mlp=MlpConfig(dim=12), placement="post")
    dense = TransformConfig(activation="gelu", norm=NormConfig())
    return ModelConfig(
        vocab_size=11,
        embed_dim=8,
        embedding=EmbeddingConfig(position=Learned(max_length=5, offset=2), num_types=3),
        encoder=StackConfig(num_layers=3, pattern=(block,)),
        head=HeadConfig(bias=True, transform=dense),
        pooler=PoolerConfig(transform=TransformConfig(activation="tanh"), num_classes=4),
    )


def two_sides() -> ModelConfig:
    """An encoder-decoder with learned positions, embedding norms and a relative bias on both sides."""
    attention, mlp = AttentionConfig(num_heads=2, head_dim=4), MlpConfig(dim=12)
    causal = attention.model_copy(update={"causal": True})
    encoder = BlockConfig(attention=attention, mlp=mlp)
    decoder = BlockConfig(attention=causal, cross_attention=attention, mlp=mlp, placement="sandwich")
    bias = BucketBias(num_buckets=6)
    return ModelConfig(
        vocab_size=11,
        embed_dim=8,
        embedding=EmbeddingConfig(position=Learned(max_length=5), norm=NormConfig()),
        encoder=StackConfig(num_layers=1, pattern=(encoder,), relative_bias=bias),
        decoder=StackConfig(num_layers=1, pattern=(decoder,), relative_bias=bias),
    )


GOLDEN = {
    decoder_only: """
decoder/blocks_0/attention/k/bias 3x2x4 layers,kv_heads,head_dim
decoder/blocks_0/attention/k/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention/out/bias 3x8 layers,embed
decoder/blocks_0/attention/out/kernel 3x2x4x8 layers,heads,head_dim,embed
decoder/blocks_0/attention/q/bias 3x2x4 layers,heads,head_dim
decoder/blocks_0/attention/q/kernel 3x8x2x4 layers,embed,heads,head_dim
decoder/blocks_0/attention/v/bias 3x2x4 layers,kv_heads,head_dim
decoder/blocks_0/attention/v/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention_norm/bias 3x8 layers,norm
decoder/blocks_0/attention_norm/scale 3x8 layers,norm
decoder/blocks_0/mlp/down/bias 3x8 layers,embed
decoder/blocks_0/mlp/down/kernel 3x32x8 layers,mlp,embed
decoder/blocks_0/mlp/up/bias 3x32 layers,mlp
decoder/blocks_0/mlp/up/kernel 3x8x32 layers,embed,mlp
decoder/blocks_0/mlp_norm/bias 3x8 layers,norm
decoder/blocks_0/mlp_norm/scale 3x8 layers,norm
decoder/final_norm/bias 8 norm
decoder/final_norm/scale 8 norm
embedding/positions 5x8 position,embed
embedding/tokens 11x8 vocab,embed
""",
    encoder_decoder: """
decoder/blocks_0/attention/k/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention/out/kernel 3x2x4x8 layers,heads,head_dim,embed
decoder/blocks_0/attention/q/kernel 3x8x2x4 layers,embed,heads,head_dim
decoder/blocks_0/attention/v/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention_norm/bias 3x8 layers,norm
decoder/blocks_0/attention_norm/scale 3x8 layers,norm
decoder/blocks_0/cross_attention/k/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/cross_attention/out/kernel 3x2x4x8 layers,heads,head_dim,embed
decoder/blocks_0/cross_attention/q/kernel 3x8x2x4 layers,embed,heads,head_dim
decoder/blocks_0/cross_attention/v/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/cross_attention_norm/bias 3x8 layers,norm
decoder/blocks_0/cross_attention_norm/scale 3x8 layers,norm
decoder/blocks_0/mlp/down/bias 3x8 layers,embed
decoder/blocks_0/mlp/down/kernel 3x12x8 layers,mlp,embed
decoder/blocks_0/mlp/up/bias 3x12 layers,mlp
decoder/blocks_0/mlp/up/kernel 3x8x12 layers,embed,mlp
decoder/blocks_0/mlp_norm/bias 3x8 layers,norm
decoder/blocks_0/mlp_norm/scale 3x8 layers,norm
embedding/tokens 11x8 vocab,embed
encoder/blocks_0/attention/k/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention/out/kernel 3x2x4x8 layers,heads,head_dim,embed
encoder/blocks_0/attention/q/kernel 3x8x2x4 layers,embed,heads,head_dim
encoder/blocks_0/attention/v/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention_norm/bias 3x8 layers,norm
encoder/blocks_0/attention_norm/scale 3x8 layers,norm
encoder/blocks_0/mlp/down/bias 3x8 layers,embed
encoder/blocks_0/mlp/down/kernel 3x12x8 layers,mlp,embed
encoder/blocks_0/mlp/up/bias 3x12 layers,mlp
encoder/blocks_0/mlp/up/kernel 3x8x12 layers,embed,mlp
encoder/blocks_0/mlp_norm/bias 3x8 layers,norm
encoder/blocks_0/mlp_norm/scale 3x8 layers,norm
""",
    encoder_only: """
embedding/norm/bias 8 norm
embedding/norm/scale 8 norm
embedding/tokens 11x8 vocab,embed
encoder/blocks_0/attention/k/kernel 2x8x1x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention/out/kernel 2x2x4x8 layers,heads,head_dim,embed
encoder/blocks_0/attention/q/kernel 2x8x2x4 layers,embed,heads,head_dim
encoder/blocks_0/attention/v/kernel 2x8x1x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention_norm/scale 2x8 layers,norm
encoder/blocks_0/attention_post_norm/scale 2x8 layers,norm
encoder/blocks_0/mlp/down/kernel 2x12x8 layers,mlp,embed
encoder/blocks_0/mlp/gate/kernel 2x8x12 layers,embed,mlp
encoder/blocks_0/mlp/up/kernel 2x8x12 layers,embed,mlp
encoder/blocks_0/mlp_norm/scale 2x8 layers,norm
encoder/blocks_0/mlp_post_norm/scale 2x8 layers,norm
encoder/blocks_1/attention/k/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_1/attention/out/kernel 1x2x4x8 layers,heads,head_dim,embed
encoder/blocks_1/attention/q/kernel 1x8x2x4 layers,embed,heads,head_dim
encoder/blocks_1/attention/v/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_1/attention_norm/scale 1x8 layers,norm
encoder/blocks_1/mlp/down/kernel 1x12x8 layers,mlp,embed
encoder/blocks_1/mlp/up/kernel 1x8x12 layers,embed,mlp
encoder/blocks_1/mlp_norm/scale 1x8 layers,norm
encoder/final_norm/scale 8 norm
head/bias 11 vocab
head/output/kernel 8x11 embed,vocab
""",
    sparse_decoder: """
decoder/blocks_0/attention/k/kernel 2x8x1x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention/k_norm/scale 2x4 layers,norm
decoder/blocks_0/attention/out/kernel 2x2x4x8 layers,heads,head_dim,embed
decoder/blocks_0/attention/q/kernel 2x8x2x4 layers,embed,heads,head_dim
decoder/blocks_0/attention/q_norm/scale 2x4 layers,norm
decoder/blocks_0/attention/v/kernel 2x8x1x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention_norm/scale 2x8 layers,norm
decoder/blocks_0/mlp/down 2x5x6x8 layers,expert,mlp,embed
decoder/blocks_0/mlp/gate 2x5x8x6 layers,expert,embed,mlp
decoder/blocks_0/mlp/router/kernel 2x8x5 layers,embed,router
decoder/blocks_0/mlp/up 2x5x8x6 layers,expert,embed,mlp
decoder/blocks_0/mlp_norm/scale 2x8 layers,norm
decoder/first_0/attention/k/kernel 1x8x1x4 layers,embed,kv_heads,head_dim
decoder/first_0/attention/k_norm/scale 1x4 layers,norm
decoder/first_0/attention/out/kernel 1x2x4x8 layers,heads,head_dim,embed
decoder/first_0/attention/q/kernel 1x8x2x4 layers,embed,heads,head_dim
decoder/first_0/attention/q_norm/scale 1x4 layers,norm
decoder/first_0/attention/v/kernel 1x8x1x4 layers,embed,kv_heads,head_dim
decoder/first_0/mlp/down/kernel 1x12x8 layers,mlp,embed
decoder/first_0/mlp/up/kernel 1x8x12 layers,embed,mlp
decoder/first_0/mlp_norm/scale 1x8 layers,norm
decoder/relative_bias 6x2 -,heads
embedding/tokens 11x8 vocab,embed
""",
    classifier: """
embedding/positions 7x8 position,embed
embedding/tokens 11x8 vocab,embed
embedding/types 3x8 -,embed
encoder/blocks_0/attention/k/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention/out/kernel 3x2x4x8 layers,heads,head_dim,embed
encoder/blocks_0/attention/q/kernel 3x8x2x4 layers,embed,heads,head_dim
encoder/blocks_0/attention/v/kernel 3x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention_norm/bias 3x8 layers,norm
encoder/blocks_0/attention_norm/scale 3x8 layers,norm
encoder/blocks_0/mlp/down/kernel 3x12x8 layers,mlp,embed
encoder/blocks_0/mlp/up/kernel 3x8x12 layers,embed,mlp
encoder/blocks_0/mlp_norm/bias 3x8 layers,norm
encoder/blocks_0/mlp_norm/scale 3x8 layers,norm
head/bias 11 vocab
head/transform/dense/bias 8 mlp
head/transform/dense/kernel 8x8 embed,mlp
head/transform/norm/bias 8 norm
head/transform/norm/scale 8 norm
pooler/classes/bias 4 -
pooler/classes/kernel 8x4 embed,-
pooler/transform/dense/bias 8 mlp
pooler/transform/dense/kernel 8x8 embed,mlp
""",
    two_sides: """
decoder/blocks_0/attention/k/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention/out/kernel 1x2x4x8 layers,heads,head_dim,embed
decoder/blocks_0/attention/q/kernel 1x8x2x4 layers,embed,heads,head_dim
decoder/blocks_0/attention/v/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/attention_norm/bias 1x8 layers,norm
decoder/blocks_0/attention_norm/scale 1x8 layers,norm
decoder/blocks_0/attention_post_norm/bias 1x8 layers,norm
decoder/blocks_0/attention_post_norm/scale 1x8 layers,norm
decoder/blocks_0/cross_attention/k/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/cross_attention/out/kernel 1x2x4x8 layers,heads,head_dim,embed
decoder/blocks_0/cross_attention/q/kernel 1x8x2x4 layers,embed,heads,head_dim
decoder/blocks_0/cross_attention/v/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
decoder/blocks_0/cross_attention_norm/bias 1x8 layers,norm
decoder/blocks_0/cross_attention_norm/scale 1x8 layers,norm
decoder/blocks_0/cross_attention_post_norm/bias 1x8 layers,norm
decoder/blocks_0/cross_attention_post_norm/scale 1x8 layers,norm
decoder/blocks_0/mlp/down/kernel 1x12x8 layers,mlp,embed
decoder/blocks_0/mlp/up/kernel 1x8x12 layers,embed,mlp
decoder/blocks_0/mlp_norm/bias 1x8 layers,norm
decoder/blocks_0/mlp_norm/scale 1x8 layers,norm
decoder/blocks_0/mlp_post_norm/bias 1x8 layers,norm
decoder/blocks_0/mlp_post_norm/scale 1x8 layers,norm
decoder/relative_bias 6x2 -,heads
embedding/norm/bias 8 norm
embedding/norm/scale 8 norm
embedding/positions 5x8 position,embed
embedding/source_norm/bias 8 norm
embedding/source_norm/scale 8 norm
embedding/source_positions 5x8 position,embed
embedding/tokens 11x8 vocab,embed
encoder/blocks_0/attention/k/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention/out/kernel 1x2x4x8 layers,heads,head_dim,embed
encoder/blocks_0/attention/q/kernel 1x8x2x4 layers,embed,heads,head_dim
encoder/blocks_0/attention/v/kernel 1x8x2x4 layers,embed,kv_heads,head_dim
encoder/blocks_0/attention_norm/bias 1x8 layers,norm
encoder/blocks_0/attention_norm/scale 1x8 layers,norm
encoder/blocks_0/mlp/down/kernel 1x12x8 layers,mlp,embed
encoder/blocks_0/mlp/up/kernel 1x8x12 layers,embed,mlp
encoder/blocks_0/mlp_norm/bias 1x8 layers,norm
encoder/blocks_0/mlp_norm/scale 1x8 layers,norm
encoder/relative_bias 6x2 -,heads
""",
}


@pytest.mark.parametrize("shape", GOLDEN, ids=lambda build: build.__name__)
def test_names_shapes_and_axes_are_api(shape):
    actual = _table(shape())
    expected = GOLDEN[shape].strip().splitlines()
    assert actual == expected, (
        "Parameters have changed, so existing checkpoints no longer load. Update this list only together with a "
        "migration for them. If you add an optional parameter, test it with a new model instead."
    )


@pytest.mark.parametrize("shape", GOLDEN, ids=lambda build: build.__name__)
def test_axes_are_known_to_the_sharding_rules(shape):
    axes = jax.tree.leaves(abstract_params(shape())[1])
    assert set(axes) <= set(RULES)


@pytest.mark.parametrize("shape", GOLDEN, ids=lambda build: build.__name__)
def test_abstract_parameters_match_init(shape):
    abstract, _ = abstract_params(shape())
    concrete = jax.eval_shape(lambda: init_params(shape(), jax.random.key(0)))
    assert abstract == concrete
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(abstract))
    assert num_params(shape()) == sum(leaf.size for leaf in jax.tree.leaves(concrete))


def test_abstract_parameters_allocate_nothing():
    before = len(jax.live_arrays())
    shapes, axes = abstract_params(preset("llama3-70b"))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert len(jax.live_arrays()) == before
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731
    assert jax.tree.structure(jax.tree.map(lambda _: 0, axes, is_leaf=is_axes)) == jax.tree.structure(
        jax.tree.map(lambda _: 0, shapes)
    )


# ---------------------------------------------------------------- initial values
@pytest.fixture(scope="module")
def gpt2_values():
    config = gpt2(num_layers=4, embed_dim=64, num_heads=4, vocab_size=300, context_length=64)
    return _init(config, 0)


@pytest.fixture(scope="module")
def vaswani_values():
    return _init(vaswani(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=96, vocab_size=300), 0)


@pytest.fixture(scope="module")
def llama_values():
    return _init(llama(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=96, vocab_size=300), 0)


@pytest.mark.parametrize("values", ["gpt2_values", "vaswani_values", "llama_values"])
def test_biases_are_initialised_to_zero_and_norms_to_one(request, values):
    for path, leaf in request.getfixturevalue(values).items():
        if path.endswith("/bias"):
            assert (leaf == 0).all(), path
        if path.endswith("/scale"):
            assert (leaf == 1).all(), path


@pytest.mark.parametrize(("values", "layers"), [("gpt2_values", 4), ("llama_values", 2)])
def test_kernels_have_the_configured_stddev_and_outputs_are_scaled_by_depth(request, values, layers):
    """0.02, and 0.02 / sqrt(2 * layers) where a layer writes into the residual stream (GPT-2, section 2.3)."""
    for path, leaf in request.getfixturevalue(values).items():
        if not path.endswith("/kernel"):
            continue
        writes = "/out/" in path or "/down/" in path
        stddev = 0.02 / (2 * layers) ** 0.5 if writes else 0.02
        for layer in leaf if "blocks" in path else leaf[None]:
            assert layer.std() == pytest.approx(stddev, rel=0.05), path
            assert abs(layer.mean()) < 5 * stddev / layer.size**0.5, path


def test_embeddings_have_the_configured_stddev(gpt2_values, vaswani_values):
    assert gpt2_values["embedding/tokens"].std() == pytest.approx(0.02, rel=0.05)
    assert gpt2_values["embedding/positions"].std() == pytest.approx(0.02, rel=0.05)
    # The model multiplies token embeddings by sqrt(64), which gives them unit variance.
    assert vaswani_values["embedding/tokens"].std() == pytest.approx(64**-0.5, rel=0.05)


def test_xavier_bounds(vaswani_values):
    """Uniform within sqrt(6 / (fan_in + fan_out)), heads counted as one dimension (Glorot and Bengio 2010, eq. 16)."""
    for path, leaf in vaswani_values.items():
        if not path.endswith("/kernel"):
            continue
        fans = 64 + 96 if "/mlp/" in path else 64 + 64
        bound = (6 / fans) ** 0.5
        assert 0.99 * bound < np.abs(leaf).max() <= bound, path
        assert leaf.std() == pytest.approx(bound / 3**0.5, rel=0.05), path


@pytest.mark.parametrize(("shape", "num_in", "fan_in"), [((64, 4, 16), 1, 64), ((4, 16, 64), 2, 64)])
def test_fan_in_init_is_truncated_and_keeps_its_variance(shape, num_in, fan_in):
    init = initializer(FanInInit(scale=2.0), num_in, scale=0.5)
    values = np.asarray(init(jax.random.key(0), shape))
    stddev = 0.5 * (2.0 / fan_in) ** 0.5
    assert values.std() == pytest.approx(stddev, rel=0.05)
    assert 2.1 * stddev < np.abs(values).max() <= 2 / 0.8796 * stddev


def test_layers_and_projections_have_different_initial_values(gpt2_values):
    kernels = [leaf for path, leaf in gpt2_values.items() if path.endswith("/kernel")]
    firsts = [float(layer.flat[0]) for leaf in kernels for layer in leaf]
    assert len(set(firsts)) == len(firsts) == 6 * 4


def test_initial_values_depend_only_on_the_key(gpt2_values):
    config = gpt2(num_layers=4, embed_dim=64, num_heads=4, vocab_size=300, context_length=64)
    again, other = _init(config, 0), _init(config, 1)
    for path, leaf in gpt2_values.items():
        np.testing.assert_array_equal(again[path], leaf)
        if path.endswith("kernel") or path.startswith("embedding"):
            assert (other[path] != leaf).any(), path


_program = jax.jit(init_params, static_argnums=0)


def _init(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(_program(config, jax.random.key(seed)))
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves}


def _table(config: ModelConfig) -> list[str]:
    """Lines of `path shape axes`, one per parameter."""
    shapes, axes = abstract_params(config)

    def line(path, leaf, names):
        return f"{path_name(path)} {'x'.join(map(str, leaf.shape))} {','.join(name or '-' for name in names)}"

    return jax.tree.leaves(jax.tree_util.tree_map_with_path(line, shapes, axes))
