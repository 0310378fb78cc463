"""Every attention kernel that runs on a CPU against torch, forward and backward, and the choice of a kernel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.ops import attention
from jaxformer.ops.attention import (
    KERNELS,
    AttentionInputs,
    AttentionParams,
    Kernel,
    choose_kernel,
    reference,
    scanned,
)
from jaxformer.ops.attention.blocked import MIN_BLOCK
from jaxformer.ops.biases import Bias, BucketedBias, SlopeBias
from jaxformer.ops.masks import Mask

SCALE = 0.31  # not the default of torch
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0]])
SOURCE = np.array([[1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
RING = np.array([[5, 6, 7, 3, 4], [0, 1, 2, -1, -1]])  # one full ring that has wrapped around, one partly empty
RING_AND_NEW = np.concatenate([RING, [[8, 9, 10], [3, 4, 5]]], axis=1)
LONG = np.repeat([[1, 2, 3, 0]], [200, 131, 150, 50], axis=1)  # 531 tokens: an odd number, longer than a block


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Short rows have several blocks too."""
    monkeypatch.setattr(scanned, "MIN_BLOCK", 32)
    monkeypatch.setattr(scanned, "MAX_BLOCK", 64)


def inputs_of(q_BTNH, k_BSKH, v_BSKH, mask, *, bias=None, key=None, **params) -> AttentionInputs:
    """Inputs from keys and values with positions before heads, the layout of the references below."""
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    return AttentionInputs(q_BTNH, k_BKSH, v_BKSH, mask, AttentionParams(**params), bias, key)


def attend(*args, impl="auto", **options):
    return attention.attend(inputs_of(*args, **options), impl=impl, platform="cpu")


def first(*lengths, num_keys=8):
    """Flags of the first keys of each row."""
    return np.arange(num_keys) < np.array(lengths)[:, None]


def i32(*values):
    return np.array(values, np.int32)


# The fused kernels of TPUs and GPUs are in test_fused_attention.py.
ON_CPU = sorted(name for name, kernel in KERNELS.items() if kernel.platform is None)

# name: (query heads, key-value heads, T, S, mask)
CASES = {
    "everything": (4, 4, 5, 5, Mask()),
    "causal": (4, 4, 7, 7, Mask(causal=True)),
    "grouped-query": (4, 2, 7, 7, Mask(causal=True)),
    "multi-query": (4, 1, 7, 7, Mask(causal=True)),
    "odd lengths": (2, 2, 13, 13, Mask(causal=True)),
    "one query": (4, 2, 1, 9, Mask(causal=True, q_offset=i32(3, 8))),
    "segments": (4, 2, 9, 9, Mask(causal=True, q_segments=SEGMENTS, kv_segments=SEGMENTS)),
    "segments both ways": (2, 2, 9, 9, Mask(q_segments=SEGMENTS, kv_segments=SEGMENTS)),
    "packed source": (4, 4, 9, 7, Mask(q_segments=SEGMENTS, kv_segments=SOURCE)),
    "padded source": (2, 1, 5, 7, Mask(kv_lengths=i32(4, 7))),
    "behind a cache": (4, 2, 3, 11, Mask(causal=True, q_offset=i32(2, 8))),
    "window": (4, 2, 9, 9, Mask(causal=True, window=3)),
    "window behind a cache": (4, 2, 3, 11, Mask(causal=True, window=4, q_offset=i32(2, 8))),
    "window and segments": (2, 2, 9, 9, Mask(causal=True, window=2, q_segments=SEGMENTS, kv_segments=SEGMENTS)),
    "prefix": (2, 2, 8, 8, Mask(causal=True, prefix=first(3, 0), kv_lengths=i32(8, 6))),
    "window both ways": (4, 2, 9, 9, Mask(window=3)),
    "window of itself": (2, 1, 9, 9, Mask(window=1)),
    "window both ways and segments": (2, 2, 9, 9, Mask(window=2, q_segments=SEGMENTS, kv_segments=SEGMENTS)),
    "window both ways behind a cache": (4, 2, 3, 11, Mask(window=4, q_offset=i32(2, 8))),
    "prefix in a window": (2, 2, 8, 8, Mask(causal=True, window=3, prefix=first(5, 0))),
    "ring": (4, 2, 1, 5, Mask(causal=True, window=5, q_offset=i32(7, 2), kv_index=RING)),
    "ring and new keys": (4, 2, 3, 8, Mask(causal=True, window=5, q_offset=i32(8, 3), kv_index=RING_AND_NEW)),
    "long": (2, 1, 531, 531, Mask(causal=True)),
    "long and packed": (2, 1, 531, 531, Mask(causal=True, q_segments=LONG, kv_segments=LONG)),
    "long window": (2, 1, 531, 531, Mask(causal=True, window=100)),
    "long window both ways": (2, 1, 531, 531, Mask(window=100)),
    "long and packed in a window both ways": (2, 1, 531, 531, Mask(window=70, q_segments=LONG, kv_segments=LONG)),
    "more queries than keys in a window both ways": (2, 1, 200, 130, Mask(window=20)),
    "more keys than queries in a window both ways": (2, 1, 130, 200, Mask(window=20)),
    "more queries than keys": (2, 1, 200, 130, Mask(causal=True)),
    "more queries than keys in a window": (2, 1, 200, 130, Mask(causal=True, window=20)),
    "long queries, short source": (2, 2, 531, 9, Mask(kv_lengths=i32(5))),
    "short queries, long source": (2, 2, 5, 531, Mask(kv_lengths=i32(300))),
}
# Slow tests: combinations of conditions that the default run covers separately.
RARE = {
    "odd lengths",
    "segments both ways",
    "window of itself",
    "window both ways behind a cache",
    "long window",
    "long window both ways",
    "more queries than keys in a window both ways",
    "more keys than queries in a window both ways",
}
CELLS = [
    pytest.param(*cell, marks=pytest.mark.slow if cell[1] in RARE else ()) for cell in itertools.product(ON_CPU, CASES)
]


