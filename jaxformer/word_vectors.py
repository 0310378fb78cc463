"""Word vectors in the text format of word2vec, which gensim reads: to a file, from a file, and into a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from jaxformer.data.tokenizer.base import SPACES
from jaxformer.data.tokenizer.words import Words
from jaxformer.errors import UserError
from jaxformer.run import Run, load
from jaxformer.rundir import write_file
from jaxformer.typing import Float, Int


def run_vectors(run: Run) -> tuple[list[str], Float[np.ndarray, "N D"]]:
    """The words of a run of word2vec, the most frequent first, and their vectors; special tokens are left out."""
    if not isinstance(run.tokenizer, Words):
        raise UserError("the run has no vocabulary of words: train it with data.tokenizer.kind=words")
    ids = np.flatnonzero(run.tokenizer.counts)
    tokens = run.tokenizer.tokens()
    return [tokens[id] for id in ids], np.asarray(run.params["embedding"]["tokens"], np.float32)[ids]


def write_run_vectors(run: Run, target: str | Path) -> str:
    """Write the vectors of a run to a new file."""
    target = Path(target)
    if target.exists():
        raise UserError(f"'{target}' exists already: name a new file")
    words, vectors_ND = run_vectors(run)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, format_vectors(words, vectors_ND).encode())
    return f"{len(words):,} vectors of step {run.step} written to {target}"


def format_vectors(words: Sequence[str], vectors_ND: Float[np.ndarray, "N D"]) -> str:
    """A line with the number of words and of dimensions, then a line per word; numbers read back exactly."""
    lines = [f"{len(words)} {vectors_ND.shape[1]}"]
    lines += [f"{word} {' '.join(map(repr, row))}" for word, row in zip(words, vectors_ND.tolist(), strict=True)]
    return "\n".join(lines) + "\n"


def read_vectors(path: str | Path) -> tuple[list[str], Float[np.ndarray, "N D"]]:
    """Read the words and vectors of a file."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return _parse_vectors(file, path)
    except UnicodeDecodeError:
        raise UserError(
            f"{path}: not UTF-8 text, but perhaps word2vec's binary format: convert it, for example with gensim's "
            "save_word2vec_format(path, binary=False)"
        ) from None


def _parse_vectors(file: TextIO, path: str | Path) -> tuple[list[str], Float[np.ndarray, "N D"]]:
    words: list[str] = []
    num_words, dim = _read_header(file.readline(), path)
    vectors_ND = np.empty((num_words, dim), np.float32)
    for number, line in enumerate(file, start=2):
        word, *values = line.rstrip().rsplit(" ", dim)
        try:
            # reshape: a single number would be broadcast to all dimensions.
            vectors_ND[len(words)] = np.array(values, np.float32).reshape(dim)
        except (ValueError, IndexError):
            raise UserError(
                f"{path}, line {number}: expected one of {num_words} words with {dim} numbers: restore the file"
            ) from None
        words.append(word)
    if len(words) != num_words:
        raise UserError(f"{path}: the first line announces {num_words} words, but there are {len(words)}: restore it")
    return words, vectors_ND


def _read_header(line: str, path: str | Path) -> tuple[int, int]:
    try:
        num_words, dim = map(int, line.split())
    except ValueError:
        raise UserError(
            f"{path}, line 1: expected the number of words and of dimensions, as word2vec writes them"
        ) from None
    return num_words, dim


def rows_of_words(
    source: str | Path, tokens: Sequence[str], embed_dim: int
) -> tuple[Int[np.ndarray, " N"], Float[np.ndarray, "N D"]]:
    """The ids of the tokens that are words with a vector, and these vectors.

    Tokens are compared without their space marker, as written first and in lower case otherwise.

    Args:
      source: a run directory of word2vec, or a file in its text format.
      tokens: the token of every id.
    """
    source = Path(source)
    if not source.exists():
        raise UserError(f"train.word_vectors='{source}': no such file or directory")
    try:
        words, vectors_ND = run_vectors(load(source)) if source.is_dir() else read_vectors(source)
    except UserError as error:
        raise UserError(f"train.word_vectors='{source}': {error}") from None
    if vectors_ND.shape[1] != embed_dim:
        raise UserError(
            f"train.word_vectors='{source}' has vectors of {vectors_ND.shape[1]} dimensions, but "
            f"model.embed_dim={embed_dim}: set model.embed_dim={vectors_ND.shape[1]}"
        )
    rows = {word: row for row, word in enumerate(words)}
    names = [token.lstrip("".join(SPACES)) for token in tokens]
    found = {id: rows.get(name, rows.get(name.lower())) for id, name in enumerate(names)}
    ids = [id for id, row in found.items() if row is not None]
    if not ids:
        raise UserError(f"train.word_vectors='{source}' has no word that is a token of this run: check its words")
    return np.array(ids, np.int32), vectors_ND[[found[id] for id in ids]]
