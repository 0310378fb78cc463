"""Features that only some models have: experts, first layers, shared biases, norm placements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    InitConfig,
    MlpConfig,
    NormalInit,
    NormConfig,
    Rope,
    apply_overrides,
)
from jaxformer.decode.cache import make_caches
from jaxformer.layers import Runtime, Transformer, init_params
from jaxformer.layers.attention import Attention
from jaxformer.layers.block import Block, Context
from jaxformer.layers.linear import Norm
from jaxformer.layers.mlp import Mlp
from jaxformer.layers.remat import POLICIES
from jaxformer.layers.stack import unstack_layers
from jaxformer.ops.biases import BucketedBias
from jaxformer.ops.masks import Mask
from jaxformer.ops.positions import rope_tables
from jaxformer.sharding import path_name
from jaxformer.typing import tokens_from_ids

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 31, size=(2, 6))
TOKENS = tokens_from_ids(jnp.array(IDS), jnp.array([[1] * 6, [1] * 4 + [0] * 2]))
X = RNG.normal(size=(2, 6, 16)).astype(np.float32)
RUNTIMES = {
    "unroll 2": Runtime(unroll=2),
    "unroll all": Runtime(unroll="all"),
    **{f"remat {remat}": Runtime(remat=remat) for remat in POLICIES},
}


# ---------------------------------------------------------------- scan, unroll, remat
@pytest.fixture(scope="module")
def scanned(sparse, params_of):
    value, gradients = _loss_and_gradients(sparse, params_of(sparse), Runtime())
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert jnp.abs(leaf).max() > 1e-5, f"{path_name(path)}: zeros would agree too easily"
    return value, gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNTIMES)
def test_runtime_changes_neither_loss_nor_gradients(sparse, params_of, scanned, name):
    """With dropout and the router loss; gradients include those of the router and of the shared bias."""
    value, gradients = _loss_and_gradients(sparse, params_of(sparse), RUNTIMES[name])
    np.testing.assert_allclose(value, scanned[0], atol=1e-5)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5), gradients, scanned[1])


def _loss_and_gradients(config, params, runtime):
    """The loss (router loss plus a weighted mean of hidden states), the router loss, and the gradients of the loss."""

    @jax.jit
    def run(params):
        def loss(params):
            hidden, router = Transformer(config, runtime).apply(
                {"params": params}, TOKENS, None, jax.random.key(7), method="hidden_and_router_loss"
            )
            return (hidden * X).mean() + router, router

        return jax.value_and_grad(loss, has_aux=True)(params)

    used = {name: part for name, part in params.items() if name != "head"}
    return run(used)


@pytest.mark.slow
def test_a_stack_equals_its_blocks_applied_in_order(sparse, params_of):
    """The first layer, then a b a b a, all with the same bias; the router loss is the mean over layers with experts."""
    params, stack = params_of(sparse), sparse.decoder
    decoder, x, losses = params["decoder"], params["embedding"]["tokens"][IDS], []
    bias = BucketedBias(decoder["relative_bias"], stack.relative_bias.max_distance, causal=True)
    context = Context(TOKENS.positions, TOKENS.segments, bias=bias).with_rope(stack.blocks)
    order = [("first_0", 0), ("blocks_0", 0), ("blocks_1", 0), ("blocks_0", 1), ("blocks_1", 1), ("blocks_0", 2)]
    configs = {"first_0": stack.first[0], "blocks_0": stack.pattern[0], "blocks_1": stack.pattern[1]}
    blocks = {name: _block(config) for name, config in configs.items()}
    for name, depth in order:
        layer = jax.tree.map(lambda a, depth=depth: a[depth], decoder[name])
        x, cache, loss = blocks[name](layer, x, context)
        assert cache is None
        assert (loss is None) == (name != "blocks_0")
        losses += [] if loss is None else [loss]
    x = Norm(stack.final_norm).apply({"params": decoder["final_norm"]}, x)
    hidden, router = _method(Transformer(sparse), "hidden_and_router_loss")(params, TOKENS)
    np.testing.assert_allclose(hidden, x, atol=2e-5)
    assert float(router) == pytest.approx(float(jnp.stack(losses).mean()), rel=1e-5)


@pytest.mark.slow
def test_extending_in_pieces_equals_the_full_forward_pass(sparse, params_of):
    """Three tokens, then three more with a cache: biases and windows must use the offset. There is no padding."""
    model, params, tokens = Transformer(sparse), params_of(sparse), tokens_from_ids(jnp.array(IDS))
    layers = unstack_layers(params, sparse)
    assert [len(layers["decoder"][name]) for name in ("first_0", "blocks_0", "blocks_1")] == [1, 3, 2]
    assert layers["decoder"]["relative_bias"] is params["decoder"]["relative_bias"]
    hidden = _method(model, "hidden")
    whole = hidden(params, tokens)
    np.testing.assert_allclose(hidden(layers, tokens), whole, atol=2e-5)
    extend, caches, pieces = _method(model, "extend"), make_caches(sparse, 2, 8, Runtime()), []
    for start in (0, 3):
        part = jax.tree.map(lambda a, start=start: a[:, start : start + 3], tokens)
        piece, caches = extend(layers, part, jnp.full((2,), start), caches)
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)


def test_router_losses_use_the_configured_weights(sparse, params_of):
    """Doubling the weights doubles the loss, zero weights give zero, and the loss is None without experts."""

    def loss(config):
        return _method(Transformer(config), "hidden_and_router_loss")(params_of(sparse), TOKENS)[1]

    fields = ("load_balance", "router_z")
    once = loss(sparse)
    twice, zero = (
        loss(
            apply_overrides(
                sparse, [f"decoder.pattern.0.mlp.{f}={n * v}" for f, v in zip(fields, (0.3, 0.1), strict=True)]
            )
        )
        for n in (2, 0)
    )
    assert float(twice) == pytest.approx(2 * float(once), rel=1e-5)
    assert float(zero) == 0.0
    dense = sparse.decoder.model_copy(update={"pattern": sparse.decoder.pattern[1:]})
    config = sparse.model_copy(update={"decoder": dense})
    shapes = jax.eval_shape(lambda: _method(Transformer(config), "hidden_and_router_loss")(params_of(config), TOKENS))
    assert shapes[1] is None


def test_a_block_with_experts_learns(sparse):
    """Gradient descent on one block reduces its error and changes the router."""
    block = sparse.decoder.pattern[0]
    module = Block(block, 16, InitConfig(kernel=NormalInit(stddev=0.3)), 1.0, Runtime())
    context = Context(TOKENS.positions, TOKENS.segments).with_rope([block])
    params = jax.jit(module.init)(jax.random.key(0), X, context)["params"]
    params = jax.tree.map(lambda box: box.unbox(), params, is_leaf=lambda leaf: hasattr(leaf, "unbox"))

    @jax.jit
    @jax.value_and_grad
    def error(params):
        out, _, router = module.apply({"params": params}, X, context)
        return jnp.square(out - X[:, ::-1]).mean() + router

    first, gradients = error(params)
    start = params
    for _ in range(30):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, error(params)[1])
    assert error(params)[0] < 0.9 * first
    for name, leaf in {"router": gradients["mlp"]["router"]["kernel"], "up": gradients["mlp"]["up"]}.items():
        assert jnp.abs(leaf).max() > 1e-4, name
    assert jnp.abs(params["mlp"]["router"]["kernel"] - start["mlp"]["router"]["kernel"]).max() > 1e-3


# ---------------------------------------------------------------- norms
def _reference_block(placement, norm, attend, feed, x):
    """One block, written out for each norm placement."""
    if placement == "bare attention":
        x = x + attend(x)
        return x + feed(norm("mlp_norm", x))
    if placement == "pre":
        x = x + attend(norm("attention_norm", x))
        return x + feed(norm("mlp_norm", x))
    if placement == "post":
        x = norm("attention_norm", x + attend(x))
        return norm("mlp_norm", x + feed(x))
    x = x + norm("attention_post_norm", attend(norm("attention_norm", x)))
    return x + norm("mlp_post_norm", feed(norm("mlp_norm", x)))


@pytest.mark.parametrize("placement", ["bare attention", "pre", "post", "sandwich"])
def test_norms_follow_the_configured_placement(placement):
    config = BlockConfig(
        attention=AttentionConfig(num_heads=2, head_dim=8),
        mlp=MlpConfig(dim=12),
        attention_norm=placement != "bare attention",
        placement="pre" if placement == "bare attention" else placement,
    )
    context = Context(TOKENS.positions, TOKENS.segments)
    block = Block(config, 16, InitConfig(), 1.0, Runtime())
    params = _random(jax.eval_shape(lambda: block.init(jax.random.key(0), X, context))["params"])
    shared = (16, NormalInit(), 1.0, Runtime())
    mask = Mask(q_segments=TOKENS.segments, kv_segments=TOKENS.segments)

    def attend(h):
        def run(module, h):
            return module(h, module.keys_values(h), mask)

        return Attention(config.attention, *shared).apply({"params": params["attention"]}, h, method=run)

    def feed(h):
        return Mlp(config.mlp, *shared).apply({"params": params["mlp"]}, h)

    def norm(name, h):
        return Norm(config.norm).apply({"params": params[name]}, h)

    expected = _reference_block(placement, norm, attend, feed, X)
    np.testing.assert_allclose(_block(config)(params, X, context).x_BTD, expected, atol=1e-5)
    assert ("attention_norm" in params) == config.attention_norm


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_unit_offset_adds_one_to_the_scale(kind):
    plain, offset = NormConfig(kind=kind, bias=False), NormConfig(kind=kind, bias=False, unit_offset=True)
    scale = RNG.normal(size=16).astype(np.float32)
    expected = Norm(plain).apply({"params": {"scale": scale + 1}}, X)
    np.testing.assert_allclose(Norm(offset).apply({"params": {"scale": scale}}, X), expected, atol=1e-6)
    first = [Norm(config).init_with_output(jax.random.key(0), X)[0] for config in (plain, offset)]
    np.testing.assert_allclose(*first, atol=1e-6)


# ---------------------------------------------------------------- attention
@pytest.mark.parametrize("peer", ["normalised queries and keys", "soft cap and scale"])
def test_attention_matches_transformers(peer):
    """Against Qwen3, which normalises each head before the rotation, and Gemma 2, which caps its logits."""
    import torch
    from transformers import Gemma2Config, Qwen3Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    plain = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, causal=True, position=Rope())
    if peer == "soft cap and scale":
        config = plain.model_copy(update={"softcap": 0.5, "scale": 24**-0.5})
        theirs = Gemma2Attention(
            Gemma2Config(**shape, attn_logit_softcapping=0.5, query_pre_attn_scalar=24, attn_implementation="eager"), 0
        )
    else:
        config = plain.model_copy(update={"qk_norm": NormConfig(kind="rms", eps=1e-3)})
        theirs = Qwen3Attention(Qwen3Config(**shape, rms_norm_eps=1e-3, attn_implementation="eager"), 0)
    weights = {}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.tensor(RNG.normal(size=parameter.shape).astype(np.float32)))
            weights[name] = parameter.numpy()
    cos, sin = Qwen3RotaryEmbedding(Qwen3Config(**shape))(torch.tensor(X), torch.arange(6)[None])
    future = torch.triu(torch.full((6, 6), -torch.inf), 1)[None, None]
    expected = theirs.eval()(torch.tensor(X), (cos, sin), future)[0].detach().numpy()

    params = {name: {"kernel": weights[f"{name}_proj.weight"].T.reshape(16, -1, 8)} for name in "qkv"}
    params["out"] = {"kernel": weights["o_proj.weight"].T.reshape(4, 8, 16)}
    if config.qk_norm is not None:
        params |= {f"{name}_norm": {"scale": weights[f"{name}_norm.weight"]} for name in "qk"}
    tables = rope_tables(jnp.broadcast_to(jnp.arange(6), (2, 6)), config.position, config.head_dim)

    def run(module, x):
        return module(x, module.keys_values(x, tables), Mask(causal=True), tables)

    ours = Attention(config, 16, NormalInit(), 1.0, Runtime()).apply({"params": params}, X, method=run)
    np.testing.assert_allclose(ours, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


def test_slopes_replace_a_shared_bias(sparse, params_of, forward):
    """A layer with ALiBi slopes ignores the bias that the stack shares."""
    overrides = [f"decoder.pattern.{i}.attention.position=none" for i in range(2)]
    bare = apply_overrides(sparse, ["decoder.relative_bias=none", *overrides])
    sloped = apply_overrides(bare, [f"{block}.attention.position.kind=alibi" for block in BLOCKS])
    same = tokens_from_ids(jnp.array([[3, 5, 5, 5, 9, 5]]))
    params = params_of(bare)
    assert jnp.abs(forward(sloped, same, params=params) - forward(bare, same, params=params)).max() > 1e-3
    shared = apply_overrides(sloped, ['decoder.relative_bias={"num_buckets": 8, "max_distance": 6}'])
    with_table = {
        **params,
        "decoder": {**params["decoder"], "relative_bias": jnp.ones((8, 4)) * jnp.arange(8)[:, None]},
    }
    np.testing.assert_array_equal(forward(shared, same, params=with_table), forward(sloped, same, params=params))


BLOCKS = ("decoder.first.0", "decoder.pattern.0", "decoder.pattern.1")


def test_initial_experts_differ_and_have_the_configured_stddev(sparse):
    config = sparse.model_copy(update={"embed_dim": 32, "init": InitConfig(depth_scaled_output=True)})
    values = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    experts = values["decoder"]["blocks_0"]["mlp"]
    for name, stddev in (("up", 0.02), ("gate", 0.02), ("down", 0.02 / 12**0.5)):
        leaf = np.asarray(experts[name])
        assert leaf.shape[:2] == (3, 4), "layers, then experts"
        assert len({float(expert.flat[0]) for layer in leaf for expert in layer}) == 12
        assert leaf.std(axis=(2, 3)) == pytest.approx(stddev, rel=0.15), name


def _random(shapes):
    rng = np.random.default_rng(1)
    unboxed = jax.tree.map(lambda box: box.value, shapes, is_leaf=lambda leaf: hasattr(leaf, "value"))
    return jax.tree.map(lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(np.float32), unboxed)


def _block(config):
    block = Block(config, 16, InitConfig(), 1.0, Runtime())
    return jax.jit(lambda params, x, context: block.apply({"params": params}, x, context))


def _method(model, name):
    return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs, method=name))
