"""Word vectors: held-out loss, accuracy on analogies, and rank correlation with similarities judged by people."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxformer.config import WordVectors
from jaxformer.data import Tokenizer
from jaxformer.data.sources.textfiles import numbered_lines
from jaxformer.errors import UserError
from jaxformer.evaluate.heldout import HeldOut, mean_losses
from jaxformer.evaluate.scores import spearman
from jaxformer.run import Run
from jaxformer.typing import Float
from jaxformer.word_vectors import run_vectors

CHUNK = 1024  # questions per matrix product


def word_vectors(config: WordVectors, run: Run, heldout: HeldOut) -> dict[str, float]:
    """The values of a run of word2vec; questions and pairs with unknown words are left out."""
    values = {"heldout_loss": mean_losses(heldout.losses(run, config.batches or run.config.evaluate.batches))[0]}
    words, vectors_ND = run_vectors(run)
    if config.analogies is not None:
        values["analogy_accuracy"] = analogy_accuracy(words, vectors_ND, read_analogies(config.analogies))
    if config.similarities is not None:
        values["word_similarity"] = similarity(words, vectors_ND, read_similarities(config.similarities))
    return values


def check_files(config: WordVectors, tokenizer: Tokenizer) -> None:
    """Raise if a file cannot be read, or if too few of its words are in the vocabulary."""
    words = {word.lower() for word in tokenizer.tokens()}
    for field, read, needed in (("analogies", read_analogies, 1), ("similarities", read_similarities, 2)):
        path = getattr(config, field)
        lines = [] if path is None else [[w for w in line if isinstance(w, str)] for line in read(path)]
        num_known = sum(words.issuperset(line) for line in lines)
        if path is not None and num_known < needed:
            raise UserError(
                f"evaluate.metrics: {field}={path} has {num_known} of {len(lines)} lines with words of the vocabulary "
                f"only, at least {needed} needed: lower data.tokenizer.min_count, or remove {field}"
            )


def analogy_accuracy(
    words: Sequence[str], vectors_ND: Float[np.ndarray, "N D"], questions: Sequence[tuple[str, str, str, str]]
) -> float:
    """Share of questions a : b = c : d where d is the word nearest to b - a + c; NaN without a known question."""
    rows = {word.lower(): row for row, word in reversed(list(enumerate(words)))}
    known = np.array([[rows[word] for word in each] for each in questions if all(word in rows for word in each)])
    if not len(known):
        return float("nan")
    unit_ND, num_correct = _unit(vectors_ND), 0
    for start in range(0, len(known), CHUNK):
        a, b, c, d = known[start : start + CHUNK].T
        scores_QN = (unit_ND[b] - unit_ND[a] + unit_ND[c]) @ unit_ND.T
        for given in (a, b, c):
            scores_QN[np.arange(len(a)), given] = -np.inf
        num_correct += int((scores_QN.argmax(axis=1) == d).sum())
    return num_correct / len(known)


def similarity(
    words: Sequence[str], vectors_ND: Float[np.ndarray, "N D"], pairs: Sequence[tuple[str, str, float]]
) -> float:
    """Spearman correlation of cosine similarities with those in `pairs`; NaN with fewer than two known pairs."""
    rows = {word.lower(): row for row, word in reversed(list(enumerate(words)))}
    known = [(rows[a], rows[b], value) for a, b, value in pairs if a in rows and b in rows]
    if len(known) < 2:
        return float("nan")
    first, second, values = zip(*known, strict=True)
    unit_ND = _unit(vectors_ND)
    return spearman(np.array(values), (unit_ND[list(first)] * unit_ND[list(second)]).sum(axis=1))


def _unit(vectors_ND: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N D"]:
    return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)


# ---------------------------------------------------------------- files
def read_analogies(path: str) -> list[tuple[str, str, str, str]]:
    questions = []
    for number, line in numbered_lines(Path(path)):
        if line.startswith(":"):
            continue
        question = tuple(line.lower().split())
        if len(question) != 4:
            raise UserError(f"{path}, line {number}: expected four words, got {len(question)}: correct the line")
        questions.append(question)
    return questions


def read_similarities(path: str) -> list[tuple[str, str, float]]:
    pairs = []
    for number, line in numbered_lines(Path(path)):
        if line.startswith("#"):
            continue
        try:
            first, second, value = re.split(r"[\t, ]+", line.strip())[:3]
            pairs.append((first.lower(), second.lower(), _finite(value)))
        except ValueError:
            if number > 1:  # the first line may name the columns
                raise UserError(f"{path}, line {number}: expected two words and a number: correct the line") from None
    return pairs


def _finite(value: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number
