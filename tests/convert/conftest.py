"""Tiny models of every format, written by transformers once per session."""

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
def sample_dir(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the directory of a sample, which tests must not modify."""
    root = tmp_path_factory.mktemp("samples")

    @cache
    def directory(name: str) -> Path:
        SAMPLES[name].save(root / name)
        return root / name

    return directory


@pytest.fixture(scope="session")
def sample_run(sample_dir) -> Callable[[str], Run]:
    return cache(lambda name: load(sample_dir(name)))


class Directory:
    """A Hugging Face directory that a test may modify."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "model.safetensors"

    def set(self, **fields: Any) -> None:
        """Change fields of config.json; the value `...` removes a field."""
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
        weight_map = {}
        for i in range(num_files):
            file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
            save_file({name: tensors[name] for name in names[i::num_files]}, self.path / file)
            weight_map |= {name: file for name in names[i::num_files]}
        self.weights.unlink()
        self.index(weight_map)
        return weight_map

    def index(self, weight_map: dict[str, str]) -> None:
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def copy_sample(sample_dir, tmp_path) -> Callable[[str], Directory]:
    """Returns a copy of a sample, which a test may modify."""

    def copy(name: str) -> Directory:
        return Directory(Path(shutil.copytree(sample_dir(name), tmp_path / "source" / name.replace(" ", "-"))))

    return copy
