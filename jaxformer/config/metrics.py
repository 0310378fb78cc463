"""Metric configs: the keys of each metric, the values it reports and the objectives it suits.

The computation is in `evaluate/`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from jaxformer.config.base import Config
from jaxformer.config.model import ModelConfig, ModelShape
from jaxformer.config.objectives import ObjectiveConfig

Every = PositiveInt | Literal["end"] | None
Direction = Literal["min", "max"]
Values = Mapping[str, Direction]
"""Names of reported values, and whether lower or higher is better."""


class MetricConfig(Config):
    """Base class of metric configs."""

    values: ClassVar[Values]
    """All values that the metric can report."""
    objectives: ClassVar[tuple[str, ...]]
    """Kinds of the objectives whose models the metric can evaluate."""
    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder", "decoder-only", "encoder-only")
    """Model shapes that the metric supports."""

    every: Every = None
    """Steps between evaluations of this metric, or `end`: only after the last step. None: `evaluate.every`."""

    def reported(self, objective: ObjectiveConfig | None, model: ModelConfig | None) -> Values:
        """The values that are reported for this objective and model; all of them if these are not known yet."""
        return self.values


# ---------------------------------------------------------------- language models
class Perplexity(MetricConfig):
    """Held-out loss, perplexity, token accuracy and, if every token is predicted, bits per byte."""

    values: ClassVar[Values] = {
        "heldout_loss": "min",
        "heldout_perplexity": "min",
        "heldout_accuracy": "max",
        "heldout_bits_per_byte": "min",
    }
    objectives: ClassVar[tuple[str, ...]] = ("causal", "prefix", "seq2seq", "span", "ul2", "infill")
    kind: Literal["perplexity"] = "perplexity"
    batches: PositiveInt | None = None
    """Held-out batches per evaluation. None: `evaluate.batches`."""

    def reported(self, objective: ObjectiveConfig | None, model: ModelConfig | None) -> Values:
        if objective is None or objective.kind in ("causal", "seq2seq"):
            return self.values
        # The targets of the others do not encode a whole text, so its bytes say nothing about them.
        return {name: better for name, better in self.values.items() if name != "heldout_bits_per_byte"}


class MaskedAccuracy(MetricConfig):
    """Loss, perplexity and accuracy at the masked positions of the held-out set, which are always the same."""

    values: ClassVar[Values] = {"heldout_loss": "min", "heldout_perplexity": "min", "masked_accuracy": "max"}
    objectives: ClassVar[tuple[str, ...]] = ("masked",)
    kind: Literal["masked"] = "masked"
    batches: PositiveInt | None = None
    """Held-out batches per evaluation. None: `evaluate.batches`."""


class PseudoPerplexity(MetricConfig):
    """Pseudo-perplexity: every token of a text is masked in turn and predicted from all others (arXiv:1910.14659)."""

    values: ClassVar[Values] = {"pseudo_perplexity": "min"}
    objectives: ClassVar[tuple[str, ...]] = ("masked",)
    kind: Literal["pseudo_perplexity"] = "pseudo_perplexity"
    every: Every = "end"
    """Steps between evaluations of this metric, or `end`: only after the last step. None: `evaluate.every`."""
    num_examples: PositiveInt = 100
    """Maximum number of held-out texts; a text of n tokens takes n forward passes."""


# ---------------------------------------------------------------- generated text
class ExactMatch(MetricConfig):
    """Fraction of held-out pairs whose greedy output equals the target."""

    values: ClassVar[Values] = {"exact_match": "max"}
    objectives: ClassVar[tuple[str, ...]] = ("seq2seq",)
    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder",)
    kind: Literal["exact_match"] = "exact_match"
    every: Every = "end"
    """Steps between evaluations of this metric, or `end`: only after the last step. None: `evaluate.every`."""
    num_examples: PositiveInt = 1000
    """Maximum number of held-out pairs to decode."""


class Bleu(MetricConfig):
    """BLEU and chrF of decoded held-out sources, computed by sacreBLEU (arXiv:1804.08771), with their signatures."""

    values: ClassVar[Values] = {"bleu": "max", "chrf": "max"}
    objectives: ClassVar[tuple[str, ...]] = ("seq2seq",)
    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder",)
    kind: Literal["bleu"] = "bleu"
    every: Every = "end"
    """Steps between evaluations of this metric, or `end`: only after the last step. None: `evaluate.every`."""
    num_examples: PositiveInt | None = None
    """Maximum number of held-out pairs to decode. None: all."""
    num_beams: PositiveInt = 4
    """Number of beams of beam search. 1: greedy decoding."""
    length_penalty: float = 1.0
    """Exponent of the length normalisation of beam search. 0: no normalisation."""
    max_new_tokens: PositiveInt | None = None
    """Maximum length of an output in tokens. None: `data.length`, or the model's limit if it is shorter."""
    batch_size: PositiveInt = 128
    """Sequences decoded at the same time; each beam is a sequence."""
    tokenize: Literal["13a", "intl", "char", "zh", "none"] = "13a"
    """Tokenisation for BLEU; chrF needs none."""
    lowercase: bool = False
    """Compare lowercased texts."""