@pytest.mark.parametrize(("impl", "case"), CELLS)
def test_outputs_and_gradients_match_torch(visible, impl, case):
    q, k, v, mask, cotangent, seen = _inputs(visible, *CASES[case])

    @jax.jit
    def run(q, k, v):
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, mask, scale=SCALE, impl=impl), q, k, v)
        return out, pullback(cotangent)

    out, gradients = run(q, k, v)
    expected, expected_gradients = _torch_attention(q, k, v, cotangent, seen)
    sees_keys = seen.any(-1)
    np.testing.assert_allclose(np.asarray(out)[sees_keys], expected[sees_keys], atol=1e-5)
    for name, ours, theirs in zip("qkv", gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------- soft caps and biases
TABLE = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
BIASES = {
    "none": None,
    "slopes": SlopeBias(4),
    "causal buckets": BucketedBias(TABLE, max_distance=90, causal=True),
    "buckets": BucketedBias(TABLE, max_distance=90, causal=False),
}
PACKED = np.repeat([[1, 2, 0]], [70, 90, 13], axis=1)  # 173 tokens: three blocks, the last one incomplete
# name: (key-value heads, T, S, mask, bias, soft cap)
BIAS_CASES = {
    "soft cap": (2, 173, 173, Mask(causal=True), "none", 0.8),
    "soft cap, nothing masked": (4, 100, 150, Mask(), "none", 2.0),
    "slopes": (4, 173, 173, Mask(causal=True), "slopes", None),
    "slopes both ways": (2, 173, 173, Mask(), "slopes", None),
    "slopes behind a cache": (2, 70, 150, Mask(causal=True, q_offset=i32(80, 3)), "slopes", None),
    "buckets": (4, 173, 173, Mask(causal=True), "causal buckets", None),
    "buckets both ways": (2, 173, 173, Mask(), "buckets", None),
    "buckets behind a cache": (2, 70, 150, Mask(causal=True, q_offset=i32(80, 3)), "causal buckets", None),
    "buckets, packed": (1, 173, 173, Mask(q_segments=PACKED, kv_segments=PACKED), "buckets", None),
    "buckets in a window, capped": (2, 173, 173, Mask(causal=True, window=40), "causal buckets", 0.8),
    "buckets in a window both ways": (2, 173, 173, Mask(window=40), "buckets", None),
    "slopes in a window, packed, capped": (
        1, 173, 173, Mask(window=40, q_segments=PACKED, kv_segments=PACKED), "slopes", 0.8
    ),
    "padded, with buckets, capped": (4, 100, 140, Mask(kv_lengths=i32(90, 140)), "buckets", 1.5),
}  # fmt: skip


@pytest.mark.parametrize(("impl", "case"), list(itertools.product(ON_CPU, BIAS_CASES)))
def test_soft_caps_and_biases_match_torch(visible, impl, case):
    """Includes the gradient of the bias table; the bias is added after the soft cap, and masked keys stay masked."""
    K, T, S, mask, name, softcap = BIAS_CASES[case]
    q, k, v, mask, cotangent, seen = _inputs(visible, 4, K, T, S, mask)
    bias = BIASES[name]

    @jax.jit
    def run(q, k, v, bias):
        out, pullback = jax.vjp(
            lambda q, k, v, b: attend(q, k, v, mask, scale=SCALE, bias=b, softcap=softcap, impl=impl), q, k, v, bias
        )
        return out, pullback(cotangent)

    out, gradients = run(q, k, v, bias)
    offsets = np.zeros(len(q), int) if mask.q_offset is None else mask.q_offset
    expected, expected_gradients = _torch_biased_attention(q, k, v, cotangent, seen, bias, offsets, softcap)
    sees_keys = seen.any(-1)
    np.testing.assert_allclose(np.asarray(out)[sees_keys], expected[sees_keys], atol=1e-5)
    for leaf, ours, theirs in zip(
        ("q", "k", "v", "table"), jax.tree.leaves(gradients), expected_gradients, strict=False
    ):
        # The gradient of the table sums over thousands of pairs.
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-4 if leaf == "table" else 1e-7, err_msg=leaf)
    assert len(jax.tree.leaves(gradients)) == len(expected_gradients) == (4 if "buckets" in name else 3)


