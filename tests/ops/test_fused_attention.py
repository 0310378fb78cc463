"""The fused kernels of TPUs and GPUs against the reference, forward and backward.

Splash attention runs in Pallas' interpreter. Of cuDNN's kernel, only the arguments are tested: the XLA implementation
of `jax.nn.dot_product_attention` takes the same ones.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.layers.remat import rematerialize
from jaxformer.ops.attention import (
    AttentionInputs,
    AttentionParams,
    attend,
    choose_kernel,
    cudnn,
    record_choices,
    reference,
    splash,
)
from jaxformer.ops.biases import SlopeBias
from jaxformer.ops.masks import Mask

SEGMENTS = np.repeat([[1, 2, 0], [3, 1, 2]], [150, 90, 16], axis=1).astype(np.int32)
SOURCE = np.repeat([[1, 2, 0], [3, 2, 1]], [40, 70, 20], axis=1).astype(np.int32)
# name: (query heads, key-value heads, head dim, T, S, mask, soft cap)
CASES = {
    "causal": (2, 2, 16, 256, 256, Mask(causal=True), None),
    "both ways": (2, 2, 16, 128, 128, Mask(), None),
    "grouped queries, packed": (4, 2, 16, 256, 256, Mask(causal=True, q_segments=SEGMENTS, kv_segments=SEGMENTS), None),
    "soft cap in a window": (2, 1, 16, 256, 256, Mask(causal=True, window=70), 0.8),
    "window both ways, packed": (2, 2, 16, 256, 256, Mask(window=33, q_segments=SEGMENTS, kv_segments=SEGMENTS), None),
    "packed source": (2, 2, 16, 256, 130, Mask(q_segments=SEGMENTS, kv_segments=SOURCE), None),
    "part of a block": (2, 1, 8, 200, 200, Mask(causal=True), None),
    "more keys than queries": (2, 1, 8, 130, 300, Mask(), None),
    "more keys than queries, causal": (2, 1, 8, 130, 300, Mask(causal=True), None),
    "more queries than keys, causal": (2, 2, 8, 300, 130, Mask(causal=True), 0.8),
    "other lengths in a window both ways": (4, 2, 8, 130, 300, Mask(window=200), 0.8),
    "window of itself": (1, 1, 8, 128, 256, Mask(causal=True, window=1), None),
    "several blocks, one incomplete": (2, 1, 8, 1100, 1100, Mask(causal=True, window=300), 0.8),
    "one key-value head, packed": (
        4, 1, 128, 256, 256, Mask(causal=True, q_segments=SEGMENTS, kv_segments=SEGMENTS), 0.8
    ),
    "window, packed, wide heads": (
        2, 2, 160, 256, 256, Mask(causal=True, window=70, q_segments=SEGMENTS, kv_segments=SEGMENTS), None
    ),
    "packed source, grouped queries, soft cap": (
        4, 2, 64, 256, 130, Mask(q_segments=SEGMENTS, kv_segments=SOURCE), 0.8
    ),
}  # fmt: skip
CAPPED = {name for name, case in CASES.items() if case[-1] is not None}


def make_inputs(N: int, K: int, H: int, T: int, S: int, mask: Mask, softcap: float | None = None) -> AttentionInputs:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((2, T, N, H), (2, K, S, H), (2, K, S, H)))
    return AttentionInputs(q, k, v, mask, AttentionParams(1.24 * H**-0.5, softcap))


def half_precision(inputs: AttentionInputs) -> AttentionInputs:
    arrays = ("q_BTNH", "k_BKSH", "v_BKSH")
    return replace(inputs, **{name: getattr(inputs, name).astype(jnp.bfloat16) for name in arrays})


@pytest.mark.parametrize("case", CASES)
def test_splash_attention_matches_the_reference(case):
    check(make_inputs(*CASES[case]), lambda inputs: splash.attend(inputs, interpret=True))


def test_splash_attention_is_tested_with_all_that_it_supports():
    """Every kind of mask with a soft cap, packed rows, fewer key-value heads, other lengths and padding."""
    tested = set()
    for N, K, H, T, S, mask, softcap in CASES.values():
        kind = ("causal " if mask.causal else "") + ("window" if mask.window else "")
        others = {
            "soft cap": softcap is not None,
            "packed": mask.q_segments is not None,
            "grouped": K < N,
            "other lengths": T != S,
            "padded": T % splash.LANES > 0 or S % splash.LANES > 0,
        }
        tested |= {(kind, name) for name, present in others.items() if present}
        assert splash.unsupported(make_inputs(N, K, H, T, S, mask, softcap), "tpu") is None
    kinds = ("", "causal ", "window", "causal window")
    assert tested == {(kind, name) for kind in kinds for name in others}
    assert {16, 128, 160} <= {case[2] for case in CASES.values()}, "head dimensions"


@pytest.mark.parametrize("case", [case for case in CASES if case not in CAPPED])
def test_the_arguments_of_cudnn_match_the_reference(case):
    check(make_inputs(*CASES[case]), lambda inputs: cudnn.attend(inputs, implementation="xla"))


def check(inputs: AttentionInputs, kernel) -> None:
    cotangent = np.random.default_rng(1).normal(size=inputs.q_BTNH.shape).astype(np.float32)
    if inputs.mask.q_segments is not None:  # a query without visible keys has no defined output
        seen = (inputs.mask.q_segments[:, :, None] == inputs.mask.kv_segments[:, None]).any(-1)
        cotangent = cotangent * seen[:, :, None, None]

    def run(kernel):
        def of_arrays(q, k, v):
            return kernel(replace(inputs, q_BTNH=q, k_BKSH=k, v_BKSH=v))

        out, pullback = jax.vjp(of_arrays, inputs.q_BTNH, inputs.k_BKSH, inputs.v_BKSH)
        return (out * (cotangent != 0), *pullback(cotangent))

    actual = jax.jit(lambda: run(kernel))()
    for name, ours, theirs in zip(("out", "q", "k", "v"), actual, run(reference.attend), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=name)


def test_splash_is_chosen_on_a_tpu_for_what_it_supports():
    inputs = make_inputs(2, 1, 16, 256, 256, Mask(causal=True, window=70), softcap=0.8)
    assert choose_kernel(inputs, "tpu").kernel == "splash"
    biased = choose_kernel(replace(inputs, bias=SlopeBias(2)), "tpu")
    assert (biased.kernel, biased.skipped["splash"]) == ("scanned", "it adds no bias such as SlopeBias to the logits")
    cached = replace(inputs, mask=Mask(causal=True, kv_lengths=np.ones(2, np.int32)))
    assert choose_kernel(cached, "tpu").skipped["splash"] == "it does not read a KV cache"
    assert "splash" not in choose_kernel(inputs, "cpu").skipped
    with pytest.raises(
        UserError, match="attention='splash' does not support these inputs on cpu: it is a kernel for tpu"
    ):
        attend(inputs, impl="splash", platform="cpu")


def test_cudnn_is_chosen_on_a_gpu_for_what_it_supports():
    inputs = make_inputs(2, 1, 16, 256, 256, Mask(causal=True, window=70))
    half = half_precision(inputs)
    assert choose_kernel(half, "gpu").kernel == "cudnn"
    reasons = {
        "it computes in bfloat16 or float16, and the inputs are float32": inputs,
        "it has no soft cap": replace(half, params=AttentionParams(0.31, 0.8)),
        "it adds no bias such as SlopeBias to the logits": replace(half, bias=SlopeBias(2)),
    }
    for reason, unsupported in reasons.items():
        choice = choose_kernel(unsupported, "gpu")
        assert (choice.kernel, choice.skipped["cudnn"]) == ("scanned", reason)


def test_choices_are_recorded_while_a_program_is_traced():
    inputs = make_inputs(2, 1, 16, 256, 256, Mask(causal=True, window=70), softcap=0.8)
    with record_choices() as choices:
        jax.eval_shape(lambda: attend(inputs, platform="cpu"))
    assert list(choices) == ["causal, window 70, soft cap 0.8, 256 queries, 256 keys"]
    assert [choice.kernel for choice in choices.values()] == ["blocked"]


# ---------------------------------------------------------------- rematerialisation
def test_cudnn_does_not_run_forward_again_if_its_outputs_are_saved(monkeypatch):
    """Traced only: the kernel's two outputs have names in its forward rule, but not the mask, which is large."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_000)
    inputs = half_precision(make_inputs(*CASES["grouped queries, packed"]))

    def runs_and_saved(remat):
        def attend(q):
            return cudnn.attend(replace(inputs, q_BTNH=q))

        block = rematerialize(attend, remat)
        text = str(jax.make_jaxpr(lambda q: jax.vjp(block, q)[1](q))(inputs.q_BTNH))
        assert text.count("dot_product_attention_bwd_wrapper[") == 1
        saved = jax.tree.leaves(jax.eval_shape(lambda q: jax.vjp(block, q)[1], inputs.q_BTNH))
        return text.count("dot_product_attention_fwd_wrapper["), {leaf.shape for leaf in saved}

    q, log_sum_exp = inputs.q_BTNH.shape, (2, 4, 256)
    runs, saved = runs_and_saved("full")
    assert runs == 2
    assert log_sum_exp not in saved
    runs, saved = runs_and_saved("attention")
    assert runs == 1
    assert {q, log_sum_exp} <= saved
    assert (2, 1, 256, 256) not in saved
