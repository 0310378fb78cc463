"""Examples from text, JSONL, TSV and ArrayRecord files, and examples written in the config.

Text, JSONL and TSV files are read into memory completely; larger corpora belong in ArrayRecord files, which are read
one record at a time. Invalid files and lines are never skipped: they raise an error that names the file and line.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from jaxformer.config import ArrayRecordSource, JsonlSource, MemorySource, TextSource, TsvSource
from jaxformer.data.sources.records import open_records, read_record
from jaxformer.data.sources.textfiles import numbered_lines, read_text, unique_files
from jaxformer.errors import UserError

Example = dict[str, str]
Documents = Sequence[Example]


# ---------------------------------------------------------------- text
def open_text(cfg: TextSource) -> Documents:
    return [{"text": text} for path in unique_files(cfg.paths) for text in _texts(path, cfg.document)]


def _texts(path: Path, document: str) -> list[str]:
    texts = [text for text in SPLITTERS[document](read_text(path)) if text.strip()]
    if not texts:
        raise UserError(f"{path}: the file is empty: add text or remove it from paths")
    return texts


def _paragraphs(text: str) -> list[str]:
    return [paragraph.strip("\n") for paragraph in re.split(r"\n(?:[ \t]*\n)+", text)]


SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "file": lambda text: [text],
    "line": lambda text: text.split("\n"),
    "paragraph": _paragraphs,
}


# ---------------------------------------------------------------- JSON records
def open_jsonl(cfg: JsonlSource) -> Documents:
    examples: list[Example] = []
    for path in unique_files(cfg.paths):
        before = len(examples)
        for number, line in numbered_lines(path):
            example = _json_example(line, cfg, f"{path}:{number}")
            _check_same_kind(example, examples[0] if examples else example, f"{path}:{number}")
            examples.append(example)
        _check_not_empty(path, len(examples) - before)
    return [example for example in examples if _has_text(example)]


class RecordDocuments(Sequence[Example]):
    """The records of several ArrayRecord files, read and parsed lazily."""

    def __init__(self, cfg: ArrayRecordSource):
        self._cfg = cfg
        self._paths = unique_files(cfg.paths)
        self._files = [open_records(path) for path in self._paths]
        self._ends = list(accumulate(len(file) for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        example, where = self._read(index)
        _check_same_kind(example, self._read(0)[0], where)
        return example

    def _read(self, index: int) -> tuple[Example, str]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect_right(self._ends, index)
        record = index - (self._ends[file] - len(self._files[file]))
        path = self._paths[file]
        where = f"{path}, record {record}"
        return _json_example(read_record(self._files[file], record, path), self._cfg, where), where


def _json_example(record: str | bytes, cfg: JsonlSource | ArrayRecordSource, where: str) -> Example:
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where}: expected a JSON object with named fields, found {type(fields).__name__}")
    for names in ({"text": cfg.text}, {"inputs": cfg.inputs, "targets": cfg.targets}):
        if all(name in fields for name in names.values()):
            return {key: _string(fields[name], name, where) for key, name in names.items()}
    present = ", ".join(map(repr, fields)) or "none"
    raise UserError(
        f"{where}: no field '{cfg.text}', nor both '{cfg.inputs}' and '{cfg.targets}'; found: {present}: "
        "set text=, or inputs= and targets=, of the source to the names of the fields"
    )


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: field '{name}' is {type(value).__name__}, expected a string")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise UserError(
            f"{where}: field '{name}' holds an unpaired surrogate, which is not valid text: correct the escape"
        )
    return value


def _check_same_kind(example: Example, first: Example, where: str) -> None:
    if example.keys() != first.keys():
        raise UserError(
            f"{where}: has {' and '.join(example)} but the source began with {' and '.join(first)}: "
            "a source holds plain texts or pairs, not both"
        )


# ---------------------------------------------------------------- pairs and memory
def open_tsv(cfg: TsvSource) -> Documents:
    examples: list[Example] = []
    for path in unique_files(cfg.paths):
        before = len(examples)
        examples += (_tsv_example(line, cfg, f"{path}:{number}") for number, line in numbered_lines(path))
        _check_not_empty(path, len(examples) - before)
    return [example for example in examples if _has_text(example)]


def _tsv_example(line: str, cfg: TsvSource, where: str) -> Example:
    columns = line.split("\t")
    needed = max(cfg.inputs, cfg.targets) + 1
    if len(columns) < needed:
        raise UserError(
            f"{where}: {len(columns)} tab-separated columns, but inputs={cfg.inputs} and targets={cfg.targets} "
            f"(counted from 0) need {needed}: add the missing column, or change inputs and targets"
        )
    return {"inputs": columns[cfg.inputs], "targets": columns[cfg.targets]}


def open_memory(cfg: MemorySource) -> Documents:
    examples = [{"text": text} for text in cfg.documents]
    examples += [{"inputs": inputs, "targets": targets} for inputs, targets in cfg.pairs]
    return [example for example in examples if _has_text(example)]


def _has_text(example: Example) -> bool:
    return any(value.strip() for value in example.values())


def _check_not_empty(path: Path, num_examples: int) -> None:
    if not num_examples:
        raise UserError(f"{path}: the file is empty: add text or remove it from paths")
