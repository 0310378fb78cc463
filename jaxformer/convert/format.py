"""One Hugging Face model type: how its config.json is read and written, and its table of tensor names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxformer.config import ModelConfig
from jaxformer.convert.fields import Fields
from jaxformer.convert.tables import Entry

Shape = Literal["encoder-decoder", "decoder-only", "encoder-only"]


class ModelFiles(NamedTuple):
    """What a reader may use besides the fields of config.json."""

    architecture: str
    tensor_names: frozenset[str]
    """Names of the tensors in the weight files: some choices, such as a tied output, show only there."""


@dataclass(frozen=True)
class Format:
    model_type: str
    architectures: tuple[str, ...]
    """Class names in config.json that can be read."""
    read: Callable[[Fields, ModelFiles], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    """Returns the fields of config.json, including `architectures`. A format can hold a model if `read` turns these
    fields back into the same model."""
    shape: Shape
    entries: tuple[Entry, ...] | Callable[[ModelConfig], tuple[Entry, ...]]
    """The table of tensor names, or a function that makes it where names depend on the model."""
    base: str = ""
    """Prefix that tensor names have in a model with a head and lack in the bare model."""
    bare: str | None = None
    """The architecture without a head."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that must equal another one where weights are tied, and the name of that other one."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensor names that are not part of the model: constants, and heads of other architectures."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Suffixes of tensor names in older files, and what they are called now."""
    tokenizer_class: str | None = None
    """The class that AutoTokenizer uses regardless of the tokenizer's files; none where it follows the files."""

    def table(self, model: ModelConfig) -> tuple[Entry, ...]:
        return self.entries(model) if callable(self.entries) else self.entries

    def base_of(self, architecture: str) -> str:
        return "" if architecture == self.bare else self.base
