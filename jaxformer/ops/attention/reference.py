"""The reference implementation of attention, with the full [T, S] matrix of logits in memory."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxformer.ops.attention.inputs import SAVED_NAME, AttentionInputs, unsupported_shape
from jaxformer.ops.attention.logits import add_bias, apply_mask, einsum_f32, merge_heads
from jaxformer.ops.elementwise import apply_softcap, dropout


def attend(inputs: AttentionInputs) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + bias + mask) v."""
    return checkpoint_name(weighted_values(inputs), SAVED_NAME)


def weighted_values(inputs: AttentionInputs) -> Float[Array, "B T N H"]:
    """The same without a name for rematerialisation policies, for kernels that are made of several such parts."""
    B, T, N, H = inputs.q_BTNH.shape
    K, S, params, mask = inputs.num_kv_heads, inputs.num_keys, inputs.params, inputs.mask
    # Deliberately not `split_heads`: the product reads queries in the layout in which the projection wrote them.
    q_BTKGH = inputs.q_BTNH.reshape(B, T, K, N // K, H)
    logits_BKGTS = einsum_f32("BTKGH,BKSH->BKGTS", q_BTKGH, inputs.k_BKSH) * params.scale
    logits_BKGTS = apply_softcap(logits_BKGTS, params.softcap)
    logits_BKGTS = add_bias(logits_BKGTS, mask, inputs.bias, (0, T), (0, S))
    logits_BKGTS = apply_mask(logits_BKGTS, mask, (0, T), (0, S))
    p_BKGTS = dropout(jax.nn.softmax(logits_BKGTS, axis=-1), params.dropout_rate, inputs.dropout_key)
    v_BKSH = inputs.v_BKSH
    out_BKGTH = jax.lax.dot_general(p_BKGTS.astype(v_BKSH.dtype), v_BKSH, (((4,), (2,)), ((0, 1), (0, 1))))
    return merge_heads(out_BKGTH)


def unsupported(inputs: AttentionInputs, platform: str) -> str | None:
    return unsupported_shape(inputs)


def not_worthwhile(inputs: AttentionInputs, platform: str) -> str | None:
    return None
