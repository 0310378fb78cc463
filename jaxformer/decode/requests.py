"""The functions of the Python API: texts or id lists in, texts, ids, scores or vectors out."""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxformer.decode.batch import Decoded, Row, on_mesh, padded, padded_size, tokens_of
from jaxformer.decode.beam import BeamSearch, searched
from jaxformer.decode.program import program
from jaxformer.decode.queue import answered, text_of
from jaxformer.decode.score import token_scores
from jaxformer.decode.settings import SAMPLED_ONLY, SamplingConfig, is_number, is_whole
from jaxformer.decode.stream import pieces
from jaxformer.decode.texts import (
    Text,
    check_context,
    check_decoder,
    decoder_start,
    first_id,
    is_text,
    num_drawable,
    prompt_ids,
    request_ids,
    source_ids,
    token_ids,
    tokenizer_of,
)
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.ops.reductions import pool
from jaxformer.run import Run
from jaxformer.typing import Array, Float, Int, Params, Tokens, tokens_from_ids

BATCH = 32  # rows decoded together


class Request:
    """A prompt with settings of its own: `Request("Once", temperature=0.7, stop=["\\n"])`."""

    def __init__(self, prompt: Any, **settings: Any) -> None:
        self.prompt, self.settings = prompt, settings

    def __repr__(self) -> str:
        words = [repr(self.prompt), *(f"{name}={value!r}" for name, value in self.settings.items())]
        return f"Request({', '.join(words)})"


class Completion(NamedTuple):
    """One output, and what is known of it."""

    output: Any
    """A text or an id list, as the prompt was: new tokens only, eos dropped."""
    ids: list[int]
    finish: Literal["eos", "length", "stop"]
    """What ended it: an eos token, max_new_tokens, or a stop text."""
    log_probs: Float[np.ndarray, " T"] | None
    """Of every token, as the model gave it before any filter; none unless `log_probs` is set."""
    top: list[list[tuple[int, float]]] | None
    """For every token (id, log-probability) of the `log_probs` likeliest, best first."""


# ---------------------------------------------------------------- generation
def generate(
    run: Run,
    prompts: Iterable[Text | Request],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    seed: int = 0,
    *,
    batch_size: int = BATCH,
    length_penalty: float = 1.0,
    early_stopping: str = "heuristic",
    **settings: Any,
) -> list[Text] | list[list[Text]] | Iterator[Text]:
    """Continuations of prompts, or for an encoder-decoder the outputs for them: new tokens only, eos dropped.

    Texts give texts, id lists give id lists. A row depends on its own prompt, settings and seed alone. Prompts beyond
    `batch_size` wait for a slot; an iterator of prompts gives an iterator of outputs, which reads ahead a few batches.
    With several beams the best hypothesis is given; `search` gives them all. With `num_samples` set, a list a prompt.

    Args:
      settings: everything else of `SamplingConfig`, such as min_p, repetition_penalty, no_repeat_ngram, bias, banned,
        forced_first, min_new_tokens, stop, num_samples. A `Request` may set any setting but beams for itself.
    """
    if num_beams != 1:
        check_no_sampling(num_beams, {"temperature": temperature, "top_k": top_k, "top_p": top_p} | settings)
        beams = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        found = _search(run, prompts, batch_size, beam_search(**beams), settings | {"max_new_tokens": max_new_tokens})
        return _as_given((hypotheses[0].output for hypotheses in found), prompts)
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    completions = _completions(run, prompts, batch_size, given | {"seed": seed} | settings)
    several = "num_samples" in settings

    def outputs(each: list[Completion]) -> Any:
        return [c.output for c in each] if several or len(each) > 1 else each[0].output

    return _as_given(map(outputs, completions), prompts)


def complete(
    run: Run, prompts: Iterable[Text | Request], *, batch_size: int = BATCH, **settings: Any
) -> list[list[Completion]] | Iterator[list[Completion]]:
    """`generate` with all that is known of each output; for every prompt a list of `num_samples`.

    Args:
      settings: as of `generate`, and `log_probs`.
    """
    return _as_given(_completions(run, prompts, batch_size, settings), prompts)


