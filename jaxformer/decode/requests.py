"""From what users pass (texts or id lists) to padded batches, and back: the functions of the Python API."""

import itertools
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.special import special_ids
from jaxformer.decode.beam import BeamSearch, search_beams
from jaxformer.decode.generate import Prompt, Sampling, continue_rows, prefill
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.ops.pooling import pooled
from jaxformer.run import Run
from jaxformer.typing import Array, Float, Int, Params, Tokens, tokens_from_ids

Text = TypeVar("Text", str, Sequence[int])
BATCH = 32  # rows decoded together


def generate(
    run: Run,
    prompts: Sequence[Text],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    seed: int = 0,
    *,
    length_penalty: float = 1.0,
    early_stopping: str = "heuristic",
) -> list[Text]:
    """Continuations of prompts, or for an encoder-decoder the outputs for them: new tokens only, eos dropped.

    Texts give texts, id lists give id lists. A row depends on its own prompt, the settings and the seed alone.
    With several beams the best hypothesis is given; `search` gives them all.
    """
    _check_settings(max_new_tokens, temperature, top_k, top_p)
    if num_beams != 1:
        if temperature:
            raise UserError(
                f"num_beams={num_beams} with temperature={temperature}: beams do not sample, use one of them"
            )
        beam = _beam_search(num_beams, length_penalty, "length", early_stopping)
        return [found[0].output for found in _search(run, prompts, max_new_tokens, beam, "generate")]
    ids, is_text = _request_ids(run, prompts, max_new_tokens, "generate")
    new: list[list[int]] = []
    if max_new_tokens == 0:
        new = [[] for _ in ids]
    else:
        sampling = Sampling(temperature, top_k, top_p)
        for start in range(0, len(ids), BATCH):
            new += _generate_batch(run, ids[start : start + BATCH], max_new_tokens, sampling, seed)
    return [run.tokenizer.decode(row) for row in new] if is_text else new


class Hypothesis(NamedTuple):
    """One outcome of a beam search."""

    output: Any
    """A text or an id list, as the prompt was; eos dropped."""
    score: float
    """Sum of log-probabilities over the length penalty."""


def search(
    run: Run,
    prompts: Sequence[Text],
    max_new_tokens: int = 64,
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    convention: str = "length",
    early_stopping: str = "heuristic",
) -> list[list[Hypothesis]]:
    """The `num_beams` best hypotheses of a beam search for every prompt, best first.

    Args:
      length_penalty: exponent of the length that sums of log-probabilities are divided by; 0 compares the sums.
      convention: "length" as transformers, or "gnmt" for ((5 + length) / 6) ** penalty (arXiv:1609.08144).
      early_stopping: "never", "heuristic" or "exact", which are transformers' "never", False and True.
    """
    _check_settings(max_new_tokens, 0.0, None, None)
    beam = _beam_search(num_beams, length_penalty, convention, early_stopping)
    return _search(run, prompts, max_new_tokens, beam, "search")