def test_the_scanned_form_never_unrolls():
    """Programs for 16 and for 64 blocks of queries have as many matrix products, forward and backward."""

    def num_products(num_queries):
        q = jax.ShapeDtypeStruct((1, num_queries, 4, 8), jnp.float32)
        mask = Mask(causal=True)

        def loss(q, table):
            return attend(q, q, q, mask, scale=SCALE, bias=BucketedBias(table, 90, causal=True), impl="scanned").sum()

        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(q, TABLE)).count("dot_general[")

    assert num_products(64 * 64) == num_products(16 * 64) > 0


@pytest.mark.parametrize("impl", ON_CPU)
def test_bias_gradient_under_dropout(impl):
    """The gradient of the bias table against finite differences with the same dropout mask."""
    q, k, v, cotangent = _normal(4, (1, 70, 4, 8))
    options = {"scale": SCALE, "softcap": 1.0, "dropout_rate": 0.5, "key": jax.random.key(3), "impl": impl}

    @jax.jit
    def value(table):
        out = attend(q, k, v, Mask(causal=True), bias=BucketedBias(table, 90, causal=True), **options)
        return (out * cotangent).sum()

    gradient, direction = jax.grad(value)(TABLE), np.random.default_rng(2).normal(size=TABLE.shape).astype(np.float32)
    slope = (value(TABLE + 1e-2 * direction) - value(TABLE - 1e-2 * direction)) / 2e-2
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=5e-3)


@pytest.mark.parametrize("impl", ON_CPU)
def test_a_query_without_visible_keys_gives_finite_values(impl):
    """Padding must not turn the gradient of the whole batch into NaN."""
    q, k, v = _normal(3, (1, 4, 2, 8))
    mask = Mask(q_segments=i32([1, 1, 0, 0]), kv_segments=i32([1, 1, 2, 2]))
    out, gradients = jax.value_and_grad(
        lambda q, k, v: attend(q, k, v, mask, scale=SCALE, impl=impl).sum(), argnums=(0, 1, 2)
    )(q, k, v)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((out, gradients)))


@pytest.mark.parametrize("impl", ON_CPU)
def test_large_logits_do_not_overflow(impl):
    q, k, v = _normal(3, (1, 6, 2, 8))
    out = attend(100 * q, 100 * k, v, Mask(causal=True), scale=1.0, impl=impl)
    best = (q[0, 5, 0] @ k[0, :, 0].T).argmax()
    np.testing.assert_allclose(out[0, 5, 0], v[0, best, 0], atol=1e-4)


@pytest.mark.parametrize("impl", ON_CPU)
def test_bfloat16_keeps_its_dtype_and_stays_close(impl):
    q, k, v = _normal(3, (2, 9, 2, 8))
    half = (x.astype(jnp.bfloat16) for x in (q, k, v))
    out = attend(*half, Mask(causal=True), scale=SCALE, impl=impl)
    assert out.dtype == jnp.bfloat16
    full = attend(q, k, v, Mask(causal=True), scale=SCALE, impl=impl)
    np.testing.assert_allclose(out.astype(np.float32), full, atol=0.05)


