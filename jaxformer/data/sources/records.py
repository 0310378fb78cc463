"""ArrayRecord files: atomic writes and random access."""

from collections.abc import Iterable
from pathlib import Path

from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from jaxformer.errors import UserError


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Write one file atomically: it gets its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    # Every read decompresses a whole group, so groups of one record are fastest for random access.
    writer = ArrayRecordWriter(str(partial), "group_size:1")
    try:
        for record in records:
            writer.write(record)
    finally:
        writer.close()
    partial.replace(path)


def open_records(path: Path) -> ArrayRecordDataSource:
    """Open one file; raise if it is empty."""
    try:
        records = ArrayRecordDataSource([str(path)])
    except RuntimeError as error:
        raise UserError(f"{path}: not a readable ArrayRecord file ({error}): write it again") from None
    if not len(records):
        raise UserError(f"{path}: the file holds no records: add records or remove it from the config")
    return records


def read_record(records: ArrayRecordDataSource, index: int, path: Path) -> bytes:
    """Read one record; raise an error that names the file if the record is damaged."""
    try:
        return records[index]
    except RuntimeError as error:
        raise UserError(f"{path}: record {index} is damaged ({error}): write the file again") from None
