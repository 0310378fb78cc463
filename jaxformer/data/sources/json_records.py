"""Examples from JSON objects: the lines of JSONL files and the records of ArrayRecord files."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from jaxformer.config import ArrayRecordSource, JsonlSource
from jaxformer.data.sources.examples import (
    FIELDS,
    Documents,
    Example,
    MalformedError,
    check_same_fields,
    example_from_fields,
)
from jaxformer.data.sources.lines import read_examples
from jaxformer.data.sources.records import open_records, read_record
from jaxformer.data.sources.textfiles import numbered_lines, unique_files
from jaxformer.errors import UserError


def open_jsonl(cfg: JsonlSource) -> Documents:
    names = _field_names(cfg)
    return read_examples(cfg, numbered_lines, lambda line: _json_example(line, names))


class RecordDocuments(Sequence[Example]):
    """The records of several ArrayRecord files, read and parsed lazily."""

    def __init__(self, cfg: ArrayRecordSource):
        self._names = _field_names(cfg)
        self._paths = unique_files(cfg.paths)
        self._files = [open_records(path) for path in self._paths]
        self._ends = list(accumulate(len(file) for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        try:
            example = self._read(index)
            check_same_fields(example, self._read(0))
        except MalformedError as error:
            raise UserError(f"{self.where(index)}: {error}") from None
        return example

    def where(self, index: int) -> str:
        """The file and the number of a record."""
        file, record = self._find(index)
        return f"{self._paths[file]}, record {record}"

    def _read(self, index: int) -> Example:
        file, record = self._find(index)
        return _json_example(read_record(self._files[file], record, self._paths[file]), self._names)

    def _find(self, index: int) -> tuple[int, int]:
        """The file that holds a record, and the number of the record in that file."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect_right(self._ends, index)
        return file, index - (self._ends[file] - len(self._files[file]))


def _field_names(cfg: JsonlSource | ArrayRecordSource) -> dict[str, str]:
    """The name that each field has in JSON objects; fields that are not read are left out."""
    names = {field: getattr(cfg, field) for field in FIELDS}
    return {field: name for field, name in names.items() if name is not None}


def _json_example(record: str | bytes, names: dict[str, str]) -> Example:
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise MalformedError(f"expected a JSON object with named fields, found {type(fields).__name__}")
    return example_from_fields(fields, names)