# ---------------------------------------------------------------- choice of a kernel
@pytest.mark.parametrize("length", [5, 70])
def test_auto_matches_the_reference(length):
    q, k, v = _normal(3, (1, length, 2, 8))
    auto = attend(q, k, v, Mask(causal=True), scale=SCALE)
    np.testing.assert_allclose(auto, attend(q, k, v, Mask(causal=True), scale=SCALE, impl="reference"), atol=1e-6)


@pytest.mark.parametrize(("platform", "kernel"), [("cpu", "blocked"), ("gpu", "scanned"), ("tpu", "scanned")])
def test_auto_prefers_blocks_if_there_are_several(platform, kernel):
    """On accelerators, the loop over blocks is never unrolled."""
    block = {"blocked": MIN_BLOCK, "scanned": scanned.MIN_BLOCK}[kernel]
    long, short = (
        inputs_of(*_normal(3, (1, n, 2, 8)), Mask(), scale=SCALE, bias=SlopeBias(2)) for n in (block + 1, block)
    )
    assert choose_kernel(long, platform).kernel == kernel
    choice = choose_kernel(short, platform)
    assert choice.kernel == "reference"
    assert f"{block} queries fit in a single block" in choice.skipped[kernel]


def test_a_kernel_that_auto_would_skip_can_be_requested_by_name():
    q, k, v = _normal(3, (1, 5, 2, 8))
    np.testing.assert_allclose(
        attend(q, k, v, Mask(), scale=SCALE, impl="blocked"), attend(q, k, v, Mask(), scale=SCALE), atol=1e-6
    )


def test_an_unknown_kernel_raises():
    q, k, v = _normal(3, (1, 5, 2, 8))
    with pytest.raises(
        UserError,
        match=r"attention='fastest': unknown kernel; use one of: auto, blocked, cudnn, paged, reference, scanned",
    ):
        attend(q, k, v, Mask(), scale=SCALE, impl="fastest")


def test_an_unsupported_kernel_raises_by_name_and_is_skipped_by_auto(monkeypatch):
    """`auto` takes the next kernel and reports the reason."""

    def unsupported(inputs: AttentionInputs, platform: str) -> str | None:
        return f"needs a TPU, not {platform}" if platform != "tpu" else None

    picky = Kernel(reference.attend, unsupported, reference.not_worthwhile)
    monkeypatch.setattr(attention, "KERNELS", {"picky": picky, **KERNELS})
    inputs = inputs_of(*_normal(3, (1, 70, 2, 8)), Mask(), scale=SCALE)
    choice = choose_kernel(inputs, "cpu")
    assert (choice.kernel, choice.skipped["picky"]) == ("blocked", "needs a TPU, not cpu")
    assert choose_kernel(inputs, "tpu").kernel == "picky"
    message = r"attention='picky' does not support these inputs on cpu: needs a TPU, not cpu; use 'auto'"
    with pytest.raises(UserError, match=message):
        attention.attend(inputs, impl="picky", platform="cpu")


@pytest.mark.parametrize("impl", ["auto", *ON_CPU])
def test_query_heads_must_be_a_multiple_of_kv_heads(impl):
    q, kv = np.zeros((1, 5, 6, 8), np.float32), np.zeros((1, 5, 4, 8), np.float32)
    with pytest.raises(UserError, match="6 query heads are not a multiple of 4 key-value heads"):
        attend(q, kv, kv, Mask(), scale=SCALE, impl=impl)


# ---------------------------------------------------------------- dropout
@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_at_its_rate_and_scales_the_rest(impl, rate):
    """With the identity as values, the output is the matrix of probabilities."""
    q, k, v = _normal(3, (8, 32, 2, 32))
    v = np.broadcast_to(np.eye(32, dtype=np.float32)[None, :, None], v.shape)

    def probabilities(key):
        out = attend(q, k, v, Mask(causal=True), scale=SCALE, dropout_rate=rate, key=key, impl=impl)
        return np.asarray(out)

    plain, dropped = probabilities(None), probabilities(jax.random.key(0))
    possible = plain > 0
    kept = dropped > 0
    assert not (kept & ~possible).any()
    np.testing.assert_allclose(dropped[kept], plain[kept] / (1 - rate), rtol=1e-5)
    share = 1 - kept[possible].mean()
    noise = (rate * (1 - rate) / possible.sum()) ** 0.5
    assert abs(share - rate) < 5 * noise
    assert (kept[:, :, 0] != kept[:, :, 1]).any(), "every head has its own dropout mask"
    assert (kept[0] != kept[1]).any(), "every row has its own dropout mask"
    np.testing.assert_array_equal(dropped, probabilities(jax.random.key(0)))
    assert (dropped != probabilities(jax.random.key(1))).any()


