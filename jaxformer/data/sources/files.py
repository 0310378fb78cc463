"""Examples from text files, and examples written in the config.

Text files are read into memory completely; larger corpora belong in ArrayRecord files, which are read one record at a
time. An invalid file is never skipped: it raises an error that names it.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxformer.config import MemorySource, TextSource
from jaxformer.data.sources.examples import (
    FIELDS,
    Documents,
    Example,
    MalformedError,
    check_not_empty,
    check_same_fields,
    example_from_fields,
    has_text,
)
from jaxformer.data.sources.lines import SHOWN, report_blank
from jaxformer.data.sources.textfiles import read_text, unique_files
from jaxformer.errors import UserError


# ---------------------------------------------------------------- text
def open_text(cfg: TextSource) -> Documents:
    return [{"text": text} for path in unique_files(cfg.paths) for text in _texts(path, cfg.document)]


def _texts(path: Path, document: str) -> list[str]:
    texts = [text for text in SPLITTERS[document](read_text(path)) if text.strip()]
    check_not_empty(path, len(texts))
    return texts


def _paragraphs(text: str) -> list[str]:
    return [paragraph.strip("\n") for paragraph in re.split(r"\n(?:[ \t]*\n)+", text)]


def _sentences(text: str) -> list[str]:
    return [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+|\n", text)]


SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "file": lambda text: [text],
    "line": lambda text: text.split("\n"),
    "paragraph": _paragraphs,
    "sentence": _sentences,
}


# ---------------------------------------------------------------- memory
def open_memory(cfg: MemorySource) -> Documents:
    examples = [{"text": text} for text in cfg.documents]
    examples += [{"inputs": inputs, "targets": targets} for inputs, targets in cfg.pairs]
    examples += [_memory_example(fields, i) for i, fields in enumerate(cfg.examples)]
    for i, example in enumerate(examples):
        try:
            check_same_fields(example, examples[0])
        except MalformedError as error:
            raise UserError(f"examples.{i}: {error}") from None
    blank = [i for i, example in enumerate(examples) if not has_text(example)]
    places = ", ".join(map(str, blank[:SHOWN])) + ", ..." * (len(blank) > SHOWN)
    report_blank(cfg.kind, len(blank), f"index {places}")
    return [example for example in examples if has_text(example)]


def _memory_example(fields: Mapping[str, Any], index: int) -> Example:
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise UserError(f"examples.{index}: unknown field {unknown[0]!r}; there are: {', '.join(FIELDS)}")
    try:
        return example_from_fields(fields, {name: name for name in FIELDS})
    except MalformedError as error:
        raise UserError(f"examples.{index}: {error}") from None
