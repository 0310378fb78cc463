"""Beam search over the same prefill and one-token step as every other way of decoding.

The rules are those of transformers, so that hypotheses and scores agree: candidates are the best
`max(2, 1 + ends) * beams` continuations; those that end join the finished ones if they are among the best `beams`;
the best that go on are the next beams. Finished hypotheses are kept apart and only ever replaced by better ones.

Filters change log-probabilities, not logits, again as transformers does.

Beams are rows of the batch with caches of their own, reordered by gather; the keys and values of a source stay one
per request, its beams being so many queries of one row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode.batch import IDLE, Row, bucket, on_mesh, padded_size, prompt_of, read_prompt
from jaxformer.decode.cache import reordered, repeated
from jaxformer.decode.generate import Prompt, Rows, token_step
from jaxformer.decode.program import Options, program
from jaxformer.decode.settings import batched
from jaxformer.decode.texts import eos_ids, num_drawable
from jaxformer.layers import Transformer
from jaxformer.ops.cpu import token_loop_options
from jaxformer.ops.reductions import top_k
from jaxformer.ops.sampling import History, SamplingParams, apply_shared_filters
from jaxformer.ops.weights import is_quantized
from jaxformer.run import Run
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

    def normalizer(self, length: Int[Array, "*dims"]) -> Float[Array, "*dims"]:
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
    count: Int[Array, ""]


def searched(run: Run, rows: Sequence[Row], search: BeamSearch) -> list[tuple[list[list[int]], list[float]]]:
    """For every row its hypotheses, best first and without the token that ended them, and their scores."""
    ends, room = eos_ids(run), max(row.config.max_new_tokens for row in rows)
    if room == 0:
        return [([[]], [0.0]) for _ in rows]
    size = padded_size(run, len(rows))
    prompt = prompt_of(run, [row.ids for row in rows], size)
    configs = [row.config for row in rows] + [IDLE] * (size - len(rows))
    settings = batched(configs, vocab_size=num_drawable(run), eos_ids=ends)
    model, params = run.decoding
    with on_mesh(run):
        caches, logits_BV = read_prompt((model, params), prompt, bucket(prompt.ids.shape[1] + room))
        output, scores = search_beams(
            model, params, caches, logits_BV, prompt, settings,
            room=bucket(room), search=search, num_ends=len(ends), vocab_size=num_drawable(run),
        )  # fmt: skip
    found = []
    for beams, beam_scores, row in zip(np.asarray(output).tolist(), np.asarray(scores).tolist(), rows, strict=False):
        kept = [itertools.takewhile(lambda t: t not in ends, beam[: row.config.max_new_tokens]) for beam in beams]
        found.append(([list(ids) for ids in kept], beam_scores))
    return found


def _search_options(
    model: Transformer, params: Params, rows: Rows, *args: object, search: BeamSearch, **kwargs: object
) -> Options:
    num_rows = rows.lengths_B.shape[0] * search.num_beams
    return token_loop_options(model.runtime.platform, num_rows, is_quantized(params))


@program(static=("model", "room", "search", "num_ends", "vocab_size"), options=_search_options)
def search_beams(
    model: Transformer,
    params: Params,
    rows: Rows,
    logits_BV: Float[Array, "B V"],
    prompt: Prompt,
    settings: SamplingParams,
    *,
    room: int,
    search: BeamSearch,
    num_ends: int,
    vocab_size: int,
) -> tuple[Int[Array, "B M T"], Float[Array, "B M"]]:
    """Hypotheses, best first, with an end token after their end, and their scores.

    Args:
      settings: of each request; where its max_new_tokens is 0, nothing is searched.
      room: for new tokens, at least the largest max_new_tokens.
      num_ends: how many end tokens there are in `settings.eos`.
    """
    B, M = logits_BV.shape[0], search.num_beams
    filler_B11 = settings.eos[:, :1, None] if num_ends else jnp.zeros((B, 1, 1), jnp.int32)
    sequences_BMT = jnp.broadcast_to(filler_B11, (B, M, room)).astype(jnp.int32)
    # Only the first beam counts at first: the others are its copies.
    alone_BM = jnp.where(jnp.arange(M) == 0, 0.0, NEVER)[None].repeat(B, axis=0)
    start = Beams(
        rows=rows._replace(caches=repeated(rows.caches, M), lengths_B=rows.lengths_B.repeat(M)),
        running_BMT=sequences_BMT,
        running_score_BM=alone_BM,
        finished_BMT=sequences_BMT,
        finished_score_BM=jnp.full((B, M), NEVER),
        finished_BM=jnp.zeros((B, M), bool),
        improvable_B=settings.max_new_tokens > 0,
        count=jnp.zeros((), jnp.int32),
    )
    settings_R = jax.tree.map(lambda a: jnp.repeat(a, M, axis=0), settings)
    # Enough candidates that M go on even if every beam ends in every possible way.
    num_candidates = min(max(2, 1 + num_ends) * M, M * vocab_size)
    best = partial(_best, prompt=prompt, settings=settings_R, vocab_size=vocab_size, num=num_candidates)
    step = partial(_advanced, search=search, settings=settings)

    def unfinished(beams: Beams) -> Bool[Array, ""]:
        return ~_closed(beams, search).all()

    def one_token(beams: Beams) -> Beams:
        token_R = jnp.take(beams.running_BMT, beams.count - 1, axis=2).reshape(-1)
        rows, logits_RV = token_step(model, params, beams.rows, token_R)
        return step(beams._replace(rows=rows), best(beams, logits_RV))

    first_RV = jnp.repeat(logits_BV, M, axis=0)
    end = jax.lax.while_loop(unfinished, one_token, step(start, best(start, first_RV)))
    return end.finished_BMT, end.finished_score_BM


class Candidates(NamedTuple):
    """The best continuations of each request, best first."""

    score_BC: Float[Array, "B C"]
    parent_BC: Int[Array, "B C"]  # which beam
    token_BC: Int[Array, "B C"]


def _best(
    beams: Beams, logits_RV: Float[Array, "R V"], *, prompt: Prompt, settings: SamplingParams, vocab_size: int, num: int
) -> Candidates:
    """Those of each beam first, then among them those of the request."""
    B, M, _ = beams.running_BMT.shape
    # Ids that are never drawn count among what the model finds likely, as they do for `score`.
    log_z_R1 = jax.nn.logsumexp(logits_RV.astype(jnp.float32), axis=-1, keepdims=True)
    if _filters(settings):
        lengths_R = jnp.asarray(prompt.lengths).repeat(M)
        history = History(_tokens(beams, prompt), lengths_R, lengths_R + beams.count)
        filtered_RV = apply_shared_filters(logits_RV[:, :vocab_size] - log_z_R1, settings, history)
        score_RK, token_RK = top_k(filtered_RV, min(num, vocab_size))
    else:  # without a pass over all scores
        score_RK, token_RK = top_k(logits_RV[:, :vocab_size], min(num, vocab_size))
        score_RK = score_RK - log_z_R1
    # A filter may have removed a token: still less likely than any other, yet a number.
    score_BMK = jnp.maximum(score_RK, NEVER).reshape(B, M, -1) + beams.running_score_BM[..., None]
    score_BC, index_BC = jax.lax.top_k(score_BMK.reshape(B, -1), num)
    token_BC = jnp.take_along_axis(token_RK.reshape(B, -1), index_BC, axis=1)
    return Candidates(score_BC, index_BC // score_BMK.shape[2], token_BC.astype(jnp.int32))


def _filters(settings: SamplingParams) -> bool:
    return any(value is not None for name, value in settings._asdict().items() if name not in ("eos", "max_new_tokens"))


def _tokens(beams: Beams, prompt: Prompt) -> Int[Array, "R C"]:
    """Every beam's prompt and, right behind it, what was chosen so far."""
    _, M, T = beams.running_BMT.shape
    ids_RP, lengths_R1 = jnp.asarray(prompt.ids).repeat(M, axis=0), jnp.asarray(prompt.lengths).repeat(M)[:, None]
    index_C = jnp.arange(ids_RP.shape[1] + T)
    read = partial(jnp.take_along_axis, axis=1, mode="clip")
    new_RC = read(beams.running_BMT.reshape(-1, T), jnp.maximum(index_C - lengths_R1, 0))
    return jnp.where(index_C < lengths_R1, read(ids_RP, jnp.broadcast_to(index_C, new_RC.shape)), new_RC)