@pytest.mark.parametrize("impl", ON_CPU)
def test_gradients_under_dropout_match_the_definition(impl):
    """The dropout mask is recovered by using the identity as values, and then passed to the definition."""
    q, k, v, cotangent = _normal(4, (1, 70, 2, 70))
    options = {"scale": 0.1, "dropout_rate": 0.5, "impl": impl}
    identity = np.broadcast_to(np.eye(70, dtype=np.float32)[None, :, None], v.shape)
    dropped = attend(q, k, identity, Mask(), key=jax.random.key(3), **options)
    factor = dropped / attend(q, k, identity, Mask(), **options)

    def definition(q, k, v):
        p = jax.nn.softmax(0.1 * jnp.einsum("btnh,bsnh->btns", q, k)) * factor
        return jnp.einsum("btns,bsnh->btnh", p, v)

    def ours(q, k, v):
        return attend(q, k, v, Mask(), key=jax.random.key(3), **options)

    (value, pullback), (expected, expected_pullback) = (jax.vjp(jax.jit(f), q, k, v) for f in (ours, definition))
    np.testing.assert_allclose(value, expected, atol=1e-5)
    for name, gradient, theirs in zip("qkv", pullback(cotangent), expected_pullback(cotangent), strict=True):
        np.testing.assert_allclose(gradient, theirs, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------- reference
def _inputs(visible, N, K, T, S, mask):
    rows = [leaf.shape[0] for leaf in jax.tree.leaves(mask)]
    B = rows[0] if rows else 2
    rng = np.random.default_rng(0)
    q, cotangent = (rng.normal(size=(B, T, N, 8)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(B, S, K, 8)).astype(np.float32) for _ in range(2))
    seen = visible(mask, B, T, S)
    # The output of a query without visible keys is undefined, so it must not contribute to the gradients.
    cotangent = cotangent * seen.any(-1)[:, :, None, None]
    return q, k, v, mask, cotangent, seen


def _torch_attention(q, k, v, cotangent, seen):
    import torch

    # In float64, so that only our own rounding errors count: gradients of v sum over hundreds of queries.
    q, k, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    seen = torch.tensor(seen | ~seen.any(-1, keepdims=True))[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2).repeat_interleave(groups, dim=1),
        v.transpose(1, 2).repeat_interleave(groups, dim=1),
        attn_mask=seen,
        scale=SCALE,
    ).transpose(1, 2)
    out.backward(torch.tensor(cotangent, dtype=torch.float64))
    return out.detach().numpy(), [x.grad.numpy() for x in (q, k, v)]


def _torch_biased_attention(q, k, v, cotangent, seen, bias, offsets, softcap):
    """The definition of attention step by step: products, soft cap, bias, mask, softmax, values."""
    import torch

    q, k, v = (torch.tensor(x, requires_grad=True) for x in (q, k, v))
    leaves, groups = [q, k, v], q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    logits = torch.einsum("btnh,bsnh->bnts", q, wide_k) * SCALE
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    index = torch.arange(q.shape[1])[None] + torch.tensor(offsets)[:, None]
    distance = torch.arange(k.shape[1]) - index[:, :, None]
    if bias is not None:
        added, table = _torch_bias(bias, distance)
        logits, leaves = logits + added, leaves + table
    seen = torch.tensor(seen | ~seen.any(-1, keepdims=True))[:, None]
    p = torch.softmax(torch.where(seen, logits, -torch.inf), dim=-1)
    out = torch.einsum("bnts,bsnh->btnh", p, wide_v)
    out.backward(torch.tensor(cotangent))
    return out.detach().numpy(), [x.grad.numpy() for x in leaves]


def _torch_bias(bias: Bias, distance):
    """The bias [B, N, T, S] of transformers, and its table if it has one."""
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.t5.modeling_t5 import T5Attention

    if isinstance(bias, SlopeBias):
        slopes = build_alibi_tensor(torch.ones(1, 2), bias.num_heads, torch.float32)[:, 0, 1]
        return -slopes[:, None, None] * distance.abs()[:, None], []
    table = torch.tensor(bias.table_RN, requires_grad=True)
    bucket = T5Attention._relative_position_bucket(
        distance, not bias.causal, num_buckets=len(table), max_distance=bias.max_distance
    )
    return table[bucket].permute(0, 3, 1, 2), [table]


def _normal(count, shape):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(count)]
