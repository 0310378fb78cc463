"""Scanned, unrolled, rematerialised and unstacked layers give the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import apply_overrides
from jaxformer.decode.cache import make_caches
from jaxformer.layers import Runtime, Transformer
from jaxformer.layers.block import Block, Context
from jaxformer.layers.linear import Norm
from jaxformer.layers.remat import POLICIES
from jaxformer.layers.stack import unstack_layers
from jaxformer.ops.losses import cross_entropy
from jaxformer.typing import tokens_from_ids

IDS = np.random.default_rng(0).integers(0, 31, size=(2, 6))
TOKENS = tokens_from_ids(jnp.array(IDS))
RUNTIMES = {
    "unroll 2": Runtime(unroll=2),
    "unroll all": Runtime(unroll="all"),
    **{f"remat {remat}": Runtime(remat=remat) for remat in POLICIES},
    "remat offload, unrolled": Runtime(remat="offload", unroll="all"),
}
DEFAULT = ("unroll 2", "remat dots", "remat attention", "remat offload")


# ---------------------------------------------------------------- scan, unroll, remat
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in RUNTIMES],
)
def test_runtime_changes_neither_loss_nor_gradients(mixed, params_of, scanned, name):
    """With dropout: each layer must get the same key under every runtime, and again when it is recomputed."""
    loss, gradients = _loss_and_gradients(mixed, params_of(mixed), RUNTIMES[name])
    expected_loss, expected = scanned
    assert float(loss) == pytest.approx(float(expected_loss), abs=1e-6)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6), gradients, expected)


@pytest.fixture(scope="module")
def scanned(mixed, params_of):
    loss, gradients = _loss_and_gradients(mixed, params_of(mixed), Runtime())
    assert all(jnp.abs(leaf).max() > 1e-5 for leaf in jax.tree.leaves(gradients)), "zeros would agree too easily"
    return loss, gradients


def _loss_and_gradients(config, params, runtime):
    model = Transformer(config, runtime)

    @jax.jit
    @jax.value_and_grad
    def run(params):
        sums, _ = cross_entropy(
            model.apply({"params": params}, TOKENS, None, jax.random.key(7)), jnp.array(IDS), jnp.ones(IDS.shape)
        )
        return sums.loss / sums.weight

    return run(params)


@pytest.mark.parametrize("unroll", [1, "all"])
def test_remat_saves_less_for_the_backward_pass(mixed, params_of, unroll):
    """Guards the test above, which would also pass if remat did nothing."""

    def saved_size(remat):
        model = Transformer(mixed, Runtime(remat=remat, unroll=unroll))
        _, pullback = jax.eval_shape(lambda p: jax.vjp(lambda p: model.apply({"params": p}, TOKENS), p), params)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    params = params_of(mixed)
    assert saved_size("full") < saved_size("attention") < saved_size("dots") < saved_size("none")
    assert saved_size("offload") == saved_size("attention")


def test_unroll_beyond_the_number_of_layers_unrolls_all(mixed, forward):
    np.testing.assert_allclose(forward(mixed, TOKENS, runtime=Runtime(unroll=50)), forward(mixed, TOKENS), atol=1e-5)


# ---------------------------------------------------------------- patterns
def test_a_stack_equals_its_blocks_applied_in_order(mixed, params_of):
    """Five layers of a pattern of two are a b a b a; the i-th use of a block takes slice i of its parameters."""
    params = params_of(mixed)
    stack = mixed.decoder
    x = params["embedding"]["tokens"][IDS]
    context = Context(TOKENS.positions, TOKENS.segments).with_rope(stack.blocks)
    for layer in range(5):
        entry, depth = layer % 2, layer // 2
        block = Block(stack.pattern[entry], 16, mixed.init, 1.0, Runtime())
        layer_params = jax.tree.map(lambda a, depth=depth: a[depth], params["decoder"][f"blocks_{entry}"])
        result = jax.jit(block.apply)({"params": layer_params}, x, context)
        assert result.cache is None
        assert result.router_loss is None
        x = result.x_BTD
    x = Norm(stack.final_norm).apply({"params": params["decoder"]["final_norm"]}, x)
    whole = _method(Transformer(mixed), "hidden")(params, TOKENS)
    np.testing.assert_allclose(whole, x, atol=1e-5)


def test_every_layer_affects_the_output(mixed, params_of, forward):
    before = forward(mixed, TOKENS)
    for entry, count in ((0, 3), (1, 2)):
        for depth in range(count):
            params = jax.tree.map(lambda a: a, params_of(mixed))
            kernel = params["decoder"][f"blocks_{entry}"]["mlp"]["down"]["kernel"]
            params["decoder"][f"blocks_{entry}"]["mlp"]["down"]["kernel"] = kernel.at[depth, :, 0].add(0.5)
            assert jnp.abs(forward(mixed, TOKENS, params=params) - before).max() > 1e-3, (entry, depth)


# ---------------------------------------------------------------- extending with a cache
@pytest.mark.parametrize("runtime", [Runtime(), Runtime(unroll="all")], ids=["scan", "unrolled"])
def test_extending_in_pieces_equals_the_full_forward_pass(mixed, params_of, runtime):
    """Three tokens, then three more with a cache; with stacked parameters and with one tree per layer."""
    model, params = Transformer(mixed, runtime), params_of(mixed)
    whole = _method(model, "hidden")(params, TOKENS)
    for stored in (params, unstack_layers(params, mixed)):
        pieces = _extend_in_pieces(model, stored, make_caches(mixed, 2, 8, Runtime()))
        np.testing.assert_allclose(pieces, whole, atol=1e-5)


def test_extending_an_encoder_decoder_equals_the_full_forward_pass(pair, params_of):
    model, params = Transformer(pair), params_of(pair)
    source = tokens_from_ids(jnp.array(IDS[:, :5]), jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    whole = _method(model, "hidden")(params, TOKENS, source)
    encoded = _method(model, "encode")(params, source)
    for stored in (params, unstack_layers(params, pair)):
        cross = _method(model, "cross_keys_values")(stored, encoded)
        caches = make_caches(pair, 2, 8, Runtime(), cross)
        np.testing.assert_allclose(_extend_in_pieces(model, stored, caches, source.segments), whole, atol=1e-5)


def test_the_forward_pass_accepts_unstacked_parameters(mixed, params_of, forward):
    params = unstack_layers(params_of(mixed), mixed)
    np.testing.assert_allclose(forward(mixed, TOKENS, params=params), forward(mixed, TOKENS), atol=1e-5)


def test_unstack_layers_keeps_every_layer(mixed, params_of):
    params = params_of(mixed)
    layers = unstack_layers(params, mixed)
    assert [len(layers["decoder"][f"blocks_{i}"]) for i in range(2)] == [3, 2]
    assert layers["embedding"] == params["embedding"]
    for i in range(2):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers["decoder"][f"blocks_{i}"])
        jax.tree.map(np.testing.assert_array_equal, stacked, params["decoder"][f"blocks_{i}"])


def _extend_in_pieces(model, params, caches, source_segments=None):
    extend, pieces = _method(model, "extend"), []
    for start in (0, 3):
        tokens = jax.tree.map(lambda part, start=start: part[:, start : start + 3], TOKENS)
        hidden, caches = extend(params, tokens, jnp.full((2,), start), caches, source_segments)
        pieces.append(hidden)
    return jnp.concatenate(pieces, axis=1)


def _method(model, name):
    return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs, method=name))


# ---------------------------------------------------------------- heads
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_kv_heads_equal_repeated_kv_heads(mixed, params_of, forward, kv_heads):
    """Grouped-query and multi-query attention equal multi-head attention with repeated key-value heads."""
    shared = apply_overrides(
        mixed,
        [f"decoder.pattern.{i}.attention.num_kv_heads={kv_heads}" for i in range(2)],
    )
    full = apply_overrides(shared, [f"decoder.pattern.{i}.attention.num_kv_heads=none" for i in range(2)])
    params = params_of(shared)

    def repeat_kv_heads(path, leaf):
        names = [part.key for part in path]
        return jnp.repeat(leaf, 4 // kv_heads, axis=2) if {"k", "v"} & set(names) else leaf

    repeated = jax.tree_util.tree_map_with_path(repeat_kv_heads, params)
    np.testing.assert_allclose(
        forward(full, TOKENS, params=repeated), forward(shared, TOKENS, params=params), atol=1e-5
    )


# ---------------------------------------------------------------- dtypes
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_bfloat16_gives_close_float32_logits(mixed, forward, tied):
    config = apply_overrides(mixed, [f"head.tied={'true' if tied else 'false'}"])
    full, half = forward(config, TOKENS), forward(config, TOKENS, runtime=Runtime(dtype=jnp.bfloat16))
    assert half.dtype == full.dtype == jnp.float32
    assert 1e-5 < jnp.abs(half - full).max() < 0.05 * jnp.abs(full).max()
    rounded = half.astype(jnp.bfloat16).astype(jnp.float32)
    assert (rounded != half).mean() > 0.5, "logits must be summed in float32, not rounded to bfloat16"


def test_bfloat16_layers_return_bfloat16(mixed, params_of):
    model = Transformer(mixed, Runtime(dtype=jnp.bfloat16))
    hidden = jax.eval_shape(lambda: model.apply({"params": params_of(mixed)}, TOKENS, method="hidden"))
    assert hidden.dtype == jnp.bfloat16


# ---------------------------------------------------------------- rotary tables, scopes
@pytest.mark.parametrize("runtime", [Runtime(), Runtime(unroll="all"), Runtime(remat="full")], ids=str)
def test_rotary_tables_are_computed_once_per_forward_pass(mixed, params_of, runtime):
    """Both blocks have the same encoding, so there is one cosine for five layers, with and without caches."""
    model, params = Transformer(mixed, runtime), params_of(mixed)
    caches = make_caches(mixed, 2, 8, runtime)
    start_B = jnp.zeros(2, jnp.int32)
    whole = jax.make_jaxpr(lambda p: model.apply({"params": p}, TOKENS, method="hidden"))(params)
    extended = jax.make_jaxpr(lambda p: model.apply({"params": p}, TOKENS, start_B, caches, method="extend"))(params)
    assert [str(jaxpr).count(" = cos ") for jaxpr in (whole, extended)] == [1, 1]


def test_every_rotary_encoding_has_its_own_tables(mixed, params_of):
    other = apply_overrides(mixed, ["decoder.pattern.0.attention.position.theta=500"])
    jaxpr = jax.make_jaxpr(lambda p: Transformer(other).apply({"params": p}, TOKENS, method="hidden"))
    assert str(jaxpr(params_of(other))).count(" = cos ") == 2


def test_operations_have_named_scopes_for_profiles(sparse, pair, params_of):
    """Scopes name stacks, blocks, sub-layers, norms, the attention kernel and the router."""

    def scopes(config, *inputs):
        run = jax.jit(lambda p: Transformer(config).apply({"params": p}, *inputs))
        return run.lower(params_of(config)).as_text(debug_info=True)

    program = scopes(sparse, TOKENS)
    for name in ("embedding", "decoder", "first_0", "blocks_0", "blocks_1", "attention", "attend_reference", "mlp"):
        assert f"{name}/" in program, name
    for name in ("moe/router", "attention_norm", "mlp_norm", "mlp_post_norm", "final_norm", "head"):
        assert f"{name}/" in program, name
    program = scopes(pair, TOKENS, TOKENS)
    for name in ("encoder", "decoder", "cross_attention", "cross_attention_norm"):
        assert f"{name}/" in program, name
