"""Predictions of encoders and of class heads: labels of texts, tags of words, and words for masks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import PoolerConfig
from jaxformer.data.tokenizer import TypedIds, special_ids
from jaxformer.decode.slots import make_tokens, pad_batch_size, pad_rows, use_mesh
from jaxformer.decode.text import check_context, decoder_start_id, require_tokenizer
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.run import Run
from jaxformer.typing import Array, Float, Params, Tokens

BATCH_SIZE = 32


class LabelScore(NamedTuple):
    label: str
    score: float
    """Probability of the label; the predicted number in a regression."""


class WordTag(NamedTuple):
    word: str
    tag: str
    score: float
    """Probability of the tag."""


class Filling(NamedTuple):
    token: str
    """Text of the token."""
    score: float
    """Probability of the token at the mask."""
    id: int


# ---------------------------------------------------------------- labels of texts
def classify(run: Run, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[list[LabelScore]]:
    """The labels of each text with their scores, the best first; in a regression, the predicted numbers.

    Args:
      pairs: the second text of every pair, for models that compare two texts.
    """
    pooler = _require_head(run, "classify", tags=False)
    _check_list(texts, "classify")
    if pairs is not None:
        _check_list(pairs, "classify")
    if pairs is not None and len(pairs) != len(texts):
        raise UserError(f"classify: {len(texts)} texts but {len(pairs)} pairs: give one second text per text")
    rows = require_tokenizer(run).encode_sequence(list(texts), None if pairs is None else list(pairs)) if texts else []
    check_context(run, [row.ids for row in rows], "text")
    names = label_names(pooler)
    results = []
    for logits_BC in _batches(rows, partial(_class_logits, run)):
        for scores in _scores(logits_BC, pooler.problem):
            order = range(len(names)) if pooler.problem == "regression" else np.argsort(-scores, kind="stable")
            results.append([LabelScore(names[i], float(scores[i])) for i in order])
    return results


def label_names(pooler: PoolerConfig) -> tuple[str, ...]:
    """The names of the classes; LABEL_0, LABEL_1, ... if they have none, as in transformers."""
    return pooler.labels or tuple(f"LABEL_{i}" for i in range(pooler.num_classes))


def _scores(logits_BC: np.ndarray, problem: str) -> np.ndarray:
    if problem == "regression":
        return logits_BC
    return np.asarray((jax.nn.softmax if problem == "single_label" else jax.nn.sigmoid)(logits_BC))


# ---------------------------------------------------------------- tags of words
def tag(run: Run, sentences: Sequence[str | Sequence[str]]) -> list[list[WordTag]]:
    """The tag of every word with its probability. A sentence is a list of words, or a text split at white space."""
    pooler = _require_head(run, "tag", tags=True)
    _check_list(sentences, "tag", (str, list, tuple))
    words = [sentence.split() if isinstance(sentence, str) else list(sentence) for sentence in sentences]
    for sentence in words:
        _check_list(sentence, "tag")
    tokenizer, special = require_tokenizer(run), special_ids(run.config.model, run.tokenizer)
    encoded = tokenizer.encode_words(words) if words else []
    _check_words(words, encoded)
    ids = [[special.bos, *(id for word in row for id in word), special.first_eos] for row in encoded]
    check_context(run, ids, "sentence")
    names, results = label_names(pooler), []
    rows = [TypedIds(row, [0] * len(row)) for row in ids]
    logits = (row for batch in _batches(rows, partial(_class_logits, run)) for row in batch)
    for sentence, pieces, logits_TC in zip(words, encoded, logits, strict=True):
        probabilities = np.asarray(jax.nn.softmax(logits_TC))
        # The first token of word i follows bos and the tokens of all words before it.
        starts = 1 + np.cumsum([0, *(len(word) for word in pieces)])[:-1]
        best = probabilities[starts].argmax(axis=-1)
        scores = probabilities[starts, best]
        results.append([WordTag(word, names[i], float(p)) for word, i, p in zip(sentence, best, scores, strict=True)])
    return results


# ---------------------------------------------------------------- masks
def fill_mask(run: Run, text: str, top_k: int = 5) -> list[list[Filling]]:
    """The most likely tokens for every mask in the text, the best first; a mask is written `<mask>` or `[MASK]`."""
    model = run.config.model
    if model.shape != "encoder-only" or model.head is None:
        raise UserError(
            f"fill_mask: needs an encoder-only model with a masked-LM head; this one is {model.shape}"
            + (" and has no such head" if model.shape == "encoder-only" else "")
        )
    if top_k < 1:
        raise UserError(f"fill_mask: top_k={top_k}: must be at least 1")
    if not isinstance(text, str):
        raise UserError(f"fill_mask: expected one text, got {text!r}: call it for every text")
    tokenizer = require_tokenizer(run)
    if tokenizer.mask_id is None:
        raise UserError("fill_mask: the tokenizer of this model has no mask token")
    ids = tokenizer.encode_masked(text)
    positions = np.flatnonzero(np.array(ids) == tokenizer.mask_id)
    if not len(positions):
        raise UserError(f"fill_mask: no mask in {text!r}: write <mask> where a word is missing")
    check_context(run, [ids], "text")
    tokens = make_tokens([ids], pad_batch_size(run, 1))
    with use_mesh(run):
        probabilities_TV = np.asarray(_mask_probabilities(run.model, run.params, tokens, positions))
    probabilities_TV = probabilities_TV[:, : tokenizer.vocab_size]
    results = []
    for probabilities in probabilities_TV:
        best = np.argsort(-probabilities, kind="stable")[:top_k]
        results.append([Filling(tokenizer.decode([i]), float(probabilities[i]), int(i)) for i in best])
    return results


@partial(jax.jit, static_argnames="model")
def _mask_probabilities(model: Transformer, params: Params, tokens: Tokens, positions: Array) -> Float[Array, "P V"]:
    hidden_BTD = model.apply({"params": params}, tokens, method="hidden")
    return jax.nn.softmax(model.apply({"params": params}, hidden_BTD[:1, positions], method="logits")[0])


# ---------------------------------------------------------------- batches
def _batches(rows: Sequence[TypedIds], predict: Callable[[Sequence[TypedIds]], np.ndarray]) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BATCH_SIZE):
        yield predict(rows[start : start + BATCH_SIZE])


def _class_logits(run: Run, rows: Sequence[TypedIds]) -> np.ndarray:
    """Class logits of one batch: [rows, C], or [rows, T, C] of a tag head."""
    model, size = run.config.model, pad_batch_size(run, len(rows))
    ids = [row.ids for row in rows]
    tokens, source = make_tokens(ids, size), None
    if model.shape == "encoder-decoder":
        source, tokens = tokens, make_tokens([[decoder_start_id(run), *row[:-1]] for row in ids], size)
    elif model.embedding.num_types > 1:
        tokens = tokens._replace(types=pad_rows([row.types for row in rows], size, tokens.ids.shape[1]))
    with use_mesh(run):
        return np.asarray(_pool(run.model, run.params, tokens, source))[: len(rows)]


@partial(jax.jit, static_argnames="model")
def _pool(model: Transformer, params: Params, tokens: Tokens, source: Tokens | None) -> Array:
    return model.apply({"params": params}, tokens, source, method="pool").astype(jnp.float32)


# ---------------------------------------------------------------- checks
def _require_head(run: Run, function: str, tags: bool) -> PoolerConfig:
    pooler = run.config.model.pooler
    if pooler is None or pooler.num_classes is None:
        raise UserError(f"{function}: this model has no class head: train one with data.objective.kind={function}")
    if (pooler.pooling == "none") != tags:
        other = "labels every token: use jf.tag" if pooler.pooling == "none" else "labels whole texts: use jf.classify"
        raise UserError(f"{function}: this model {other}")
    return pooler


def _check_list(texts: object, function: str, kinds: tuple[type, ...] = (str,)) -> None:
    if isinstance(texts, str):
        raise UserError(f"{function}: expected a list of texts, got the text {texts!r}: write [{texts!r}]")
    wrong = [text for text in texts if not isinstance(text, kinds)]
    if wrong:
        raise UserError(f"{function}: expected a list of texts, but one of them is {wrong[0]!r}")


def _check_words(words: Sequence[Sequence[str]], encoded: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise if a word has no token, whose tag would otherwise be that of the next word."""
    for row, (sentence, pieces) in enumerate(zip(words, encoded, strict=True)):
        empty = [word for word, ids in zip(sentence, pieces, strict=True) if not ids]
        if empty:
            raise UserError(f"tag: the word {empty[0]!r} of sentence {row} has no tokens in this tokenizer: remove it")
