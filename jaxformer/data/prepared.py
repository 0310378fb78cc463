"""Prepared sets: packed once into ArrayRecord files, then opened by every host and after every restart.

A prepared directory holds `train.array_record`, `heldout.array_record` if the config has a held-out source,
the tokenizer, and `meta.json`, which is written last: without it the directory counts as not prepared.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.packing import Layout, Objective
from jaxformer.data.sets import PackedSet, Sets, build_set, build_sets
from jaxformer.data.sources.records import open_records, read_record, write_records
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.rundir import write_json

META_FILE = "meta.json"
FORMAT = 1  # raise when a record's layout changes
# What decides the content of the sets; batch size, seed and workers do not.
FIELDS = ("train", "heldout", "objective", "length", "pack")


class RecordFile:
    """The records of a set, kept in an ArrayRecord file."""

    def __init__(self, path: Path, width: int):
        self._path, self._width = path, width
        self._file = open_records(path)

    def __len__(self) -> int:
        return len(self._file)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        # One by one: the reader's own batch call starts threads that cost more than they save.
        data = b"".join(read_record(self._file, int(i), self._path) for i in indices)
        return np.frombuffer(data, "<i4").reshape(len(indices), self._width)


def prepare(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> Sets:
    """Tokenise and pack both sets into a directory, and open them."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / META_FILE).unlink(missing_ok=True)
    tokenizer.save(directory)
    counts = {}
    for name, source in _sources(cfg).items():
        packed = build_set(cfg, objective, tokenizer, source)
        write_records(directory / f"{name}.array_record", _serialised(packed))
        counts[name] = {"rows": len(packed), "tokens": packed.num_tokens, "bytes": packed.num_bytes}
    write_json(directory / META_FILE, {"settings": _settings(cfg, tokenizer), "sets": counts})
    return open_prepared(cfg, objective, tokenizer, directory)


def open_prepared(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> Sets:
    """The sets of a prepared directory, if it was prepared from the same config and tokenizer."""
    directory = Path(directory)
    meta = _read_meta(directory)
    _check_settings(meta.get("settings", {}), _settings(cfg, tokenizer), directory)
    sets = {name: _open_set(directory, name, meta["sets"][name], objective.layout) for name in _sources(cfg)}
    return Sets(sets["train"], sets.get("heldout"))


def load_sets(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> Sets:
    """The prepared sets of a directory if it holds some, else sets built in memory."""
    prepared = (Path(directory) / META_FILE).is_file()
    return open_prepared(cfg, objective, tokenizer, directory) if prepared else build_sets(cfg, objective, tokenizer)


def load_heldout(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> PackedSet:
    """The held-out set alone, prepared or built in memory."""
    if (Path(directory) / META_FILE).is_file():
        return open_prepared(cfg, objective, tokenizer, directory).heldout
    return build_set(cfg, objective, tokenizer, cfg.heldout)


def _sources(cfg: DataConfig) -> dict[str, Any]:
    return {"train": cfg.train} if cfg.heldout is None else {"train": cfg.train, "heldout": cfg.heldout}


def _serialised(packed: PackedSet) -> Iterator[bytes]:
    return (packed.records.read([i])[0].astype("<i4").tobytes() for i in range(len(packed)))


def _open_set(directory: Path, name: str, counts: dict[str, int], layout: Layout) -> PackedSet:
    path = directory / f"{name}.array_record"
    records = RecordFile(path, layout.width)
    if len(records) != counts["rows"]:
        raise UserError(f"{path}: {len(records)} rows, but {META_FILE} says {counts['rows']}: prepare the data again")
    return PackedSet(records, layout, counts["tokens"], counts["bytes"])


# ---------------------------------------------------------------- meta.json
def _settings(cfg: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything the records depend on, by its name in the config."""
    fields = cfg.model_dump(mode="json", include=set(FIELDS))
    return {"format": FORMAT, "tokenizer": tokenizer.digest} | {f"data.{name}": fields[name] for name in FIELDS}


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / META_FILE
    if not path.is_file():
        raise UserError(f"'{directory}' holds no prepared data: run jaxformer prepare first")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}): prepare the data again") from None


def _check_settings(found: dict[str, Any], wanted: dict[str, Any], directory: Path) -> None:
    differing = [
        f"  {name}: prepared with {json.dumps(found.get(name))}, now {json.dumps(value)}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differing:
        raise UserError(
            f"'{directory}' was prepared from something else: prepare the data again or restore\n"
            + "\n".join(differing)
        )
