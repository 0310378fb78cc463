"""Metric configs: the keys of each metric and the values it reports. The computation is in `evaluate/`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from jaxformer.config.base import Config
from jaxformer.config.model import ModelShape

Every = PositiveInt | Literal["end"] | None


class MetricConfig(Config):
    """Base class of metric configs."""

    values: ClassVar[Mapping[str, Literal["min", "max"]]]
    """Names of the reported values, and whether lower or higher is better."""
    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder", "decoder-only", "encoder-only")
    """Model shapes that the metric supports."""

    every: Every = None
    """Steps between evaluations of this metric, or `end`: only after the last step. None: `evaluate.every`."""


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
    """Held-out batches per evaluation. None: `evaluate.batches`."""


class ExactMatch(MetricConfig):
    """Fraction of held-out pairs whose greedy output equals the target."""

    values: ClassVar[Mapping[str, Literal["min", "max"]]] = {"exact_match": "max"}
    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder",)
    kind: Literal["exact_match"] = "exact_match"
    every: Every = "end"
    """Steps between evaluations of this metric, or `end`: only after the last step. None: `evaluate.every`."""
    num_examples: PositiveInt = 1000
    """Maximum number of held-out pairs to decode."""


Metric = Annotated[Perplexity | ExactMatch, Field(discriminator="kind")]