def _search(
    run: Run, prompts: Sequence[Text], max_new_tokens: int, beam: BeamSearch, what: str
) -> list[list[Hypothesis]]:
    ids, is_text = _request_ids(run, prompts, max_new_tokens, what)
    if max_new_tokens == 0:
        return [[Hypothesis("" if is_text else [], 0.0)] for _ in ids]
    found: list[list[Hypothesis]] = []
    size = max(1, BATCH // beam.num_beams)
    for start in range(0, len(ids), size):
        for rows, scores in _search_batch(run, ids[start : start + size], max_new_tokens, beam):
            outputs = [run.tokenizer.decode(row) for row in rows] if is_text else rows
            found.append([Hypothesis(output, score) for output, score in zip(outputs, scores, strict=True)])
    return found


def score(run: Run, targets: Sequence[Text], inputs: Sequence[Text] | None = None) -> list[Float[np.ndarray, " T"]]:
    """Log-probability of every token of each target, given the ones before it and, if any, its input."""
    if (inputs is not None) != (run.config.model.shape == "encoder-decoder"):
        need = "needs inputs" if inputs is None else "takes no inputs"
        raise UserError(f"score: a model that is {run.config.model.shape} {need}")
    _check_decoder(run, "score")
    ids = _token_ids(run, targets)[0]
    sources = None if inputs is None else _source_ids(run, inputs)[0]
    if sources is not None and len(sources) != len(ids):
        raise UserError(f"score: {len(ids)} targets but {len(sources)} inputs: give one input per target")
    _check_context(run, ids, "target")
    scores: list[Float[np.ndarray, " T"]] = []
    for start in range(0, len(ids), BATCH):
        batch = slice(start, start + BATCH)
        scores += _score_batch(run, ids[batch], None if sources is None else sources[batch])
    return scores


def forward(
    run: Run,
    tokens: Int[Array, "B T"],
    inputs: Int[Array, "B S"] | None = None,
    mask: Int[Array, "B T"] | None = None,
    inputs_mask: Int[Array, "B S"] | None = None,
    types: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits of every position, for an encoder-only model hidden states [B, T, D]. Masks are 1 on real tokens.

    Args:
      types: of the tokens, for models that tell first and second texts apart; none is all 0.
    """
    shape = run.config.model.shape
    if (inputs is not None) != (shape == "encoder-decoder"):
        raise UserError(f"forward: a model that is {shape} {'needs' if inputs is None else 'takes no'} inputs")
    target = tokens_from_ids(jnp.asarray(tokens), None if mask is None else jnp.asarray(mask))
    _check_context(run, target.ids, "tokens")
    if types is not None:
        _check_types(run, target.ids, np.asarray(types))
        target = target._replace(types=jnp.asarray(types))
    if inputs is None:
        return _forward(run.model, run.params, target, None)
    source = tokens_from_ids(jnp.asarray(inputs), None if inputs_mask is None else jnp.asarray(inputs_mask))
    _check_context(run, source.ids, "inputs")
    return _forward(run.model, run.params, target, source)


POOLINGS = {"mean": "mean", "cls": "first", "last": "last"}


def embed(run: Run, texts: Sequence[Text], pooling: str = "mean", normalize: bool = True) -> Float[np.ndarray, "N D"]:
    """One vector a text, from the hidden states of an encoder-only or decoder-only model.

    Args:
      pooling: the mean over a text's tokens, its first one ("cls") or its "last" one.
      normalize: scale every vector to length 1, so that dot products are cosines.
    """
    shape = run.config.model.shape
    if shape == "encoder-decoder":
        raise UserError("embed: an encoder-decoder has no vectors of its own for a text; use an encoder-only model")
    if pooling not in POOLINGS:
        raise UserError(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
    ids = _source_ids(run, texts)[0] if shape == "encoder-only" else _prompt_ids(run, texts)[0]
    _check_context(run, ids, "text")
    vectors = [np.zeros((0, run.config.model.embed_dim), np.float32)]
    for start in range(0, len(ids), BATCH):
        rows = ids[start : start + BATCH]
        tokens = _tokens(rows, _bucket(len(rows), 1))
        vectors.append(np.asarray(_embedded(run.model, run.params, tokens, POOLINGS[pooling], normalize))[: len(rows)])
    return np.concatenate(vectors)


@partial(jax.jit, static_argnames=("model", "pooling", "normalize"))
def _embedded(model: Transformer, params: Params, tokens: Tokens, pooling: str, normalize: bool) -> Array:
    hidden_BTD = model.apply({"params": params}, tokens, method="hidden")
    x_BD = pooled(hidden_BTD, tokens.segments, pooling).astype(jnp.float32)
    return x_BD / jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12) if normalize else x_BD


@partial(jax.jit, static_argnames="model")
def _forward(model: Transformer, params: Params, target: Tokens, source: Tokens | None) -> Array:
    method = "hidden" if model.config.decoder is None else "__call__"
    return model.apply({"params": params}, target, source, method=method)


@partial(jax.jit, static_argnames="model")
def _log_probs(
    model: Transformer, params: Params, previous: Tokens, targets_BT: Array, source: Tokens | None
) -> Float[Array, "B T"]:
    logits_BTV = model.apply({"params": params}, previous, source)
    logp_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    return jnp.take_along_axis(logp_BTV, targets_BT[..., None], axis=-1)[..., 0]


def _request_ids(run: Run, prompts: Sequence[Text], max_new_tokens: int, what: str) -> tuple[list[list[int]], bool]:
    """What the model reads for each prompt, and whether the prompts were texts; raises if it does not fit."""
    _check_decoder(run, what)
    translates = run.config.model.shape == "encoder-decoder"
    ids, is_text = _source_ids(run, prompts) if translates else _prompt_ids(run, prompts)
    _check_context(run, ids, "prompt", 0 if translates else max_new_tokens)
    _check_context(run, [[_start(run)]] if translates else [], "output", max_new_tokens)
    return ids, is_text


def _generate_batch(
    run: Run, ids: list[list[int]], max_new_tokens: int, sampling: Sampling, seed: int
) -> list[list[int]]:
    prompt = _prompt(run, ids, seed)
    capacity = prompt.ids.shape[1] + max_new_tokens
    state, logits_BV = prefill(run.model, run.decode_params, prompt, capacity=capacity)
    output, _ = continue_rows(
        run.model,
        run.decode_params,
        state,
        logits_BV,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=_eos_ids(run),
        vocab_size=_num_drawable(run),
    )
    return [_before(row, _eos_ids(run)) for row in np.asarray(output)[: len(ids)].tolist()]


def _search_batch(
    run: Run, ids: list[list[int]], max_new_tokens: int, beam: BeamSearch
) -> list[tuple[list[list[int]], list[float]]]:
    prompt = _prompt(run, ids, seed=0)
    capacity = prompt.ids.shape[1] + max_new_tokens
    state, logits_BV = prefill(run.model, run.decode_params, prompt, capacity=capacity)
    output, scores = search_beams(
        run.model,
        run.decode_params,
        state,
        logits_BV,
        prompt.active,
        max_new_tokens=max_new_tokens,
        search=beam,
        eos_ids=_eos_ids(run),
        vocab_size=_num_drawable(run),
    )
    rows = [[_before(row, _eos_ids(run)) for row in beams] for beams in np.asarray(output)[: len(ids)].tolist()]
    return list(zip(rows, np.asarray(scores)[: len(ids)].tolist(), strict=True))


def _num_drawable(run: Run) -> int:
    """A model may have more rows in its table than its tokenizer has pieces."""
    return run.config.model.vocab_size if run.tokenizer is None else run.tokenizer.vocab_size


def _prompt(run: Run, ids: list[list[int]], seed: int) -> Prompt:
    size = _bucket(len(ids), 1)
    source = _tokens(ids, size) if run.config.model.shape == "encoder-decoder" else None
    rows = [[_start(run)] for _ in ids] if source is not None else ids
    length = _bucket(max(len(row) for row in rows))
    return Prompt(
        ids=_padded(rows, size, length),
        lengths=np.array([len(row) for row in rows] + [1] * (size - len(rows)), np.int32),
        seeds=np.array([_row_seed(row, seed) for row in ids] + [0] * (size - len(rows)), np.uint32),
        active=np.arange(size) < len(rows),
        source=source,
    )


def _score_batch(run: Run, ids: list[list[int]], sources: list[list[int]] | None) -> list[Float[np.ndarray, " T"]]:
    size = _bucket(len(ids), 1)
    first = _bos(run) if sources is None else _start(run)
    previous = _tokens([[first, *row[:-1]] if row else [] for row in ids], size)
    targets_BT = _padded(ids, size, previous.ids.shape[1])
    source = None if sources is None else _tokens(sources, size)
    logp_BT = np.asarray(_log_probs(run.model, run.params, previous, targets_BT, source))
    return [logp_BT[i, : len(row)] for i, row in enumerate(ids)]


# ---------------------------------------------------------------- texts to rows
def _token_ids(run: Run, texts: Sequence[Text], encoding: str = "encode_batch") -> tuple[list[list[int]], bool]:
    """Id lists, and whether the texts were strings, which the tokenizer's method `encoding` reads."""
    if isinstance(texts, str):
        raise UserError(f"expected a list of texts or of id lists, got the text {texts!r}: write [{texts!r}]")
    if not any(isinstance(text, str) for text in texts):
        rows = [[int(i) for i in row] for row in texts]
        _check_ids(run, rows)
        return rows, False
    if run.tokenizer is None:
        raise UserError("this model has no tokenizer: pass id lists instead of texts")
    return getattr(run.tokenizer, encoding)(list(texts)), True


def _prompt_ids(run: Run, prompts: Sequence[Text]) -> tuple[list[list[int]], bool]:
    """What a decoder continues: the text as its tokenizer opens it, or the ids as they are; never an empty row."""
    ids, is_text = _token_ids(run, prompts, "encode_prompt")
    return [row or [_bos(run)] for row in ids], is_text


def _source_ids(run: Run, prompts: Sequence[Text]) -> tuple[list[list[int]], bool]:
    """What an encoder reads: the text as its tokenizer closes it, or the ids as they are; never an empty row."""
    ids, is_text = _token_ids(run, prompts, "encode_source")
    return [row or list(_eos_ids(run)[:1]) or [0] for row in ids], is_text


def _bos(run: Run) -> int:
    """What a text opens with."""
    return _known(special_ids(run.config.model, run.tokenizer).bos, "bos")


def _start(run: Run) -> int:
    """What the decoder of an encoder-decoder reads first."""
    return _known(special_ids(run.config.model, run.tokenizer).start, "decoder_start")


def _known(id: int | None, name: str) -> int:
    if id is None:
        raise UserError(f"this model has no tokenizer and no model.special.{name}: pass non-empty id lists")
    return id


def _eos_ids(run: Run) -> tuple[int, ...]:
    """Tokens that end a text; none at all where neither the model nor a tokenizer names one."""
    return special_ids(run.config.model, run.tokenizer).eos


def _row_seed(row: Sequence[int], seed: int) -> int:
    """From the row's own tokens: the same wherever it stands, different from its neighbours'."""
    return zlib.crc32(np.asarray(row, np.int32).tobytes(), seed & 0xFFFFFFFF)


# ---------------------------------------------------------------- rows to arrays
def _tokens(rows: list[list[int]], size: int) -> Tokens:
    length = _bucket(max(len(row) for row in rows))
    mask_BT = _padded([[1] * len(row) for row in rows], size, length)
    return tokens_from_ids(jnp.asarray(_padded(rows, size, length)), jnp.asarray(mask_BT))


def _padded(rows: list[list[int]], size: int, length: int) -> Int[np.ndarray, "B T"]:
    padded = np.zeros((size, length), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def _bucket(n: int, least: int = 16) -> int:
    """The next power of two: few shapes, few compiled programs."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def _before(row: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    return list(itertools.takewhile(lambda token: token not in eos_ids, row))


# ---------------------------------------------------------------- checks
def _check_decoder(run: Run, what: str) -> None:
    if run.config.model.decoder is None:
        raise UserError(f"{what}: an encoder-only model has no decoder; use forward for its hidden states")


def _beam_search(num_beams: int, length_penalty: float, convention: str, early_stopping: str) -> BeamSearch:
    """Checked settings."""
    if num_beams < 1:
        raise UserError(f"num_beams={num_beams}: must be at least 1")
    if not np.isfinite(length_penalty):
        raise UserError(f"length_penalty={length_penalty}: must be a number, 0 for none")
    for name, value, allowed in (
        ("convention", convention, ("length", "gnmt")),
        ("early_stopping", early_stopping, ("never", "heuristic", "exact")),
    ):
        if value not in allowed:
            raise UserError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    return BeamSearch(num_beams, length_penalty, convention, early_stopping)


def _check_settings(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must be 0 or more")
    if not (temperature >= 0.0 and np.isfinite(temperature)):
        raise UserError(f"temperature={temperature}: must be 0 (greedy) or a positive number")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k}: must be at least 1, or none for all tokens")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UserError(f"top_p={top_p}: must be in (0, 1], or none for all tokens")


def _check_context(run: Run, rows: Sequence[Sequence[int]] | Array, what: str, new: int = 0) -> None:
    limit, longest = run.config.model.max_length, max((len(row) for row in rows), default=0)
    if limit is None or longest + new <= limit:
        return
    more = f" and max_new_tokens={new}" if new else ""
    raise UserError(
        f"{what} of {longest} tokens{more} exceed the model's context of {limit} tokens: "
        + (f"shorten the {what} or set max_new_tokens to at most {max(limit - longest, 0)}" if new else "shorten it")
    )


def _check_types(run: Run, ids: Array, types: np.ndarray) -> None:
    num_types = run.config.model.embedding.num_types
    if not num_types:
        raise UserError("forward: this model has no types of tokens: leave types out")
    if types.shape != ids.shape:
        raise UserError(f"forward: types have shape {types.shape} but tokens {ids.shape}: give one type per token")
    bad = types[(types < 0) | (types >= num_types)]
    if bad.size:
        raise UserError(f"forward: types hold {bad[0]}, but this model has {num_types}: use 0 to {num_types - 1}")


def _check_ids(run: Run, rows: list[list[int]]) -> None:
    vocab_size = run.config.model.vocab_size
    for i, row in enumerate(rows):
        bad = [t for t in row if not 0 <= t < vocab_size]
        if bad:
            raise UserError(f"row {i} holds token id {bad[0]}, outside the vocabulary of {vocab_size}")
