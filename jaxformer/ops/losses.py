"""Token cross-entropy as sums instead of means, so that micro-batches and hosts add up to the whole batch.

Training, evaluation and scoring share `head_loss`, which never holds the logits of a whole batch in memory.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree


class LossSums(NamedTuple):
    """Sums over weighted tokens; divide by `weight` for means."""

    loss: Float[Array, ""]  # the training loss: label-smoothed cross-entropy plus z-loss
    nll: Float[Array, ""]  # plain negative log-likelihood, in nats
    correct: Float[Array, ""]
    weight: Float[Array, ""]


class TokenLosses(NamedTuple):
    """Values of every token, regardless of its weight; not differentiable."""

    nll_BT: Float[Array, "B T"]
    correct_BT: Bool[Array, "B T"]  # whether the target has the largest logit


class LossOptions(NamedTuple):
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_chunks: int = 1
    """Number of chunks that the sequence is split into; it is padded if they do not divide it."""
    vocab_chunks: int = 1
    """Number of chunks that the vocabulary is split into where the output matrix is sharded (`vocab_loss`)."""


def cross_entropy(
    logits_BTV: Float[Array, "B T V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[LossSums, TokenLosses]:
    """Weighted sums over all tokens, and unweighted values of every token.

    Args:
      label_smoothing: probability that is spread evenly over the vocabulary (arXiv:1512.00567, section 7).
      z_loss: weight of log(Z)^2 (arXiv:2204.02311, section 5).
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nll_BT = log_z_BT - target_BT
    loss_BT = nll_BT
    if label_smoothing:
        loss_BT = (1 - label_smoothing) * nll_BT + label_smoothing * (log_z_BT - logits_BTV.mean(axis=-1))
    if z_loss:
        loss_BT = loss_BT + z_loss * jnp.square(log_z_BT)
    # Comparing with the maximum agrees with argmax except for ties, without a second pass over V for indices.
    correct_BT = target_BT >= jax.lax.stop_gradient(logits_BTV).max(axis=-1)
    summands = (loss_BT, nll_BT, correct_BT, jnp.ones_like(loss_BT))
    sums = LossSums(*(jnp.sum(each * weights_BT) for each in summands))
    return sums, TokenLosses(jax.lax.stop_gradient(nll_BT), correct_BT)


