"""ArrayRecord files: written whole or not at all, opened for random access."""

from collections.abc import Iterable
from pathlib import Path

from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from jaxformer.errors import UserError


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Write one file; the name appears only when the content is complete."""
    partial = path.with_name(path.name + ".partial")
    writer = ArrayRecordWriter(str(partial), "group_size:1")  # larger groups decompress neighbours on every read
    try:
        for record in records:
            writer.write(record)
    finally:
        writer.close()
    partial.replace(path)


def open_records(path: Path) -> ArrayRecordDataSource:
    """One file, not empty."""
    try:
        records = ArrayRecordDataSource([str(path)])
    except RuntimeError as error:
        raise UserError(f"{path}: not a readable ArrayRecord file ({error}): write it again") from None
    if not len(records):
        raise UserError(f"{path}: the file holds no records: fill it or take it out of the config")
    return records


def read_record(records: ArrayRecordDataSource, index: int, path: Path) -> bytes:
    """One record; a damaged one is the file's fault."""
    try:
        return records[index]
    except RuntimeError as error:
        raise UserError(f"{path}: record {index} is damaged ({error}): write the file again") from None
