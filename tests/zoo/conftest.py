"""Tiny transformers models of every format beside what we import of them, each made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxformer.config import ModelConfig
from jaxformer.convert import SAMPLES
from jaxformer.run import Run, load


class Pair(NamedTuple):
    """The same weights on both sides."""

    directory: Path
    theirs: Any
    run: Run

    @property
    def config(self) -> ModelConfig:
        return self.run.config.model


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A sample by name, saved by transformers and read by us."""

    @cache
    def make(name: str) -> Pair:
        directory = tmp_path_factory.mktemp("sample")
        theirs = SAMPLES[name].save(directory)
        return Pair(directory, theirs, load(directory))

    return make