def class_loss(
    logits_BC: Float[Array, "B C"],
    labels: Array,
    weights_B: Float[Array, " B"],
    problem: str,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> LossSums:
    """Weighted sums over labelled rows: cross-entropy, or the mean over classes of binary cross-entropy or of squares.

    Args:
      labels: class ids [B] for single_label, otherwise numbers [B, C].
      problem: single_label, multi_label or regression; label smoothing and z-loss are for single_label only.
    """
    logits_BC = logits_BC.astype(jnp.float32)
    if problem == "single_label":
        options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        return cross_entropy(logits_BC[:, None], labels[:, None], weights_B[:, None], **options)[0]
    if problem == "multi_label":
        # log(1 + exp(x)) - y x, the binary cross-entropy of logits x.
        loss_B = (jax.nn.softplus(logits_BC) - labels * logits_BC).mean(axis=-1)
        correct_B = ((logits_BC > 0) == (labels > 0.5)).all(axis=-1)
    else:
        loss_B = jnp.square(logits_BC - labels).mean(axis=-1)
        correct_B = jnp.zeros_like(loss_B)
    total = jnp.sum(loss_B * weights_B)
    return LossSums(total, total, jnp.sum(correct_B * weights_B), weights_B.sum())


MAX_LOGITS = 2**27
"""Logits of a chunk that `auto` does not exceed, if the sequence is long enough: 512 MiB."""


def auto_chunks(num_rows: int, length: int, vocab_size: int) -> int:
    """Number of chunks that keeps logits small and matrix products large, for this number of rows on one device."""
    positions, chunks = max(num_rows, 1) * length, 1

    def splits_further() -> bool:
        half = positions // (2 * chunks)
        padding = -length % (2 * chunks)
        # Chunks with fewer positions no longer keep the device busy; chunks with fewer logits hardly save memory.
        is_worthwhile = half >= 1024 and half * vocab_size >= 2**22
        return 8 * padding <= length and (is_worthwhile or 2 * half * vocab_size > MAX_LOGITS)

    while splits_further():
        chunks *= 2
    return chunks


def auto_vocab_chunks(num_tokens: int, vocab_size: int) -> int:
    """Number of chunks of the vocabulary that keeps the logits of this number of tokens below `MAX_LOGITS`."""
    return max(1, -(-num_tokens * vocab_size // MAX_LOGITS))


Head = Callable[[PyTree, Float[Array, "B T D"]], Float[Array, "B T V"]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def head_loss(
    head: Head,
    options: LossOptions,
    params: PyTree,
    hidden_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
) -> tuple[LossSums, TokenLosses]:
    """`cross_entropy(head(params, hidden), ...)` with the logits of T / num_chunks positions in memory.

    The gradient is computed in the forward pass, chunk by chunk, so logits are neither stored nor recomputed. Only
    `LossSums.loss` is differentiable.
    """
    chunks = _split_chunks(options.num_chunks, hidden_BTD, targets_BT, weights_BT)
    sums, tokens = jax.lax.map(lambda chunk: _chunk_loss(head, options, params, *chunk), chunks)
    return _add_chunks(sums), _join_chunks(tokens, targets_BT.shape[1])


def _head_loss_forward(head: Head, options: LossOptions, params, hidden_BTD, targets_BT, weights_BT):
    def add_chunk(d_params, chunk):
        loss = jax.value_and_grad(_differentiable_loss, argnums=(2, 3), has_aux=True)
        (_, results), (d_more, d_hidden) = loss(head, options, params, *chunk)
        return jax.tree.map(jnp.add, d_params, d_more), (results, d_hidden)

    chunks = _split_chunks(options.num_chunks, hidden_BTD, targets_BT, weights_BT)
    zeros = jax.tree.map(jnp.zeros_like, params)
    d_params, ((sums, tokens), d_hidden) = jax.lax.scan(add_chunk, zeros, chunks)
    length = targets_BT.shape[1]
    return (_add_chunks(sums), _join_chunks(tokens, length)), (d_params, _join_chunks(d_hidden, length))


def _head_loss_backward(head: Head, options: LossOptions, saved, cotangents: tuple[LossSums, TokenLosses]):
    scale = cotangents[0].loss
    d_params, d_hidden_BTD = jax.tree.map(lambda a: (a * scale).astype(a.dtype), saved)
    return d_params, d_hidden_BTD, None, None


head_loss.defvjp(_head_loss_forward, _head_loss_backward)


def _differentiable_loss(
    head: Head, options: LossOptions, params, hidden, targets, weights
) -> tuple[Float[Array, ""], tuple[LossSums, TokenLosses]]:
    results = _chunk_loss(head, options, params, hidden, targets, weights)
    return results[0].loss, results


def _chunk_loss(head: Head, options: LossOptions, params, hidden, targets, weights) -> tuple[LossSums, TokenLosses]:
    smoothing, z_loss = options.label_smoothing, options.z_loss
    return cross_entropy(head(params, hidden), targets, weights, label_smoothing=smoothing, z_loss=z_loss)


def _split_chunks(num_chunks: int, *arrays: Array) -> list[Array]:
    """Split along T: splitting along B would move rows between devices when the batch is sharded.

    Zeros extend T to a multiple of the number of chunks: these positions have no weight.
    """

    def split(a: Array) -> Array:
        padded = jnp.pad(a, [(0, 0), (0, -a.shape[1] % num_chunks), *[(0, 0)] * (a.ndim - 2)])
        return jnp.moveaxis(padded.reshape(a.shape[0], num_chunks, -1, *a.shape[2:]), 1, 0)

    return [split(a) for a in arrays]


def _join_chunks(chunks: PyTree, length: int) -> PyTree:
    """The inverse of `_split_chunks`."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])[:, :length], chunks)


def _add_chunks(sums: LossSums) -> LossSums:
    return jax.tree.map(lambda a: a.sum(), sums)
