"""Types that family files use: presets with their parameter counts, grouped into rows of the zoo table.

Every count comes from a source outside this repository, named in a comment next to it. Two sources have short names
in these comments: "the hub" is `safetensors.total` of a model on huggingface.co, and "Keras" is `params` of a preset in
github.com/keras-team/keras-hub.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxformer.config import ModelConfig


class Preset(NamedTuple):
    """A published model."""

    num_params: int
    """The published parameter count: tied weights count once, and arrays that are not trained (sinusoids, rotary
    tables, position ids) do not count."""
    build: Callable[[], ModelConfig]
    """Builds the config; a function, so that importing a family does not validate all of its configs."""


class ZooRow(NamedTuple):
    """One row of the zoo table. A family has one row for each of its architectures."""

    title: str
    presets: Mapping[str, Preset]
    """Presets by name. Every name begins with the name of the family file."""
