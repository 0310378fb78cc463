"""Tiny models of every format, written by transformers once a session."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer.convert import SAMPLES
from jaxformer.run import Run, load


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    """The directory of a sample; not to be changed."""
    root = tmp_path_factory.mktemp("samples")

    @cache
    def directory(name: str) -> Path:
        SAMPLES[name].save(root / name)
        return root / name

    return directory


@pytest.fixture(scope="session")
def loaded(saved) -> Callable[[str], Run]:
    return cache(lambda name: load(saved(name)))


class Directory:
    """A Hugging Face directory to be spoilt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "model.safetensors"

    def set(self, **fields: Any) -> None:
        """Change config.json; `...` takes a field out."""
        values = json.loads((self.path / "config.json").read_text()) | fields
        kept = {name: value for name, value in values.items() if value is not ...}
        (self.path / "config.json").write_text(json.dumps(kept))

    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(self.weights)

    def put(self, tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, self.weights, {"format": "pt"})

    def shard(self, num_files: int = 2) -> dict[str, str]:
        """Split the weights over several files with an index; returns the index."""
        tensors = self.tensors()
        names = sorted(tensors)
        listed = {}
        for i in range(num_files):
            file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
            save_file({name: tensors[name] for name in names[i::num_files]}, self.path / file)
            listed |= {name: file for name in names[i::num_files]}
        self.weights.unlink()
        self.index(listed)
        return listed

    def index(self, listed: dict[str, str]) -> None:
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


@pytest.fixture
def copied(saved, tmp_path) -> Callable[[str], Directory]:
    """A sample of one's own."""

    def copy(name: str) -> Directory:
        return Directory(Path(shutil.copytree(saved(name), tmp_path / "source" / name.replace(" ", "-"))))

    return copy
