"""Reads examples from the lines of files, and reports malformed lines and lines without text.

Files are read into memory completely. Every example knows its file and line, so that later messages can name them.
"""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

from jaxformer.config.data import Paths
from jaxformer.data.sources.examples import Example, MalformedError, check_not_empty, check_same_fields, has_text
from jaxformer.data.sources.textfiles import unique_files
from jaxformer.errors import UserError

log = logging.getLogger(__name__)

SHOWN = 5  # line numbers in a message

Record = TypeVar("Record")


class LineSource(Protocol):
    """The config of a source that may skip malformed lines."""

    kind: str
    paths: Paths
    max_malformed: int


class LineExamples(Sequence[Example]):
    """Examples in memory with the files and lines that they come from."""

    def __init__(self) -> None:
        self._examples: list[Example] = []
        self._lines = array("Q")
        self._paths: list[Path] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    def where(self, index: int) -> str:
        """The file and line of an example."""
        return f"{self._paths[bisect_right(self._starts, index) - 1]}:{self._lines[index]}"

    def begin_file(self, path: Path) -> None:
        self._paths.append(path)
        self._starts.append(len(self._examples))

    def append(self, example: Example, line: int) -> None:
        self._examples.append(example)
        self._lines.append(line)


class Tally:
    """Counts lines and remembers the first of them."""

    def __init__(self) -> None:
        self.count, self.first, self.reason = 0, [], ""

    def add(self, path: Path, lines: Sequence[int], reason: str = "") -> None:
        self.reason = self.reason or reason
        self.first += [f"{path}:{line}" for line in lines[: SHOWN - len(self.first)]]
        self.count += len(lines)

    @property
    def places(self) -> str:
        """The first places; a file is named only once."""
        shown, previous = [], ""
        for place in self.first:
            path, _, line = place.rpartition(":")
            shown.append(line if path == previous else place)
            previous = path
        return ", ".join(shown + ["..."] * (self.count > len(self.first)))


def read_examples(
    cfg: LineSource, records: Callable[[Path], Iterable[tuple[int, Record]]], parse: Callable[[Record], Example]
) -> LineExamples:
    """Read the examples of all files.

    Args:
      records: returns the records of a file with their line numbers.
      parse: makes an example of a record; raises `MalformedError` if it cannot.
    """
    examples, malformed, blank = LineExamples(), Tally(), Tally()
    first: Example | None = None
    for path in unique_files(cfg.paths):
        examples.begin_file(path)
        num_records = 0
        for line, record in records(path):
            num_records += 1
            try:
                example = parse(record)
                first = first or example
                check_same_fields(example, first)
            except MalformedError as error:
                malformed.add(path, error.lines or (line,), str(error))
                continue
            if has_text(example):
                examples.append(example, line)
            else:
                blank.add(path, (line,))
        check_not_empty(path, num_records)
    _check_malformed(malformed, cfg)
    report_blank(cfg.kind, blank.count, blank.places)
    return examples


def report_blank(kind: str, count: int, places: str) -> None:
    """Warn about examples that are skipped because they have no text, or because one text of a pair is empty."""
    if count:
        what = "examples that have" if count > 1 else "example that has"
        _warn_once(f"the {kind} source: skipped {count:,} {what} no text ({places})")


def _check_malformed(malformed: Tally, cfg: LineSource) -> None:
    """Raise if there are more malformed lines than the source allows; warn if there are any."""
    if not malformed.count:
        return
    lines = f"{malformed.count:,} malformed line{'s' * (malformed.count != 1)}"
    if malformed.count <= cfg.max_malformed:
        _warn_once(f"skipped {lines} ({malformed.places}); the first: {malformed.reason}")
        return
    message = f"{malformed.first[0]}: {malformed.reason}"
    if malformed.count > 1:
        message += (
            f"\n{lines} ({malformed.places}), but the {cfg.kind} source allows max_malformed={cfg.max_malformed}: "
            f"correct them, or set max_malformed={malformed.count} of the source to skip them"
        )
    raise UserError(message)


@cache  # one run opens a source several times, for example to train the tokenizer
def _warn_once(message: str) -> None:
    log.warning("%s", message)
