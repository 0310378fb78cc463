"""Beam search over the same prefill and one-token step as sampling.

The rules are those of transformers, so that hypotheses and scores agree. At every step the candidates are the best
`max(2, 1 + num_eos) * num_beams` continuations. Candidates that end become finished hypotheses if they are among the
best `num_beams` candidates; the best candidates that do not end become the next beams. Finished hypotheses are kept
separately and are only replaced by better ones. Filters apply to log-probabilities, not to logits.

Each beam is a row of the batch with its own self-attention cache, and a gather reorders these caches after every step.
Cross-attention keys and values exist once per request: the beams of a request attend to them as queries of one row.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode.cache import reorder_rows, repeat_rows
from jaxformer.decode.loop import ModelState, Prefilled, Prompt, jit_token_loop, token_step
from jaxformer.decode.sampling import SAMPLING_ONLY, SamplingConfig, batch_settings, is_integer, is_number
from jaxformer.decode.slots import (
    IDLE,
    DecodeRequest,
    bucket_length,
    make_prompt,
    pad_batch_size,
    prefill_in_chunks,
    use_mesh,
)
from jaxformer.decode.text import eos_ids, new_text, sampleable_vocab_size
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.ops.reductions import top_k
from jaxformer.ops.sampling import History, SamplingParams, apply_shared_filters
from jaxformer.run import Run
from jaxformer.typing import Array, Bool, Float, Int, Params

IMPOSSIBLE = -1e9  # below the score of any real hypothesis; finite, because sums with infinities may be NaN
NOT_WITH_BEAMS = (*SAMPLING_ONLY, "stop", "num_samples", "log_probs")
CHOICES = {"convention": ("length", "gnmt"), "early_stopping": ("never", "heuristic", "exact")}


@dataclass(frozen=True)
class BeamSearchConfig:
    """How hypotheses are compared and when the search ends."""

    num_beams: int
    length_penalty: float = 1.0
    """Exponent of the length normalisation; 0 compares sums of log-probabilities, larger values favour long outputs."""
    convention: Literal["length", "gnmt"] = "length"
    """Divide sums of log-probabilities by length ** length_penalty, or by ((5 + length) / 6) ** length_penalty
    (arXiv:1609.08144, equation 14)."""
    early_stopping: Literal["never", "heuristic", "exact"] = "heuristic"
    """Search until no running beam can win at any length ("never") or at its current length ("heuristic"); "exact" also
    ends as soon as num_beams hypotheses have finished."""

    def __post_init__(self) -> None:
        if not is_integer(self.num_beams) or self.num_beams < 1:
            raise UserError(f"num_beams={self.num_beams!r}: must be an integer >= 1")
        if not is_number(self.length_penalty) or not np.isfinite(self.length_penalty):
            raise UserError(
                f"length_penalty={self.length_penalty!r}: must be a finite number; 0 disables length normalisation"
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")

    def check_settings(self, settings: SamplingConfig) -> None:
        """Raise for a setting that beam search does not support."""
        defaults = SamplingConfig()
        for name in NOT_WITH_BEAMS:
            value = getattr(settings, name)
            if value not in (None, [], getattr(defaults, name)):
                raise UserError(
                    f"num_beams={self.num_beams} with {name}={value!r}: beam search does not support this setting; "
                    "leave it out or use num_beams=1"
                )

    def normalizer(self, length: Int[Array, "*dims"]) -> Float[Array, "*dims"]:
        """The divisor of the sum of log-probabilities of an output of this length."""
        length = jnp.asarray(length, jnp.float32)
        return (length if self.convention == "length" else (5.0 + length) / 6.0) ** self.length_penalty


class Hypothesis(NamedTuple):
    """One result of a beam search."""

    output: str | list[int]
    """The new tokens without eos: a text if the prompt was a text, otherwise ids."""
    score: float
    """Sum of log-probabilities, normalised by length."""


def beam_search(
    run: Run, requests: Iterable[Sequence[DecodeRequest]], config: BeamSearchConfig, batch_size: int
) -> Iterator[list[Hypothesis]]:
    """Yield the hypotheses of each group, best first. A group holds one request; an empty group has no hypotheses.

    Args:
      batch_size: number of beams decoded together, but at least those of one request.
    """
    num_requests, groups = max(1, batch_size // config.num_beams), iter(requests)
    while batch := list(itertools.islice(groups, num_requests)):
        hypotheses = iter(_search_batch(run, [group[0] for group in batch if group], config))
        for group in batch:
            yield next(hypotheses) if group else []


def _search_batch(run: Run, requests: list[DecodeRequest], config: BeamSearchConfig) -> list[list[Hypothesis]]:
    max_new = max((request.config.max_new_tokens for request in requests), default=0)
    if max_new == 0:
        return [[Hypothesis("" if request.as_text else [], 0.0)] for request in requests]
    size, vocab_size = pad_batch_size(run, len(requests)), sampleable_vocab_size(run)
    prompt = make_prompt(run, [request.ids for request in requests], size)
    configs = [request.config for request in requests] + [IDLE] * (size - len(requests))
    settings = batch_settings(configs, vocab_size=vocab_size, eos_ids=eos_ids(run))
    model, params = run.decoding
    with use_mesh(run):
        prefilled = prefill_in_chunks(model, params, prompt, bucket_length(prompt.ids.shape[1] + max_new))
        sequences_BMT, scores_BM = search_beams(
            model, params, prefilled, settings, config=config, capacity=bucket_length(max_new), vocab_size=vocab_size
        )
    rows = zip(requests, np.asarray(sequences_BMT).tolist(), np.asarray(scores_BM).tolist(), strict=False)
    return [[_make_hypothesis(run, request, *beam) for beam in zip(*beams, strict=True)] for request, *beams in rows]


def _make_hypothesis(run: Run, request: DecodeRequest, sequence: list[int], score: float) -> Hypothesis:
    ends = eos_ids(run)
    ids = list(itertools.takewhile(lambda id: id not in ends, sequence[: request.config.max_new_tokens]))
    return Hypothesis(new_text(run, request.ids, ids) if request.as_text else ids, score)


# ---------------------------------------------------------------- the compiled search
class Beams(NamedTuple):
    """What the search carries from token to token: M beams for each of B requests, which are R = B * M rows."""

    model_state: ModelState  # R rows of self-attention caches, B rows of cross-attention keys and values
    running_BMT: Int[Array, "B M T"]
    running_score_BM: Float[Array, "B M"]  # sums of log-probabilities
    finished_BMT: Int[Array, "B M T"]
    finished_score_BM: Float[Array, "B M"]  # sums of log-probabilities, normalised by length
    is_finished_BM: Bool[Array, "B M"]  # false for entries that hold no hypothesis yet
    improvable_B: Bool[Array, " B"]  # false once no running beam can replace a finished hypothesis
    count: Int[Array, ""]  # new tokens of each running beam


class Candidates(NamedTuple):
    """The best continuations of each request, best first."""

    score_BC: Float[Array, "B C"]
    parent_BC: Int[Array, "B C"]  # index of the beam that is continued
    token_BC: Int[Array, "B C"]


@jit_token_loop(
    lambda prefilled, *args, config, **kwargs: prefilled.logits_BV.shape[0] * config.num_beams,
    static=("model", "config", "capacity", "vocab_size"),
)
def search_beams(
    model: Transformer,
    params: Params,
    prefilled: Prefilled,
    settings: SamplingParams,
    *,
    config: BeamSearchConfig,
    capacity: int,
    vocab_size: int,
) -> tuple[Int[Array, "B M T"], Float[Array, "B M"]]:
    """Run the search; returns the hypotheses, best first and padded with eos, and their scores.

    Args:
      settings: one row per request; rows with max_new_tokens=0 only pad the batch.
      capacity: length of the output arrays, at least the largest max_new_tokens.
    """
    num_eos = settings.eos.shape[1]
    # Enough candidates that M do not end with eos, even if all eos continuations of all beams are among them.
    num_candidates = min(max(2, 1 + num_eos) * config.num_beams, config.num_beams * vocab_size)
    settings_R = jax.tree.map(lambda array: jnp.repeat(array, config.num_beams, axis=0), settings)
    best = partial(
        _best_candidates, prompt=prefilled.prompt, settings=settings_R, vocab_size=vocab_size, num=num_candidates
    )
    step = partial(_advance_beams, config=config, settings=settings)

    def is_unfinished(beams: Beams) -> Bool[Array, ""]:
        return ~_is_closed(beams, config).all()

    def one_token(beams: Beams) -> Beams:
        token_R = jnp.take(beams.running_BMT, beams.count - 1, axis=2).reshape(-1)
        model_state, logits_RV = token_step(model, params, beams.model_state, token_R)
        return step(beams._replace(model_state=model_state), best(beams, logits_RV))

    start = _start_beams(prefilled.model_state, settings, config.num_beams, capacity)
    first_RV = jnp.repeat(prefilled.logits_BV, config.num_beams, axis=0)
    end = jax.lax.while_loop(is_unfinished, one_token, step(start, best(start, first_RV)))
    return end.finished_BMT, end.finished_score_BM


def _start_beams(model_state: ModelState, settings: SamplingParams, num_beams: int, capacity: int) -> Beams:
    B, M = settings.max_new_tokens.shape[0], num_beams
    filler_B11 = settings.eos[:, :1, None] if settings.eos.shape[1] else jnp.zeros((B, 1, 1), jnp.int32)
    sequences_BMT = jnp.broadcast_to(filler_B11, (B, M, capacity)).astype(jnp.int32)
    # All beams of a request start equal, so only the first gets a score above IMPOSSIBLE. Otherwise the search would
    # return M copies of one hypothesis.
    first_only_BM = jnp.where(jnp.arange(M) == 0, 0.0, IMPOSSIBLE)[None].repeat(B, axis=0)
    return Beams(
        model_state=model_state._replace(
            caches=repeat_rows(model_state.caches, M), lengths_B=model_state.lengths_B.repeat(M)
        ),
        running_BMT=sequences_BMT,
        running_score_BM=first_only_BM,
        finished_BMT=sequences_BMT,
        finished_score_BM=jnp.full((B, M), IMPOSSIBLE),
        is_finished_BM=jnp.zeros((B, M), bool),
        improvable_B=settings.max_new_tokens > 0,
        count=jnp.zeros((), jnp.int32),
    )


def _best_candidates(
    beams: Beams, logits_RV: Float[Array, "R V"], *, prompt: Prompt, settings: SamplingParams, vocab_size: int, num: int
) -> Candidates:
    """The `num` best continuations of each request: first the best of each beam, then the best among those."""
    B, M, _ = beams.running_BMT.shape
    # Normalised over the full vocabulary, including ids that are never chosen, so that scores agree with `score`.
    log_z_R1 = jax.nn.logsumexp(logits_RV.astype(jnp.float32), axis=-1, keepdims=True)
    if _has_filters(settings):
        lengths_R = jnp.asarray(prompt.lengths).repeat(M)
        history = History(_beam_tokens(beams, prompt), lengths_R, lengths_R + beams.count)
        filtered_RV = apply_shared_filters(logits_RV[:, :vocab_size] - log_z_R1, settings, history)
        score_RK, token_RK = top_k(filtered_RV, min(num, vocab_size))
    else:  # normalise only the K best, which saves a pass over the vocabulary
        score_RK, token_RK = top_k(logits_RV[:, :vocab_size], min(num, vocab_size))
        score_RK = score_RK - log_z_R1
    # Filters set excluded tokens to -inf: make them finite, but worse than every other token.
    score_BMK = jnp.maximum(score_RK, IMPOSSIBLE).reshape(B, M, -1) + beams.running_score_BM[..., None]
    score_BC, index_BC = jax.lax.top_k(score_BMK.reshape(B, -1), num)
    token_BC = jnp.take_along_axis(token_RK.reshape(B, -1), index_BC, axis=1)
    return Candidates(score_BC, index_BC // score_BMK.shape[2], token_BC.astype(jnp.int32))


def _has_filters(settings: SamplingParams) -> bool:
    return any(value is not None for name, value in settings._asdict().items() if name not in ("eos", "max_new_tokens"))


def _beam_tokens(beams: Beams, prompt: Prompt) -> Int[Array, "R C"]:
    """The tokens of every beam: its prompt without padding, directly followed by the new tokens."""
    _, M, T = beams.running_BMT.shape
    ids_RP, lengths_R1 = jnp.asarray(prompt.ids).repeat(M, axis=0), jnp.asarray(prompt.lengths).repeat(M)[:, None]
    index_C = jnp.arange(ids_RP.shape[1] + T)
    gather = partial(jnp.take_along_axis, axis=1, mode="clip")
    new_RC = gather(beams.running_BMT.reshape(-1, T), jnp.maximum(index_C - lengths_R1, 0))
    return jnp.where(index_C < lengths_R1, gather(ids_RP, jnp.broadcast_to(index_C, new_RC.shape)), new_RC)


def _advance_beams(beams: Beams, best: Candidates, *, config: BeamSearchConfig, settings: SamplingParams) -> Beams:
    """Append one token to every running beam, and collect the hypotheses that end with it."""
    B, M, _ = beams.running_BMT.shape
    score_BC, parent_BC, token_BC = best
    candidates_BCT = _gather_sequences(beams.running_BMT, parent_BC).at[:, :, beams.count].set(token_BC)
    count = beams.count + 1
    is_eos_BC = (token_BC[..., None] == settings.eos[:, None]).any(axis=-1)
    ends_BC = is_eos_BC | (count >= settings.max_new_tokens)[:, None]

    running_BM, chosen_BM = jax.lax.top_k(jnp.where(ends_BC, score_BC + IMPOSSIBLE, score_BC), M)
    parent_BM = jnp.take_along_axis(parent_BC, chosen_BM, axis=1)
    # Each beam continues its parent, so it takes over the parent's cache.
    row_R = (parent_BM + M * jnp.arange(B)[:, None]).reshape(-1)
    state = beams.model_state
    state = state._replace(caches=reorder_rows(state.caches, row_R), lengths_B=state.lengths_B[row_R])

    finished_BMT, finished_score_BM, is_finished_BM = _merge_finished(
        beams,
        candidates_BCT,
        score_BC / config.normalizer(count),
        # transformers lets only the best M candidates finish, although it considers more.
        ends_BC & (jnp.arange(score_BC.shape[1]) < M),
        config,
    )
    beams = Beams(
        model_state=state,
        running_BMT=_gather_sequences(candidates_BCT, chosen_BM),
        running_score_BM=running_BM,
        finished_BMT=finished_BMT,
        finished_score_BM=finished_score_BM,
        is_finished_BM=is_finished_BM,
        improvable_B=beams.improvable_B & ~ends_BC.all(axis=1),
        count=count,
    )
    return beams._replace(improvable_B=beams.improvable_B & _can_improve(beams, config, settings.max_new_tokens))


def _merge_finished(
    beams: Beams,
    candidates_BCT: Int[Array, "B C T"],
    score_BC: Float[Array, "B C"],
    ends_BC: Bool[Array, "B C"],
    config: BeamSearchConfig,
) -> tuple[Int[Array, "B M T"], Float[Array, "B M"], Bool[Array, "B M"]]:
    """The best M of the finished hypotheses and the candidates that end; closed requests accept no new ones."""
    score_BC = score_BC + IMPOSSIBLE * _is_closed(beams, config)[:, None] + IMPOSSIBLE * ~ends_BC
    merged_score = jnp.concatenate([beams.finished_score_BM, score_BC], axis=1)
    score_BM, kept_BM = jax.lax.top_k(merged_score, config.num_beams)
    merged = jnp.concatenate([beams.finished_BMT, candidates_BCT], axis=1)
    flags = jnp.concatenate([beams.is_finished_BM, ends_BC], axis=1)
    return _gather_sequences(merged, kept_BM), score_BM, jnp.take_along_axis(flags, kept_BM, axis=1)


def _is_closed(beams: Beams, config: BeamSearchConfig) -> Bool[Array, " B"]:
    """Requests whose search has ended; they stay in the batch until the others have ended too."""
    is_full_B = beams.is_finished_BM.all(axis=1) if config.early_stopping == "exact" else False
    return ~beams.improvable_B | is_full_B


def _can_improve(beams: Beams, config: BeamSearchConfig, max_new_B: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether the best running beam may still beat the worst finished hypothesis."""
    # Every token lowers the sum of log-probabilities, so only the larger normalizer of a longer output can raise the
    # score. Therefore "never" assumes the maximum length, and the other two assume the current length.
    any_length = config.early_stopping == "never" and config.length_penalty > 0.0
    best_B = beams.running_score_BM[:, 0] / config.normalizer(max_new_B if any_length else beams.count)
    worst_B = jnp.where(beams.is_finished_BM.all(axis=1), beams.finished_score_BM.min(axis=1), IMPOSSIBLE)
    return best_B > worst_B


def _gather_sequences(array_BMT: Int[Array, "B M T"], index_BC: Int[Array, "B C"]) -> Int[Array, "B C T"]:
    return jnp.take_along_axis(array_BMT, index_BC[..., None], axis=1)
