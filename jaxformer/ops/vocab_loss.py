"""Cross-entropy over chunks of the vocabulary, for an output matrix of which every device holds a shard.

The logits of one chunk exist at a time. The forward pass gathers each chunk of the matrix and keeps running sums of the
softmax (arXiv:1805.02867); the backward pass gathers the chunk again, recomputes its logits, and reduce-scatters its
gradient at once. Splitting the sequence instead would gather and scatter the whole matrix once per chunk.

Letters used only here: M tokens of a device, C columns of a chunk, d rows of the shard (D of the whole matrix).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.ops.elementwise import apply_softcap
from jaxformer.ops.losses import LossOptions, LossSums, TokenLosses
from jaxformer.ops.sharded import Fsdp, Sharded, ShardedTable, all_gather, reduce_scatter
from jaxformer.sharding import on_shards, sum_devices
from jaxformer.typing import Array, Bool, Float, Int

VOCAB_AXIS = "tensor"
"""The mesh axis that shards the vocabulary."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OutputMatrix:
    """The output matrix of a head, split into columns that are shards of the rows, and its bias."""

    shard_dV: Float[Array, "d V"]
    bias_V: Float[Array, " V"] | None
    fsdp: Fsdp = field(metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})


class Softmax(NamedTuple):
    """Statistics of every token's logits over the vocabulary."""

    max_M: Float[Array, " M"]
    sum_M: Float[Array, " M"]  # of exp(logits - max)
    target_M: Float[Array, " M"]  # the logit of the target
    total_M: Float[Array, " M"]  # the sum of all logits


def output_matrix(weight: Sharded, bias_V: Array | None, softcap: float | None) -> OutputMatrix:
    """From the table of a tied head, or the kernel of an untied one."""
    shard_dV = weight.shard_VD.T if isinstance(weight, ShardedTable) else weight.shard
    return OutputMatrix(shard_dV, bias_V, weight.fsdp, softcap)


def vocab_loss(
    output: OutputMatrix,
    features_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    options: LossOptions,
) -> tuple[LossSums, TokenLosses]:
    """`losses.cross_entropy` of the logits of these features; only `LossSums.loss` is differentiable."""
    features_MD = features_BTD.reshape(-1, features_BTD.shape[-1])
    loss, nll_M, correct_M = _loss(output, features_MD, targets_BT.reshape(-1), weights_BT.reshape(-1), options)
    tokens = TokenLosses(nll_M.reshape(targets_BT.shape), correct_M.reshape(targets_BT.shape))
    nll, correct = ((each * weights_BT).sum() for each in tokens)
    return LossSums(loss, nll, correct, weights_BT.sum()), tokens


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(
    output: OutputMatrix, features_MD: Array, targets_M: Array, weights_M: Array, options: LossOptions
) -> tuple[Float[Array, ""], Float[Array, " M"], Bool[Array, " M"]]:
    return _forward(output, features_MD, targets_M, weights_M, options)[0]


def _forward(output: OutputMatrix, features_MD: Array, targets_M: Array, weights_M: Array, options: LossOptions):
    local = on_shards(
        lambda shard, bias, *arrays: tuple(_softmax(_with(output, shard, bias), *arrays, options.vocab_chunks)),
        in_axes=((None, "vocab"), ("vocab",), (None, None), (None,)),
        out_axes=((None,),) * len(Softmax._fields),
    )
    softmax = Softmax(*local(output.shard_dV, output.bias_V, features_MD, targets_M))
    log_z_M, smoothing = softmax.max_M + jnp.log(softmax.sum_M), options.label_smoothing
    nll_M = log_z_M - softmax.target_M
    loss_M = (1 - smoothing) * nll_M
    if smoothing:
        loss_M = loss_M + smoothing * (log_z_M - softmax.total_M / output.shard_dV.shape[1])
    if options.z_loss:
        loss_M = loss_M + options.z_loss * jnp.square(log_z_M)
    results = ((loss_M * weights_M).sum(), nll_M, softmax.target_M >= softmax.max_M)
    return results, (output, features_MD, targets_M, weights_M, log_z_M)