def stream(run: Run, prompt: Text | Request, **settings: Any) -> Iterator[str]:
    """The text that `generate` gives, in pieces as it is made; no piece ever ends within a character."""
    check_decoder(run, "stream")
    rows = prepared(run, prompt, settings)
    if len(rows) > 1:
        raise UserError(f"num_samples={len(rows)}: a stream is of one output, use generate for several")
    tokenizer_of(run)
    return pieces(run, rows[0])


def prepared(run: Run, prompt: Text | Request, settings: Mapping[str, Any]) -> list[Row]:
    """The rows of one request, checked; its own settings go before those given."""
    if isinstance(prompt, Request):
        prompt, settings = prompt.prompt, {**settings, **prompt.settings}
    config = sampling_config(settings)
    config.check_tokens(num_drawable(run))
    if config.stop:
        tokenizer_of(run)
    ids = request_ids(run, prompt, config.max_new_tokens)
    return [Row(ids, config, sample) for sample in range(config.num_samples)]


def sampling_config(settings: Mapping[str, Any]) -> SamplingConfig:
    known = [field.name for field in fields(SamplingConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3) or known
            raise UserError(f"unknown setting '{name}'; there are: {', '.join(near)}")
    return SamplingConfig(**settings)


def completion(run: Run, row: Row, decoded: Decoded, as_text: bool) -> Completion:
    output = decoded.ids
    if as_text:
        output = text_of(run, row, decoded.ids) if decoded.text is None else decoded.text
    return Completion(output, decoded.ids, decoded.finish, decoded.log_probs, decoded.top)


def _completions(
    run: Run, prompts: Iterable[Text | Request], batch_size: int, settings: Mapping[str, Any]
) -> Iterator[list[Completion]]:
    """Checked now, and what can be of the prompts; decoded as they are asked for."""
    _check_prompts(run, prompts, batch_size, "generate")
    sampling_config(settings)  # also where there is no prompt
    asked: list[tuple[list[Row], bool]] = []

    def rows_of(i: int, prompt: Text | Request) -> list[Row]:
        with _naming(f"prompt {i}: "):
            asked.append((prepared(run, prompt, settings), is_text(getattr(prompt, "prompt", prompt))))
        return asked[-1][0]

    requests: Iterable[list[Row]] = itertools.starmap(rows_of, enumerate(prompts))
    if not isinstance(prompts, Iterator):
        requests = list(requests)

    def finished() -> Iterator[list[Completion]]:
        for decoded in answered(run, requests, batch_size):
            rows, as_text = asked.pop(0)
            yield [completion(run, row, one, as_text) for row, one in zip(rows, decoded, strict=True)]

    return finished()


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Errors say where they come from."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}{error}") from None


def _as_given(outputs: Iterator[Any], prompts: Iterable[Any]) -> Any:
    """A list for a list; an iterator for an iterator, of which nothing may be read before it is asked for."""
    return outputs if isinstance(prompts, Iterator) else list(outputs)


# ---------------------------------------------------------------- beam search
class Hypothesis(NamedTuple):
    """One outcome of a beam search."""

    output: Any
    """A text or an id list, as the prompt was; eos dropped."""
    score: float
    """Sum of log-probabilities over the length penalty."""


