"""Objective configs: the keys of each training objective and the model shapes it trains.

The implementation is in `objectives/`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from jaxformer.config.base import Config
from jaxformer.config.model import ModelShape


class ObjectiveConfig(Config):
    """Base class of objective configs."""

    shapes: ClassVar[tuple[ModelShape, ...]]
    """Model shapes that the objective can train."""

    @property
    def source_length(self) -> int:
        """Tokens per encoder row of an encoder-decoder; 0 for other model shapes."""
        return 0


class Causal(ObjectiveConfig):
    """Causal language modelling: predict every next token of a document and the eos that ends it."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("decoder-only",)
    kind: Literal["causal"] = "causal"


class Seq2Seq(ObjectiveConfig):
    """Sequence to sequence: predict the target text and the eos that ends it from the source text of a pair."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder",)
    kind: Literal["seq2seq"] = "seq2seq"
    input_length: PositiveInt
    """Tokens per encoder row; `data.length` is the number of tokens per decoder row."""

    @property
    def source_length(self) -> int:
        return self.input_length


OBJECTIVE_CONFIGS: tuple[type[ObjectiveConfig], ...] = (Causal, Seq2Seq)
Objective = Annotated[Causal | Seq2Seq, Field(discriminator="kind")]
