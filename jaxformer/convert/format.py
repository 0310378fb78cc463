"""One Hugging Face model type: how its config.json is read and written, and its table of tensor names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxformer.config import ModelConfig
from jaxformer.convert.fields import Fields
from jaxformer.convert.tables import Entry

Shape = Literal["encoder-decoder", "decoder-only", "encoder-only"]


class ModelFiles(NamedTuple):
    """Information that `Format.read` gets in addition to the fields of config.json."""

    architecture: str
    tensor_names: frozenset[str]
    """Names of the tensors in the weight files. T5, for example, has tied embeddings if `lm_head.weight` is absent."""


@dataclass(frozen=True)
class Format:
    model_type: str
    architectures: tuple[str, ...]
    """Supported values of `architectures` in config.json."""
    read: Callable[[Fields, ModelFiles], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    """Returns the fields of config.json, including `architectures`. A format can represent a model if `read` turns
    these fields back into the same model."""
    shape: Shape
    entries: tuple[Entry, ...] | Callable[[ModelConfig], tuple[Entry, ...]]
    """The table of tensor names, or a function that builds it if the names depend on the model config."""
    base: str = ""
    """Prefix of the tensor names in a model with a head, such as `bert.`; the class `bare` has no prefix."""
    bare: str | None = None
    """Name of the class whose tensor names have no prefix, such as `BertModel`; None if it is not supported."""
    copies: Mapping[str, str] | Callable[[ModelConfig], Mapping[str, str]] = field(default_factory=dict)
    """Redundant copies of tied weights: the name of each copy, and of the tensor that it must equal; or a function of
    the model config."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for tensors that are not loaded: constant buffers, and heads of other architectures."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old tensor name suffixes, such as `.gamma`, and their current names."""
    tokenizer_class: str | None = None
    """The class that AutoTokenizer always uses for this model type; None if the tokenizer's files choose the class."""

    def table(self, model: ModelConfig) -> tuple[Entry, ...]:
        return self.entries(model) if callable(self.entries) else self.entries

    def tied(self, model: ModelConfig) -> Mapping[str, str]:
        return self.copies(model) if callable(self.copies) else self.copies

    def base_of(self, architecture: str) -> str:
        return "" if architecture == self.bare else self.base
