"""Beam search over the same prefill and one-token step as every other way of decoding.

The rules are those of transformers, so that hypotheses and scores agree: candidates are the best
`max(2, 1 + ends) * beams` continuations; those that end join the finished ones if they are among the best `beams`;
the best that go on are the next beams. Finished hypotheses are kept apart and only ever replaced by better ones.

Beams are rows of the batch with caches of their own, reordered by gather; the keys and values of a source stay one
per request, its beams being so many queries of one row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.decode.cache import reordered, repeated
from jaxformer.decode.generate import Rows, token_step
from jaxformer.layers import Transformer
from jaxformer.typing import Array, Bool, Float, Int, Params

NEVER = -1e9  # a score no real hypothesis has; finite, so that sums stay numbers


@dataclass(frozen=True)
class BeamSearch:
    """How hypotheses are compared and when the search ends."""

    num_beams: int
    length_penalty: float = 1.0
    """Exponent; 0 compares sums of log-probabilities, more favours longer outputs."""
    convention: Literal["length", "gnmt"] = "length"
    """Divide by length ** penalty, or by ((5 + length) / 6) ** penalty (arXiv:1609.08144, equation 14)."""
    early_stopping: Literal["never", "heuristic", "exact"] = "heuristic"
    """End when no running beam can still win at any length, or at its present length, or once all have finished."""

    def normalizer(self, length: Int[Array, ""] | int) -> Float[Array, ""]:
        length = jnp.asarray(length, jnp.float32)
        return (length if self.convention == "length" else (5.0 + length) / 6.0) ** self.length_penalty


class Beams(NamedTuple):
    """What the search carries; M beams for each of B requests."""

    rows: Rows  # B * M of them, and B sources
    running_BMT: Int[Array, "B M T"]
    running_score_BM: Float[Array, "B M"]  # sums of log-probabilities
    finished_BMT: Int[Array, "B M T"]
    finished_score_BM: Float[Array, "B M"]  # normalised
    finished_BM: Bool[Array, "B M"]
    improvable_B: Bool[Array, " B"]
    stuck: Bool[Array, ""]  # no candidate goes on
    count: Int[Array, ""]


@partial(jax.jit, static_argnames=("model", "max_new_tokens", "search", "eos_ids", "vocab_size"))
def search_beams(
    model: Transformer,
    params: Params,
    rows: Rows,
    logits_BV: Float[Array, "B V"],
    active_B: Bool[Array, " B"],
    *,
    max_new_tokens: int,
    search: BeamSearch,
    eos_ids: tuple[int, ...],
    vocab_size: int,
) -> tuple[Int[Array, "B M T"], Float[Array, "B M"]]:
    """Hypotheses, best first, with the first of `eos_ids` after their end, and their scores."""
    B, M = logits_BV.shape[0], search.num_beams
    sequences_BMT = jnp.full((B, M, max_new_tokens), eos_ids[0] if eos_ids else 0, jnp.int32)
    # Only the first beam counts at first: the others are its copies.
    alone_BM = jnp.where(jnp.arange(M) == 0, 0.0, NEVER)[None].repeat(B, axis=0)
    start = Beams(
        rows=rows._replace(caches=repeated(rows.caches, M), lengths_B=rows.lengths_B.repeat(M)),
        running_BMT=sequences_BMT,
        running_score_BM=alone_BM,
        finished_BMT=sequences_BMT,
        finished_score_BM=jnp.full((B, M), NEVER),
        finished_BM=jnp.zeros((B, M), bool),
        improvable_B=active_B,
        stuck=jnp.zeros((), bool),
        count=jnp.zeros((), jnp.int32),
    )
    step = partial(_advanced, search=search, eos_ids=eos_ids, max_new_tokens=max_new_tokens)

    def unfinished(beams: Beams) -> Bool[Array, ""]:
        return ~_closed(beams, search).all() & ~beams.stuck

    def one_token(beams: Beams) -> Beams:
        token_R = jnp.take(beams.running_BMT, beams.count - 1, axis=2).reshape(-1)
        rows, logits_RV = token_step(model, params, beams.rows, token_R)
        return step(beams._replace(rows=rows), logits_RV[:, :vocab_size].reshape(B, M, -1))

    first = step(start, jnp.broadcast_to(logits_BV[:, None, :vocab_size], (B, M, vocab_size)))
    end = jax.lax.while_loop(unfinished, one_token, first)
    return end.finished_BMT, end.finished_score_BM


def _advanced(
    beams: Beams,
    logits_BMV: Float[Array, "B M V"],
    *,
    search: BeamSearch,
    eos_ids: tuple[int, ...],
    max_new_tokens: int,
) -> Beams:
    """The beams one token longer."""
    B, M, V = logits_BMV.shape
    scores_BMV = jax.nn.log_softmax(logits_BMV.astype(jnp.float32), axis=-1) + beams.running_score_BM[..., None]
    # Enough candidates that M go on even if every beam ends in every possible way.
    num_candidates = min(max(2, 1 + len(eos_ids)) * M, M * V)
    score_BC, index_BC = jax.lax.top_k(scores_BMV.reshape(B, M * V), num_candidates)
    parent_BC, token_BC = index_BC // V, (index_BC % V).astype(jnp.int32)
    candidates_BCT = _gathered(beams.running_BMT, parent_BC).at[:, :, beams.count].set(token_BC)
    count = beams.count + 1
    ends_BC = jnp.isin(token_BC, jnp.array(eos_ids, jnp.int32)) | (count >= max_new_tokens)

    running_BM, chosen_BM = jax.lax.top_k(jnp.where(ends_BC, score_BC + NEVER, score_BC), M)
    parent_BM = jnp.take_along_axis(parent_BC, chosen_BM, axis=1)
    rows = beams.rows
    flat_R = (parent_BM + M * jnp.arange(B)[:, None]).reshape(-1)
    rows = rows._replace(caches=reordered(rows.caches, flat_R), lengths_B=rows.lengths_B[flat_R])

    finished_BMT, finished_score_BM, finished_BM = _with_finished(
        beams, candidates_BCT, score_BC / search.normalizer(count), ends_BC & (jnp.arange(num_candidates) < M), search
    )
    beams = Beams(
        rows=rows,
        running_BMT=_gathered(candidates_BCT, chosen_BM),
        running_score_BM=running_BM,
        finished_BMT=finished_BMT,
        finished_score_BM=finished_score_BM,
        finished_BM=finished_BM,
        improvable_B=beams.improvable_B,
        stuck=ends_BC.all(),
        count=count,
    )
    return beams._replace(improvable_B=beams.improvable_B & _can_improve(beams, search, max_new_tokens))


def _with_finished(
    beams: Beams,
    candidates_BCT: Int[Array, "B C T"],
    score_BC: Float[Array, "B C"],
    ends_BC: Bool[Array, "B C"],
    search: BeamSearch,
) -> tuple[Int[Array, "B M T"], Float[Array, "B M"], Bool[Array, "B M"]]:
    """The best finished hypotheses of before and now; a request that has ended takes no more."""
    score_BC = score_BC + NEVER * _closed(beams, search)[:, None] + NEVER * ~ends_BC
    merged_score = jnp.concatenate([beams.finished_score_BM, score_BC], axis=1)
    score_BM, kept_BM = jax.lax.top_k(merged_score, search.num_beams)
    merged = jnp.concatenate([beams.finished_BMT, candidates_BCT], axis=1)
    flags = jnp.concatenate([beams.finished_BM, ends_BC], axis=1)
    return _gathered(merged, kept_BM), score_BM, jnp.take_along_axis(flags, kept_BM, axis=1)


def _closed(beams: Beams, search: BeamSearch) -> Bool[Array, " B"]:
    """Requests whose answer stands."""
    full_B = beams.finished_BM.all(axis=1) if search.early_stopping == "exact" else False
    return ~beams.improvable_B | full_B


def _can_improve(beams: Beams, search: BeamSearch, max_new_tokens: int) -> Bool[Array, " B"]:
    """Whether the best running beam might still beat the worst finished one."""
    # Scores fall as tokens are added; only the normaliser of a longer output can raise them.
    any_length = search.early_stopping == "never" and search.length_penalty > 0.0
    best_B = beams.running_score_BM[:, 0] / search.normalizer(max_new_tokens if any_length else beams.count)
    worst_B = jnp.where(beams.finished_BM.all(axis=1), beams.finished_score_BM.min(axis=1), NEVER)
    return best_B > worst_B


def _gathered(array_BMT: Int[Array, "B M T"], index_BC: Int[Array, "B C"]) -> Int[Array, "B C T"]:
    return jnp.take_along_axis(array_BMT, index_BC[..., None], axis=1)