# ---------------------------------------------------------------- classes and tags
SINGLE_LABEL: Values = {"class_accuracy": "max", "macro_f1": "max", "matthews": "max"}
BINARY: Values = SINGLE_LABEL | {"f1": "max"}
MULTI_LABEL: Values = {"class_accuracy": "max", "micro_f1": "max", "macro_f1": "max"}
REGRESSION: Values = {"pearson": "max", "spearman": "max"}


class Classification(MetricConfig):
    """Held-out loss and, depending on `model.pooler.problem`, accuracy, F1, Matthews correlation, Pearson and Spearman.

    single_label: accuracy, macro F1, Matthews correlation, and with two classes the F1 of the last one; multi_label:
    accuracy (all labels of a text are right), micro and macro F1; regression: Pearson and Spearman correlation."""

    values: ClassVar[Values] = {"heldout_loss": "min", **BINARY, **MULTI_LABEL, **REGRESSION}
    objectives: ClassVar[tuple[str, ...]] = ("classify",)
    kind: Literal["classification"] = "classification"
    batches: PositiveInt | None = None
    """Held-out batches per evaluation. None: `evaluate.batches`."""

    def reported(self, objective: ObjectiveConfig | None, model: ModelConfig | None) -> Values:
        if model is None or model.pooler is None:
            return self.values
        single_label = BINARY if model.pooler.num_classes == 2 else SINGLE_LABEL
        by_problem = {"single_label": single_label, "multi_label": MULTI_LABEL, "regression": REGRESSION}
        return {"heldout_loss": "min", **by_problem[model.pooler.problem]}


class TagF1(MetricConfig):
    """Held-out loss, accuracy of tags and, for BIO tags, precision, recall and F1 of entities, as conlleval counts."""

    values: ClassVar[Values] = {
        "heldout_loss": "min",
        "tag_accuracy": "max",
        "tag_precision": "max",
        "tag_recall": "max",
        "tag_f1": "max",
    }
    objectives: ClassVar[tuple[str, ...]] = ("tag",)
    kind: Literal["tag_f1"] = "tag_f1"
    batches: PositiveInt | None = None
    """Held-out batches per evaluation. None: `evaluate.batches`."""

    def reported(self, objective: ObjectiveConfig | None, model: ModelConfig | None) -> Values:
        labels = () if model is None or model.pooler is None else model.pooler.labels
        if all(re.fullmatch(r"O|[BIES](-.+)?", label) for label in labels):
            return self.values
        # Other tags, such as parts of speech, do not delimit entities.
        return {name: self.values[name] for name in ("heldout_loss", "tag_accuracy")}


# ---------------------------------------------------------------- word vectors
class WordVectors(MetricConfig):
    """Held-out loss of word vectors, their accuracy on analogies, and the rank correlation with human similarities."""

    values: ClassVar[Values] = {"heldout_loss": "min", "analogy_accuracy": "max", "word_similarity": "max"}
    objectives: ClassVar[tuple[str, ...]] = ("word2vec",)
    shapes: ClassVar[tuple[ModelShape, ...]] = ("embedding-only",)
    kind: Literal["word_vectors"] = "word_vectors"
    batches: PositiveInt | None = None
    """Held-out batches per evaluation. None: `evaluate.batches`."""
    analogies: str | None = None
    """File of questions `a b c d` (a is to b as c is to d), one per line; lines that begin with `:` name sections."""
    similarities: str | None = None
    """File of two words and their similarity per line, separated by tabs, commas or spaces."""

    def reported(self, objective: ObjectiveConfig | None, model: ModelConfig | None) -> Values:
        left_out = {"analogy_accuracy"} if self.analogies is None else set()
        left_out |= {"word_similarity"} if self.similarities is None else set()
        return {name: better for name, better in self.values.items() if name not in left_out}


METRIC_CONFIGS: tuple[type[MetricConfig], ...] = (
    Perplexity,
    MaskedAccuracy,
    PseudoPerplexity,
    ExactMatch,
    Bleu,
    Classification,
    TagF1,
    WordVectors,
)
Metric = Annotated[
    Perplexity | MaskedAccuracy | PseudoPerplexity | ExactMatch | Bleu | Classification | TagF1 | WordVectors,
    Field(discriminator="kind"),
]
DEFAULTS: tuple[MetricConfig, ...] = (Perplexity(), MaskedAccuracy(), Classification(), TagF1(), WordVectors())
"""One of these suits every objective and reports `heldout_loss`."""


def default_metrics(objective: ObjectiveConfig | None) -> tuple[MetricConfig, ...]:
    """The metrics of a run that names none; those of a language model if there is no objective."""
    return tuple(metric for metric in DEFAULTS if objective is None or objective.kind in metric.objectives)[:1]
