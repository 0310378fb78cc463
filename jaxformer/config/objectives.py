"""Training objectives as data: their keys and the model shapes they train. Behaviour lives in `objectives/`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from jaxformer.config.base import Config
from jaxformer.config.model import ModelShape


class ObjectiveConfig(Config):
    """What every objective declares."""

    shapes: ClassVar[tuple[ModelShape, ...]]
    """The model shapes that it trains."""

    @property
    def source_length(self) -> int:
        """Length of the rows an encoder-decoder's encoder reads; 0 without one."""
        return 0


class Causal(ObjectiveConfig):
    """Predict every next token of a document, ended by eos."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("decoder-only",)
    kind: Literal["causal"] = "causal"


class Seq2Seq(ObjectiveConfig):
    """Predict `targets`, ended by eos, from `inputs`, ended by eos."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder",)
    kind: Literal["seq2seq"] = "seq2seq"
    input_length: PositiveInt
    """Length of the encoder's rows; `data.length` is the decoder's."""

    @property
    def source_length(self) -> int:
        return self.input_length


OBJECTIVE_CONFIGS: tuple[type[ObjectiveConfig], ...] = (Causal, Seq2Seq)
Objective = Annotated[Causal | Seq2Seq, Field(discriminator="kind")]
