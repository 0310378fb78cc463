"""The run directory: the paths of its files, and atomic writes.

Paths are `etils.epath` paths, so that a run directory may be in an object store. Only the main process writes.
"""

import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from etils import epath

from jaxformer import hosts
from jaxformer.config import RunConfig, dump_config, parse_config
from jaxformer.errors import UserError

CONFIG_FILE = "config.json"


class RunDir:
    """Paths and files of one run."""

    def __init__(self, path: epath.PathLike) -> None:
        self.path = epath.Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def checkpoints(self) -> epath.Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> epath.Path:
        """The prepared data, if `jaxformer prepare` has written it."""
        return self.path / "data"

    @property
    def metrics(self) -> epath.Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> epath.Path:
        return self.path / "tensorboard"

    @property
    def evaluation(self) -> epath.Path:
        """The values of the latest evaluation."""
        return self.path / "evaluation.json"

    @property
    def average(self) -> epath.Path:
        """The run and the steps that the parameters are averages of; only written by `jaxformer average`."""
        return self.path / "average.json"

    # ------------------------------------------------------------ config.json
    @property
    def has_config(self) -> bool:
        return (self.path / CONFIG_FILE).exists()

    def read_config(self) -> RunConfig:
        """The config of the run; executes no code."""
        file = self.path / CONFIG_FILE
        if not file.exists():
            raise UserError(f"'{self.path}' is not a run directory: it has no {CONFIG_FILE}")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not valid JSON ({error})") from None
        return parse_config(text, str(file))

    def write_config(self, config: RunConfig) -> None:
        write_json(self.path / CONFIG_FILE, dump_config(config))

    # ------------------------------------------------------------ evaluation.json
    def read_evaluation(self) -> dict[str, Any]:
        return json.loads(self.evaluation.read_text(encoding="utf-8")) if self.evaluation.exists() else {}

    def write_evaluation(self, step: int, metrics: Mapping[str, float | str]) -> None:
        write_json(self.evaluation, {"step": step, **json_values(metrics)})

    # ------------------------------------------------------------ the directory itself
    def make(self) -> None:
        if hosts.is_main():
            self.path.mkdir(parents=True, exist_ok=True)

    def check_writable(self) -> None:
        """Raise if the directory cannot be created or written to."""
        if "://" in str(self.path):
            return  # the permissions of an object store are only known when it is written to
        existing = existing_parent(self.path)
        if not existing.is_dir():
            raise UserError(f"workdir '{self.path}': '{existing}' is a file, choose another with workdir=...")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(
                f"workdir '{self.path}': no permission to write in '{existing}', choose another with workdir=..."
            )


def existing_parent(path: epath.PathLike) -> epath.Path:
    """The path itself if it exists, otherwise its nearest existing parent."""
    path = epath.Path(os.path.abspath(path))
    while not path.exists():
        path = path.parent
    return path


def write_file(path: epath.PathLike, content: bytes) -> epath.Path:
    """Write a file atomically: a reader sees the old or the new content, never a part of it."""
    path = epath.Path(path)
    if hosts.is_main():
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def json_values(metrics: Mapping[str, float | str]) -> dict[str, float | str | None]:
    """Metric values with null for NaN and infinity, because JSON has no notation for them."""
    finite = {name: isinstance(value, str) or math.isfinite(value) for name, value in metrics.items()}
    return {name: value if finite[name] else None for name, value in metrics.items()}


def write_json(path: epath.PathLike, tree: Any) -> None:
    write_file(path, (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def new_directory(target: epath.PathLike) -> Iterator[epath.Path]:
    """A temporary directory that is renamed to `target` if the block succeeds, and deleted otherwise."""
    target = epath.Path(target)
    if target.exists() and not target.is_dir():
        raise UserError(f"'{target}' exists and is not a directory: choose another name")
    if target.exists() and any(target.iterdir()):
        raise UserError(f"'{target}' exists and is not empty: choose another name")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    new_parents = _missing_parents(target)
    try:
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise UserError(f"'{target}' cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):
            partial.rmtree(missing_ok=True)
        if not target.exists():
            for parent in new_parents:
                with suppress(OSError):  # another process may have put files there
                    parent.rmdir()


def _missing_parents(path: epath.Path) -> list[epath.Path]:
    return [parent for parent in epath.Path(os.path.abspath(path)).parents if not parent.exists()]
