"""Prepared sets: tokenised and packed once into ArrayRecord files, which every host opens at every start.

A prepared directory holds `train.array_record`, `heldout.array_record` if the config has a held-out source,
the tokenizer, and `meta.json`, which is written last and so marks a complete directory.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.packing import Layout, Objective
from jaxformer.data.sets import PackedSet, Sets, build_set, build_sets, check_pairs
from jaxformer.data.sources import SplitName
from jaxformer.data.sources.records import open_records, read_record, write_records
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.rundir import write_json

META_FILE = "meta.json"
FORMAT = 1  # increment when the layout of records changes
# The fields of `data` that the records depend on; batch size, seed and workers do not affect them.
FIELDS = ("train", "heldout", "objective", "length", "pack")


class RecordFile:
    """The records of a set in an ArrayRecord file."""

    def __init__(self, path: Path, width: int):
        self._path, self._width = path, width
        self._file = open_records(path)

    def __len__(self) -> int:
        return len(self._file)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        # Records are read one by one, because the reader's batch method starts threads that cost more than they save.
        data = b"".join(read_record(self._file, int(i), self._path) for i in indices)
        return np.frombuffer(data, "<i4").reshape(len(indices), self._width)


def prepare(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> Sets:
    """Tokenise and pack the training and held-out sets into a directory, and open them."""
    check_pairs(cfg)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / META_FILE).unlink(missing_ok=True)
    tokenizer.save(directory)
    counts = {}
    for name in _set_names(cfg):
        packed = build_set(cfg, objective, name)
        write_records(directory / f"{name}.array_record", _record_bytes(packed))
        counts[name] = {"rows": len(packed), "tokens": packed.num_tokens, "bytes": packed.num_bytes}
    write_json(directory / META_FILE, {"settings": _settings(cfg, objective, tokenizer), "sets": counts})
    return open_prepared(cfg, objective, tokenizer, directory)


def open_prepared(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> Sets:
    """Open the sets of a prepared directory; raise if it was prepared with other settings or another tokenizer."""
    directory = Path(directory)
    meta = _read_meta(directory)
    _check_settings(meta.get("settings", {}), _settings(cfg, objective, tokenizer), directory)
    sets = {name: _open_set(directory, name, meta["sets"][name], objective.layout) for name in _set_names(cfg)}
    return Sets(sets["train"], sets.get("heldout"))


def load_sets(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> Sets:
    """Open the prepared sets of a directory, or build them in memory if the directory holds none."""
    prepared = (Path(directory) / META_FILE).is_file()
    return open_prepared(cfg, objective, tokenizer, directory) if prepared else build_sets(cfg, objective)


def load_heldout(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer, directory: str | Path) -> PackedSet:
    """Open the prepared held-out set, or build it in memory without building the training set.

    It is also built in memory if another set was prepared: a run can be evaluated on data that it was not prepared for.
    """
    directory = Path(directory)
    if (directory / META_FILE).is_file():
        stored = _read_meta(directory).get("settings", {})
        if not _differing(stored, _settings(cfg, objective, tokenizer)):
            return open_prepared(cfg, objective, tokenizer, directory).heldout
    return build_set(cfg, objective, "heldout")


def _set_names(cfg: DataConfig) -> tuple[SplitName, ...]:
    return ("train",) if cfg.heldout is None else ("train", "heldout")


def _record_bytes(packed: PackedSet) -> Iterator[bytes]:
    return (packed.records.read([i])[0].astype("<i4").tobytes() for i in range(len(packed)))


def _open_set(directory: Path, name: str, counts: dict[str, int], layout: Layout) -> PackedSet:
    path = directory / f"{name}.array_record"
    records = RecordFile(path, layout.width)
    if len(records) != counts["rows"]:
        raise UserError(f"{path}: {len(records)} rows, but {META_FILE} says {counts['rows']}: prepare the data again")
    return PackedSet(records, layout, counts["tokens"], counts["bytes"])


# ---------------------------------------------------------------- meta.json
def _settings(cfg: DataConfig, objective: Objective, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all settings that the records depend on, by their names in the config."""
    # Sets prepared before `too_long` existed dropped long examples.
    names = FIELDS if cfg.too_long == "drop" else (*FIELDS, "too_long")
    fields = cfg.model_dump(mode="json", include=set(names))
    general = {"format": FORMAT, "tokenizer": tokenizer.digest}
    return general | {f"data.{name}": fields[name] for name in names} | objective.model_settings


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / META_FILE
    if not path.is_file():
        raise UserError(f"'{directory}' holds no prepared data: run jaxformer prepare first")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}): prepare the data again") from None


def _differing(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """A line for every setting that is not the stored one."""
    return [
        f"  {name}: prepared with {json.dumps(stored.get(name))}, now {json.dumps(value)}"
        for name, value in current.items()
        if stored.get(name) != value
    ]


def _check_settings(stored: dict[str, Any], current: dict[str, Any], directory: Path) -> None:
    differing = _differing(stored, current)
    if differing:
        raise UserError(
            f"'{directory}' was prepared with other settings: prepare the data again, or restore these settings\n"
            + "\n".join(differing)
        )