def _backward(options: LossOptions, saved, cotangents):
    output, features_MD, targets_M, weights_M, log_z_M = saved
    vocab_size = output.shard_dV.shape[1]

    def local(shard, bias, features_MD, targets_M, scale_M, log_z_M):
        return _gradients(_with(output, shard, bias), features_MD, targets_M, scale_M, log_z_M, vocab_size, options)

    d_bias_axes = None if output.bias_V is None else ("vocab",)
    d_shard, d_bias, d_features_MD = on_shards(
        local,
        in_axes=((None, "vocab"), ("vocab",), (None, None), (None,), (None,), (None,)),
        out_axes=((None, "vocab"), d_bias_axes or (), (None, None)),
    )(output.shard_dV, output.bias_V, features_MD, targets_M, weights_M * cotangents[0], log_z_M)
    return _with(output, d_shard, d_bias), d_features_MD, None, None


_loss.defvjp(_forward, _backward)


def _with(output: OutputMatrix, shard_dV: Array, bias_V: Array | None) -> OutputMatrix:
    return OutputMatrix(shard_dV, bias_V, output.fsdp, output.softcap)


# ---------------------------------------------------------------- on the columns of one device
def _softmax(output: OutputMatrix, features_MD: Array, targets_M: Array, num_chunks: int) -> Softmax:
    chunks = _Chunks(output, num_chunks, features_MD.dtype)

    def add(softmax: Softmax, chunk) -> tuple[Softmax, None]:
        logits_MC, real_C, is_target_MC = chunks.logits(chunk, features_MD, targets_M)
        shown_MC = jnp.where(real_C, logits_MC, -jnp.inf)
        max_M = jnp.maximum(softmax.max_M, shown_MC.max(axis=1))
        sum_M = softmax.sum_M * jnp.exp(softmax.max_M - max_M) + jnp.exp(shown_MC - max_M[:, None]).sum(axis=1)
        target_M = softmax.target_M + jnp.where(is_target_MC, logits_MC, 0.0).sum(axis=1)
        return Softmax(max_M, sum_M, target_M, softmax.total_M + jnp.where(real_C, logits_MC, 0.0).sum(axis=1)), None

    zeros_M = jnp.zeros(len(targets_M), jnp.float32)
    softmax, _ = jax.lax.scan(add, Softmax(jnp.full_like(zeros_M, -jnp.inf), zeros_M, zeros_M, zeros_M), chunks.xs)
    max_M = _max_columns(softmax.max_M)
    sum_M = softmax.sum_M * jnp.exp(softmax.max_M - max_M)
    return Softmax(max_M, *sum_devices((sum_M, softmax.target_M, softmax.total_M), (VOCAB_AXIS,)))