def search(
    run: Run,
    prompts: Iterable[Text | Request],
    max_new_tokens: int = 64,
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    convention: str = "length",
    early_stopping: str = "heuristic",
    batch_size: int = BATCH,
    **settings: Any,
) -> list[list[Hypothesis]] | Iterator[list[Hypothesis]]:
    """The `num_beams` best hypotheses of a beam search for every prompt, best first.

    Args:
      length_penalty: exponent of the length that sums of log-probabilities are divided by; 0 compares the sums.
      convention: "length" as transformers, or "gnmt" for ((5 + length) / 6) ** penalty (arXiv:1609.08144).
      early_stopping: "never", "heuristic" or "exact", which are transformers' "never", False and True.
      batch_size: beams decoded together.
      settings: as of `generate`, but for those that sample. Log-probabilities are filtered, as transformers does.
    """
    check_no_sampling(num_beams, settings)
    beam = beam_search(num_beams, length_penalty, early_stopping, convention)
    found = _search(run, prompts, batch_size, beam, settings | {"max_new_tokens": max_new_tokens})
    return _as_given(found, prompts)


def _search(
    run: Run, prompts: Iterable[Text | Request], batch_size: int, beam: BeamSearch, settings: Mapping[str, Any]
) -> Iterator[list[Hypothesis]]:
    _check_prompts(run, prompts, batch_size, "search")
    sampling_config(settings)

    def row_of(i: int, prompt: Text | Request) -> tuple[Row, bool]:
        with _naming(f"prompt {i}: "):
            row = prepared(run, prompt, settings)[0]
            check_no_sampling(beam.num_beams, vars(row.config))
        return row, is_text(getattr(prompt, "prompt", prompt))

    rows: Iterable[tuple[Row, bool]] = itertools.starmap(row_of, enumerate(prompts))
    if not isinstance(prompts, Iterator):
        rows = list(rows)

    def found() -> Iterator[list[Hypothesis]]:
        size, source = max(1, batch_size // beam.num_beams), iter(rows)
        while group := list(itertools.islice(source, size)):
            for (row, as_text), (ids, scores) in zip(group, searched(run, [r for r, _ in group], beam), strict=True):
                outputs = [text_of(run, row, each) for each in ids] if as_text else ids
                yield [Hypothesis(*pair) for pair in zip(outputs, scores, strict=True)]

    return found()


NOT_WITH_BEAMS = (*SAMPLED_ONLY, "stop", "num_samples", "log_probs")


def check_no_sampling(num_beams: int, settings: Mapping[str, Any]) -> None:
    """Raises for a setting that has no meaning with beams."""
    plain = SamplingConfig()
    for name in NOT_WITH_BEAMS:
        value = settings.get(name, getattr(plain, name))
        if value not in (None, [], getattr(plain, name)):
            raise UserError(f"num_beams={num_beams} with {name}={value!r}: beams do not sample, use one of them")


def beam_search(num_beams: int, length_penalty: float, early_stopping: str, convention: str = "length") -> BeamSearch:
    """Checked settings."""
    if not is_whole(num_beams) or num_beams < 1:
        raise UserError(f"num_beams={num_beams!r}: must be a whole number of at least 1")
    if not is_number(length_penalty) or not np.isfinite(length_penalty):
        raise UserError(f"length_penalty={length_penalty!r}: must be a number, 0 for none")
    for name, value, allowed in (
        ("convention", convention, ("length", "gnmt")),
        ("early_stopping", early_stopping, ("never", "heuristic", "exact")),
    ):
        if value not in allowed:
            raise UserError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    return BeamSearch(num_beams, length_penalty, convention, early_stopping)


def _check_prompts(run: Run, prompts: object, batch_size: int, what: str) -> None:
    check_decoder(run, what)
    if isinstance(prompts, str | Request):
        what = "the text " if is_text(prompts) else ""
        raise UserError(f"expected a list of texts or of id lists, got {what}{prompts!r}: write [{prompts!r}]")
    if not is_whole(batch_size) or batch_size < 1:
        raise UserError(f"batch_size={batch_size!r}: must be a whole number of at least 1")


# ---------------------------------------------------------------- scores
def score(run: Run, targets: Sequence[Text], inputs: Sequence[Text] | None = None) -> list[Float[np.ndarray, " T"]]:
    """Log-probability of every token of each target, given the ones before it and, if any, its input."""
    check_decoder(run, "score")
    if (inputs is not None) != (run.config.model.shape == "encoder-decoder"):
        need = "needs inputs" if inputs is None else "takes no inputs"
        raise UserError(f"score: a model that is {run.config.model.shape} {need}")
    ids = token_ids(run, targets)
    sources = None if inputs is None else source_ids(run, inputs)
    if sources is not None and len(sources) != len(ids):
        raise UserError(f"score: {len(ids)} targets but {len(sources)} inputs: give one input per target")
    check_context(run, ids, "target")
    check_context(run, sources or [], "input")
    scores: list[Float[np.ndarray, " T"]] = []
    for start in range(0, len(ids), BATCH):
        batch = slice(start, start + BATCH)
        scores += _score_batch(run, ids[batch], None if sources is None else sources[batch])
    return scores


def _score_batch(run: Run, ids: list[list[int]], sources: list[list[int]] | None) -> list[Float[np.ndarray, " T"]]:
    size = padded_size(run, len(ids))
    first = first_id(run) if sources is None else decoder_start(run)
    previous = tokens_of([[first, *row[:-1]] if row else [] for row in ids], size)
    targets_BT = padded(ids, size, previous.ids.shape[1])
    source = None if sources is None else tokens_of(sources, size)
    with on_mesh(run):
        logp_BT = np.asarray(_log_probs(run.model, run.params, previous, targets_BT, source))
    return [logp_BT[i, : len(row)] for i, row in enumerate(ids)]


@program(static=("model",))
def _log_probs(
    model: Transformer, params: Params, previous: Tokens, targets_BT: Array, source: Tokens | None
) -> Float[Array, "B T"]:
    return token_scores(model, params, previous, targets_BT, source).log_probs_BT


# ---------------------------------------------------------------- hidden states
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
    check_context(run, target.ids, "tokens")
    if types is not None:
        _check_types(run, target.ids, np.asarray(types))
        target = target._replace(types=jnp.asarray(types))
    source = None
    if inputs is not None:
        source = tokens_from_ids(jnp.asarray(inputs), None if inputs_mask is None else jnp.asarray(inputs_mask))
        check_context(run, source.ids, "inputs")
    with on_mesh(run):
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
    ids = (source_ids if shape == "encoder-only" else prompt_ids)(run, texts)
    check_context(run, ids, "text")
    vectors = [np.zeros((0, run.config.model.embed_dim), np.float32)]
    for start in range(0, len(ids), BATCH):
        rows = ids[start : start + BATCH]
        tokens = tokens_of(rows, padded_size(run, len(rows)))
        with on_mesh(run):
            found = _embedded(run.model, run.params, tokens, pooling=POOLINGS[pooling], normalize=normalize)
        vectors.append(np.asarray(found)[: len(rows)])
    return np.concatenate(vectors)


@program(static=("model", "pooling", "normalize"))
def _embedded(model: Transformer, params: Params, tokens: Tokens, *, pooling: str, normalize: bool) -> Array:
    hidden_BTD = model.apply({"params": params}, tokens, method="hidden")
    x_BD = pool(hidden_BTD, tokens.segments, pooling).astype(jnp.float32)
    return x_BD / jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12) if normalize else x_BD


@program(static=("model",))
def _forward(model: Transformer, params: Params, target: Tokens, source: Tokens | None) -> Array:
    method = "hidden" if model.config.decoder is None else "__call__"
    return model.apply({"params": params}, target, source, method=method)


def _check_types(run: Run, ids: Array, types: np.ndarray) -> None:
    num_types = run.config.model.embedding.num_types
    if not num_types:
        raise UserError("forward: this model has no types of tokens: leave types out")
    if types.shape != ids.shape:
        raise UserError(f"forward: types have shape {types.shape} but tokens {ids.shape}: give one type per token")
    bad = types[(types < 0) | (types >= num_types)]
    if bad.size:
        raise UserError(f"forward: types hold {bad[0]}, but this model has {num_types}: use 0 to {num_types - 1}")
