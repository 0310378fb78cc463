"""The TPU kernel in Pallas' interpreter against the reference, forward and backward."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.ops.attention import AttentionInputs, AttentionParams, choose_kernel, reference, splash
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
    "odd lengths": (2, 1, 8, 200, 200, Mask(causal=True), None),
    "more keys than queries": (2, 1, 8, 130, 300, Mask(), None),
}


def make_inputs(N: int, K: int, H: int, T: int, S: int, mask: Mask, softcap: float | None = None) -> AttentionInputs:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((2, T, N, H), (2, K, S, H), (2, K, S, H)))
    return AttentionInputs(q, k, v, mask, AttentionParams(0.31, softcap))


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_match_the_reference(case):
    inputs = make_inputs(*CASES[case])
    cotangent = np.random.default_rng(1).normal(size=inputs.q_BTNH.shape).astype(np.float32)
    if inputs.mask.q_segments is not None:  # a query without visible keys has no defined output
        seen = (inputs.mask.q_segments[:, :, None] == inputs.mask.kv_segments[:, None]).any(-1)
        cotangent = cotangent * seen[:, :, None, None]

    def run(attend):
        def of_arrays(q, k, v):
            return attend(replace(inputs, q_BTNH=q, k_BKSH=k, v_BKSH=v))

        out, pullback = jax.vjp(of_arrays, inputs.q_BTNH, inputs.k_BKSH, inputs.v_BKSH)
        return (out * (cotangent != 0), *pullback(cotangent))

    actual = jax.jit(lambda: run(lambda inputs: splash.attend(inputs, interpret=True)))()
    for name, ours, theirs in zip(("out", "q", "k", "v"), actual, run(reference.attend), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=name)


def test_it_is_chosen_on_a_tpu_for_what_it_supports():
    inputs = make_inputs(2, 1, 16, 256, 256, Mask(causal=True, window=70), softcap=0.8)
    assert choose_kernel(inputs, "tpu").kernel == "splash"
    biased = choose_kernel(replace(inputs, bias=SlopeBias(2)), "tpu")
    assert (biased.kernel, biased.skipped["splash"]) == ("scanned", "it adds no bias such as SlopeBias to the logits")
    cached = replace(inputs, mask=Mask(causal=True, kv_lengths=np.ones(2, np.int32)))
    assert choose_kernel(cached, "tpu").skipped["splash"] == "it does not read a KV cache"
    assert choose_kernel(inputs, "cpu").skipped["splash"] == "it is a TPU kernel, and the platform is cpu"
