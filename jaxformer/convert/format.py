"""What one Hugging Face architecture is: how its config.json reads, how it is written, and its table of names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxformer.config import ModelConfig
from jaxformer.convert.fields import Fields
from jaxformer.convert.tables import Entry

Shape = Literal["encoder-decoder", "decoder-only", "encoder-only"]


class Found(NamedTuple):
    """What a reader may look at besides the fields."""

    architecture: str
    names: frozenset[str]
    """Of the tensors in the files: some choices are visible in them alone."""


@dataclass(frozen=True)
class Format:
    model_type: str
    family: str
    """Whose presets have this format, as in `models.FAMILIES`."""
    architectures: tuple[str, ...]
    """Class names in config.json that we can read."""
    read: Callable[[Fields, Found], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    """Fields of config.json, `architectures` among them; `read` decides whether they say the same."""
    shape: Shape
    entries: tuple[Entry, ...] | Callable[[ModelConfig], tuple[Entry, ...]]
    """The table of names, or how to make it where names depend on the model."""
    base: str = ""
    """Prefix that names have in a model with a head and lack in the bare one."""
    bare: str | None = None
    """The architecture without a head."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that repeat another one where weights are tied; they must be equal to it."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are not part of the model: constants, heads not asked for."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Older spellings of name endings."""
    tokenizer_class: str | None = None
    """What AutoTokenizer takes whatever the tokenizer's files say; none where it does as they say."""

    def table(self, model: ModelConfig) -> tuple[Entry, ...]:
        return self.entries(model) if callable(self.entries) else self.entries

    def base_of(self, architecture: str) -> str:
        return "" if architecture == self.bare else self.base