def _advanced(beams: Beams, best: Candidates, *, search: BeamSearch, settings: SamplingParams) -> Beams:
    """The beams one token longer."""
    B, M, _ = beams.running_BMT.shape
    score_BC, parent_BC, token_BC = best
    candidates_BCT = _gathered(beams.running_BMT, parent_BC).at[:, :, beams.count].set(token_BC)
    count = beams.count + 1
    is_end_BC = (token_BC[..., None] == settings.eos[:, None]).any(axis=-1)
    ends_BC = is_end_BC | (count >= settings.max_new_tokens)[:, None]

    running_BM, chosen_BM = jax.lax.top_k(jnp.where(ends_BC, score_BC + NEVER, score_BC), M)
    parent_BM = jnp.take_along_axis(parent_BC, chosen_BM, axis=1)
    rows = beams.rows
    flat_R = (parent_BM + M * jnp.arange(B)[:, None]).reshape(-1)
    rows = rows._replace(caches=reordered(rows.caches, flat_R), lengths_B=rows.lengths_B[flat_R])

    finished_BMT, finished_score_BM, finished_BM = _with_finished(
        beams,
        candidates_BCT,
        score_BC / search.normalizer(count),
        ends_BC & (jnp.arange(score_BC.shape[1]) < M),
        search,
    )
    beams = Beams(
        rows=rows,
        running_BMT=_gathered(candidates_BCT, chosen_BM),
        running_score_BM=running_BM,
        finished_BMT=finished_BMT,
        finished_score_BM=finished_score_BM,
        finished_BM=finished_BM,
        improvable_B=beams.improvable_B & ~ends_BC.all(axis=1),
        count=count,
    )
    return beams._replace(improvable_B=beams.improvable_B & _can_improve(beams, search, settings.max_new_tokens))


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


def _can_improve(beams: Beams, search: BeamSearch, max_new_B: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether the best running beam might still beat the worst finished one."""
    # Scores fall as tokens are added; only the normaliser of a longer output can raise them.
    any_length = search.early_stopping == "never" and search.length_penalty > 0.0
    best_B = beams.running_score_BM[:, 0] / search.normalizer(max_new_B if any_length else beams.count)
    worst_B = jnp.where(beams.finished_BM.all(axis=1), beams.finished_score_BM.min(axis=1), NEVER)
    return best_B > worst_B


def _gathered(array_BMT: Int[Array, "B M T"], index_BC: Int[Array, "B C"]) -> Int[Array, "B C T"]:
    return jnp.take_along_axis(array_BMT, index_BC[..., None], axis=1)
