"""Examples from text files, and examples written in the config.

Text files are read into memory completely; larger corpora belong in ArrayRecord files, which are read one record at a
time. An invalid file is never skipped: it raises an error that names it.
"""

import re
from collections.abc import Callable
from pathlib import Path

from jaxformer.config import MemorySource, TextSource
from jaxformer.data.sources.examples import (
    FIELDS,
    Documents,
    Malformed,
    check_not_empty,
    check_same_fields,
    example_from_fields,
    has_text,
)
from jaxformer.data.sources.lines import Tally, report_blank
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


SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "file": lambda text: [text],
    "line": lambda text: text.split("\n"),
    "paragraph": _paragraphs,
}
