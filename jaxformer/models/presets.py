"""What a family file publishes: presets with their parameter counts, grouped into rows of the zoo table.

A count comes from a source outside this repository, which a comment beside it names. Two sources have short names
there: "the hub" is `safetensors.total` of a model on huggingface.co, and "Keras" is `params` of the presets in
github.com/keras-team/keras-hub.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxformer.config import ModelConfig


class Preset(NamedTuple):
    """A published model."""

    num_params: int
    """The published parameter count: tied weights count once, and what is not trained (sinusoids, rotary tables,
    position ids) is left out."""
    build: Callable[[], ModelConfig]
    """Deferred, so that importing a family validates no configs."""


class ZooRow(NamedTuple):
    """One row of the zoo table. A family has one for each of its architectures."""

    title: str
    presets: Mapping[str, Preset]
    """Presets by name. Every name begins with that of the family file."""