def _gradients(
    output: OutputMatrix,
    features_MD: Array,
    targets_M: Array,
    scale_M: Array,
    log_z_M: Array,
    vocab_size: int,
    options: LossOptions,
) -> tuple[Array, Array | None, Array]:
    """The gradients of the shard, the bias and the features."""
    chunks = _Chunks(output, options.vocab_chunks, features_MD.dtype)
    smoothing, fsdp, dtype = options.label_smoothing, output.fsdp, features_MD.dtype
    weight_M = scale_M * (1 + 2 * options.z_loss * log_z_M)

    def add(d_features_MD, chunk):
        logits_MC, real_C, is_target_MC = chunks.logits(chunk, features_MD, targets_M)
        p_MC = jnp.exp(logits_MC - log_z_M[:, None])
        d_logits_MC = weight_M[:, None] * p_MC - scale_M[:, None] * (
            (1 - smoothing) * is_target_MC + smoothing / vocab_size
        )
        if output.softcap is not None:
            d_logits_MC = d_logits_MC * (1 - jnp.square(logits_MC / output.softcap))  # the derivative of tanh
        d_logits_MC = jnp.where(real_C, d_logits_MC, 0.0)
        d_bias_C = None if output.bias_V is None else d_logits_MC.sum(axis=0)
        d_logits_MC = d_logits_MC.astype(dtype)
        kernel_DC = chunks.kernel(chunk)
        d_features_MD += jnp.einsum("MC,DC->MD", d_logits_MC, kernel_DC, preferred_element_type=jnp.float32)
        d_kernel_DC = jnp.einsum("MD,MC->DC", features_MD, d_logits_MC, preferred_element_type=dtype)
        d_kernel = d_kernel_DC if fsdp.gathers_head_once else reduce_scatter(d_kernel_DC, fsdp)
        return d_features_MD, (d_kernel, d_bias_C)

    zeros_MD = jnp.zeros(features_MD.shape, jnp.float32)
    d_features_MD, (d_kernels, d_biases) = jax.lax.scan(add, zeros_MD, chunks.xs)
    d_kernel = chunks.join(d_kernels, output.shard_dV.shape[1])
    d_shard = (reduce_scatter(d_kernel, fsdp) if fsdp.gathers_head_once else d_kernel).astype(output.shard_dV.dtype)
    d_bias = None if output.bias_V is None else chunks.join(d_biases, len(output.bias_V)).astype(output.bias_V.dtype)
    return d_shard, d_bias, sum_devices(d_features_MD, (VOCAB_AXIS,)).astype(dtype)


class _Chunks:
    """The columns that one device computes, in chunks; the last one is padded."""

    def __init__(self, output: OutputMatrix, num_chunks: int, dtype: jnp.dtype) -> None:
        self.output, self.dtype, self.num_chunks = output, dtype, num_chunks
        self.num_columns = output.shard_dV.shape[1]
        self.size = -(-self.num_columns // num_chunks)
        kernel = output.shard_dV.astype(dtype)
        if output.fsdp.gathers_head_once:
            kernel = all_gather(kernel, output.fsdp)
        self.xs = (jnp.arange(num_chunks), self._split(kernel), self._split(output.bias_V))

    def kernel(self, chunk) -> Float[Array, "D C"]:
        """The whole rows of a chunk's columns."""
        kernel = chunk[1]
        return kernel if self.output.fsdp.gathers_head_once else all_gather(kernel, self.output.fsdp)

    def logits(
        self, chunk, features_MD: Array, targets_M: Array
    ) -> tuple[Float[Array, "M C"], Bool[Array, " C"], Bool[Array, "M C"]]:
        """Logits of a chunk, which of its columns are real, and which is the target of each token."""
        index, _, bias_C = chunk
        logits_MC = jnp.einsum("MD,DC->MC", features_MD, self.kernel(chunk), preferred_element_type=jnp.float32)
        if bias_C is not None:
            logits_MC = logits_MC + bias_C
        column_C = index * self.size + jnp.arange(self.size)
        first = 0 if not _has_columns_of_others() else jax.lax.axis_index(VOCAB_AXIS) * self.num_columns
        real_C = column_C < self.num_columns
        is_target_MC = (column_C + first == targets_M[:, None]) & real_C
        return apply_softcap(logits_MC, self.output.softcap), real_C, is_target_MC

    def join(self, chunks: Array, num_columns: int) -> Array:
        """Arrays of all chunks as one with the original columns."""
        joined = jnp.moveaxis(chunks, 0, -2)
        return joined.reshape(*joined.shape[:-2], -1)[..., :num_columns]

    def _split(self, array: Array | None) -> Array | None:
        if array is None:
            return None
        pad = [(0, 0)] * (array.ndim - 1) + [(0, self.num_chunks * self.size - self.num_columns)]
        split = jnp.pad(array, pad).reshape(*array.shape[:-1], self.num_chunks, self.size)
        return jnp.moveaxis(split, -2, 0)


def _has_columns_of_others() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape.get(VOCAB_AXIS, 1) > 1


def _max_columns(x: Array) -> Array:
    return jax.lax.pmax(x, VOCAB_AXIS) if _has_columns_of_others() else x
