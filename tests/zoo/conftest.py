"""Tiny transformers models of every format and the runs imported from them, each created once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxformer.config import ModelConfig
from jaxformer.convert import SAMPLES
from jaxformer.run import Run, load


class Pair(NamedTuple):
    """The same weights in transformers and in jaxformer."""

    directory: Path
    theirs: Any
    run: Run

    @property
    def config(self) -> ModelConfig:
        return self.run.config.model


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Returns a sample by name, saved by transformers and loaded by jaxformer."""

    @cache
    def make(name: str) -> Pair:
        directory = tmp_path_factory.mktemp("sample")
        theirs = SAMPLES[name].save(directory)
        return Pair(directory, theirs, load(directory))

    return make
