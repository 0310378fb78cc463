"""Evaluation metrics as data: their keys and the values they report. Behaviour lives in `evaluate/`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from jaxformer.config.base import Config
from jaxformer.config.model import ModelShape

Every = PositiveInt | Literal["end"] | None


class MetricConfig(Config):
    """What every metric declares."""

    values: ClassVar[Mapping[str, Literal["min", "max"]]]
    """Names of the values it reports, and whether lower or higher is better."""
    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder", "decoder-only", "encoder-only")
    """The model shapes that it can measure."""

    every: Every = None
    """Steps between evaluations during training; `end` evaluates only after training, none follows evaluate.every."""


class Perplexity(MetricConfig):
    """Held-out loss, perplexity, token accuracy and bits per byte."""

    values: ClassVar[Mapping[str, Literal["min", "max"]]] = {
        "heldout_loss": "min",
        "heldout_perplexity": "min",
        "heldout_accuracy": "max",
        "heldout_bits_per_byte": "min",
    }
    kind: Literal["perplexity"] = "perplexity"
    batches: PositiveInt | None = None
    """Held-out batches per evaluation; none follows evaluate.batches."""


class ExactMatch(MetricConfig):
    """Share of held-out pairs whose greedy output equals the target."""

    values: ClassVar[Mapping[str, Literal["min", "max"]]] = {"exact_match": "max"}
    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder",)
    kind: Literal["exact_match"] = "exact_match"
    every: Every = "end"
    num_examples: PositiveInt = 1000
    """Decode at most this many held-out pairs."""


Metric = Annotated[Perplexity | ExactMatch, Field(discriminator="kind")]
