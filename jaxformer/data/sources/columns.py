"""Examples from columns of text: tab-separated files and the CoNLL format of tagged words."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from jaxformer.config import ConllSource, TsvSource
from jaxformer.data.sources.examples import FIELDS, Documents, Example, MalformedError, example_from_fields
from jaxformer.data.sources.lines import read_examples
from jaxformer.data.sources.textfiles import numbered_lines, read_lines

DOCUMENT_START = "-DOCSTART-"
NAMES = {field: field for field in FIELDS}

Sentence = list[tuple[int, str]]
"""The lines of a sentence with their numbers."""


# ---------------------------------------------------------------- TSV
def open_tsv(cfg: TsvSource) -> Documents:
    fields = ("inputs", "targets") if cfg.text is None else ("text", "text_pair", "label")
    columns = {field: getattr(cfg, field) for field in FIELDS if field in fields}
    columns = {field: column for field, column in columns.items() if column is not None}
    # A line of tabs is an example without text, which is counted, not a blank line.
    return read_examples(cfg, partial(numbered_lines, blank=" "), lambda line: _tsv_example(line, columns))


def _tsv_example(line: str, columns: dict[str, int]) -> Example:
    values, needed = line.split("\t"), max(columns.values()) + 1
    if len(values) < needed:
        settings = " and ".join(f"{field}={column}" for field, column in columns.items())
        raise MalformedError(
            f"{len(values)} tab-separated columns, but {settings} (counted from 0) need {needed}: "
            f"add the missing column, or change {' and '.join(columns)}"
        )
    return example_from_fields({field: values[column] for field, column in columns.items()}, NAMES)


# ---------------------------------------------------------------- CoNLL
def open_conll(cfg: ConllSource) -> Documents:
    return read_examples(cfg, _sentences, lambda sentence: _tagged_words(sentence, cfg))


def _sentences(path: Path) -> Iterator[tuple[int, Sentence]]:
    """The sentences of a file with the number of their first line; blank lines and new documents separate them."""
    numbered = enumerate(read_lines(path), start=1)
    for is_sentence, lines in groupby(numbered, lambda item: not _is_separator(item[1])):
        if is_sentence:
            sentence = list(lines)
            yield sentence[0][0], sentence


def _is_separator(line: str) -> bool:
    return not line.strip() or line.startswith(DOCUMENT_START)


def _tagged_words(sentence: Sentence, cfg: ConllSource) -> Example:
    # Only spaces and tabs separate columns: a word may contain a no-break space.
    rows = [(number, re.split("[ \t]+", line.strip(" \t"))) for number, line in sentence]
    # The columns of word and tag must exist, and not be the same one counted from both ends.
    needed = max(2, *(column + 1 if column >= 0 else -column for column in (cfg.word, cfg.tag)))
    short = [(number, len(columns)) for number, columns in rows if len(columns) < needed]
    if short:
        raise MalformedError(
            f"{short[0][1]} column{'s' * (short[0][1] != 1)}, but word={cfg.word} and tag={cfg.tag} need {needed}: "
            "add the missing column, or change word and tag",
            [number for number, _ in short],
        )
    return {"text": [columns[cfg.word] for _, columns in rows], "tags": [columns[cfg.tag] for _, columns in rows]}
