"""Objective configs: the keys of each training objective and the models it trains.

The implementation is in `objectives/`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from jaxformer.config.base import Config
from jaxformer.config.model import ModelConfig, ModelShape
from jaxformer.typing import BatchLayout

MASK_TOKEN = "<mask>"
NUM_SENTINELS = 100
OpenRate = Annotated[float, Field(gt=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def sentinel_token(index: int) -> str:
    """The name of a sentinel in T5's vocabulary (arXiv:1910.10683)."""
    return f"<extra_id_{index}>"


# In the order of T5's ids, where `<extra_id_0>` is the last one: added to T5's pieces, they get the ids of its models.
SENTINELS = tuple(map(sentinel_token, reversed(range(NUM_SENTINELS))))


class ObjectiveConfig(Config):
    """Base class of objective configs."""

    shapes: ClassVar[tuple[ModelShape, ...]]
    """Model shapes that the objective can train."""
    head: ClassVar[Literal["vocabulary", "classes", "tags"]] = "vocabulary"
    """What the model must predict: tokens of the vocabulary, classes of texts, or classes of tokens (tags)."""
    has_prefix: ClassVar[bool] = False
    """Whether the objective trains prefix language models, which have `model.prefix`, and no others."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Special tokens that the tokenizer must have, besides bos and eos."""
        return ()

    def batch_layout(self, length: int, model: ModelConfig) -> BatchLayout:
        """Sizes of a batch if `data.length` is `length`."""
        return BatchLayout(length)

    def has_softmax(self, model: ModelConfig) -> bool:
        """Whether the loss is the cross-entropy of a softmax, which label smoothing and the z-loss apply to."""
        return True

    def check_model(self, model: ModelConfig) -> None:
        """Raise if the objective cannot train the model."""
        if model.shape not in self.shapes:
            suitable = ", ".join(kind for kind, config in _kinds().items() if model.shape in config.shapes)
            raise ValueError(
                f"data.objective.kind={self.kind} needs a model that is {' or '.join(self.shapes)}, but model is "
                f"{model.shape}: change the stacks, or the objective to one that trains such models: {suitable}"
            )
        if model.prefix and not self.has_prefix:
            raise ValueError(
                f"data.objective.kind={self.kind} does not train prefix language models, but model.prefix=true: set "
                "model.prefix=false or data.objective.kind=prefix"
            )
        if self.has_prefix and not model.prefix:
            raise ValueError(
                f"data.objective.kind={self.kind} trains a model to read prompts in both directions, but "
                "model.prefix=false: set model.prefix=true or data.objective.kind=causal"
            )
        if self.head == "vocabulary" and model.head is None:
            raise ValueError(f"data.objective.kind={self.kind} predicts tokens, but model.head is none: set a head")
        if self.head != "vocabulary":
            self._check_pooler(model)

    def _check_pooler(self, model: ModelConfig) -> None:
        # The first token of a causal decoder attends to itself only, so its vector is the same for all texts.
        of_texts = ("mean", "last") if model.shape == "decoder-only" else ("first", "mean", "last")
        poolings = ("none",) if self.head == "tags" else of_texts
        pooler = model.pooler
        if pooler is None or pooler.num_classes is None or pooler.pooling not in poolings:
            found = "none" if pooler is None else f"pooling={pooler.pooling} num_classes={pooler.num_classes}"
            raise ValueError(
                f"data.objective.kind={self.kind} predicts {self.head}: set model.pooler with num_classes and pooling "
                f"{' or '.join(poolings)} if the model is {model.shape}; it is {found}"
            )


# ---------------------------------------------------------------- language modelling
class Causal(ObjectiveConfig):
    """Causal language modelling: predict every next token of a document and the eos that ends it."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("decoder-only",)
    kind: Literal["causal"] = "causal"


class Prefix(ObjectiveConfig):
    """Prefix language modelling: predict the tokens that follow a prefix, whose tokens attend to each other in both
    directions (arXiv:1910.10683, section 3.2.1). The model needs `model.prefix`."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("decoder-only",)
    has_prefix: ClassVar[bool] = True
    kind: Literal["prefix"] = "prefix"
    fields: Literal["text", "pairs"] = "text"
    """text: a random part at the beginning of each text is the prefix, drawn again in every step; pairs: the inputs of
    a pair are the prefix of its targets."""
    min_fraction: Share = 0.0
    """Smallest fraction of the tokens of a text that is the prefix; it always has at least one token."""
    max_fraction: Share = 1.0
    """Largest fraction of the tokens of a text that is the prefix; at least one token is predicted."""

    @model_validator(mode="after")
    def _fractions_in_order(self) -> "Prefix":
        if self.min_fraction > self.max_fraction:
            raise ValueError(
                f"min_fraction={self.min_fraction} is more than max_fraction={self.max_fraction}: lower it"
            )
        return self

    def batch_layout(self, length: int, model: ModelConfig) -> BatchLayout:
        return BatchLayout(length, has_prefix=True)


class Masked(ObjectiveConfig):
    """Masked language modelling: predict tokens that were masked (arXiv:1810.04805, section 3.1).

    Masks are drawn again in every epoch (arXiv:1907.11692, section 4.1). RoBERTa uses the defaults, ModernBERT
    `rate=0.3` (arXiv:2412.13663)."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-only",)
    kind: Literal["masked"] = "masked"
    rate: OpenRate = 0.15
    """Fraction of the tokens to predict."""
    mask_share: Share = 0.8
    """Fraction of the tokens to predict that is replaced by the mask token."""
    random_share: Share = 0.1
    """Fraction of the tokens to predict that is replaced by random tokens; the others are not changed."""
    whole_words: bool = False
    """Mask all tokens of a word together, if the row has a word that is short enough for `rate`."""

    @model_validator(mode="after")
    def _shares_add_up(self) -> "Masked":
        if self.mask_share + self.random_share > 1.0:
            raise ValueError(
                f"mask_share={self.mask_share} + random_share={self.random_share} is more than 1: lower one"
            )
        return self

    @property
    def tokens(self) -> tuple[str, ...]:
        return (MASK_TOKEN,)

    def num_predictions(self, length: int) -> int:
        """Number of tokens to predict in a row with this many tokens."""
        return max(1, round(self.rate * length)) if length else 0

    def batch_layout(self, length: int, model: ModelConfig) -> BatchLayout:
        return BatchLayout(length, num_predictions=self.num_predictions(length))


# ---------------------------------------------------------------- sequence to sequence
class SourceObjective(ObjectiveConfig):
    """Base class of objectives of encoder-decoders."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder",)
    input_length: PositiveInt
    """Tokens per encoder row; `data.length` is the number of tokens per decoder row."""

    def batch_layout(self, length: int, model: ModelConfig) -> BatchLayout:
        return BatchLayout(length, self.input_length)


class Seq2Seq(SourceObjective):
    """Sequence to sequence: predict the target text and the eos that ends it from the source text of a pair."""

    kind: Literal["seq2seq"] = "seq2seq"


class Span(SourceObjective):
    """T5's span corruption: predict the spans of a text that sentinels replace (arXiv:1910.10683, section 3.1.4)."""

    kind: Literal["span"] = "span"
    density: OpenRate = 0.15
    """Fraction of the tokens to corrupt."""
    mean_length: Annotated[float, Field(ge=1.0)] = 3.0
    """Mean length of a span in tokens."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return SENTINELS


class Denoiser(Config):
    """One of UL2's denoising tasks."""

    mode: Annotated[str, Field(min_length=1)]
    """Token that begins the inputs of this task."""
    density: OpenRate
    """Fraction of the tokens to corrupt."""
    mean_length: Annotated[float, Field(ge=1.0)] | None = None
    """Mean length of a span in tokens. None: a single span at the end of the text (prefix language modelling)."""
    weight: PositiveFloat = 1.0
    """Relative frequency of this task."""


def _ul2_denoisers() -> tuple[Denoiser, ...]:
    """The seven denoisers of arXiv:2205.05131, table 1, with its mode tokens for R, X and S."""
    regular = [Denoiser(mode="[NLU]", density=0.15, mean_length=length) for length in (3.0, 8.0)]
    extreme = [(0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0)]
    return (
        *regular,
        *(Denoiser(mode="[NLG]", density=density, mean_length=length) for density, length in extreme),
        Denoiser(mode="[S2S]", density=0.25),
    )


class Ul2(SourceObjective):
    """UL2: a mixture of regular (R), extreme (X) and sequential (S) denoising with mode tokens (arXiv:2205.05131)."""

    kind: Literal["ul2"] = "ul2"
    denoisers: Annotated[tuple[Denoiser, ...], Field(min_length=1)] = _ul2_denoisers()
    """The tasks; each text of a row is corrupted by one of them, drawn by its weight."""

    @property
    def tokens(self) -> tuple[str, ...]:
        modes = dict.fromkeys(denoiser.mode for denoiser in self.denoisers)
        return (*SENTINELS, *modes)


class Infill(SourceObjective):
    """BART's denoising: text infilling and sentence permutation; the target is the whole text (arXiv:1910.13461)."""

    kind: Literal["infill"] = "infill"
    rate: OpenRate = 0.3
    """Fraction of the tokens to mask; a mask token replaces each masked span."""
    mean_length: Annotated[float, Field(ge=0.1, le=1000.0)] = 3.0
    """Mean of the Poisson distribution of span lengths."""
    permute_sentences: bool = True
    """Shuffle the sentences of a text, which end with a token that ends in `.`, `!` or `?`, or at a line break."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return (MASK_TOKEN,)


# ---------------------------------------------------------------- classification
class Classify(ObjectiveConfig):
    """Classification of a text or a pair of texts: single-label, multi-label or regression, as `model.pooler` says.

    An encoder pools its first token or the mean of all tokens; a decoder its last token. An encoder-decoder reads the
    text on both sides and pools the last token of the decoder (arXiv:1910.13461, section 3.1)."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("encoder-decoder", "decoder-only", "encoder-only")
    head: ClassVar[Literal["vocabulary", "classes", "tags"]] = "classes"
    kind: Literal["classify"] = "classify"

    def has_softmax(self, model: ModelConfig) -> bool:
        return model.pooler.problem == "single_label"

    def batch_layout(self, length: int, model: ModelConfig) -> BatchLayout:
        pooler = model.pooler
        has_source = model.shape == "encoder-decoder"
        return BatchLayout(
            length,
            length if has_source else 0,
            has_types=model.embedding.num_types > 1,
            num_labels=pooler.num_classes if pooler.problem == "multi_label" else 1,
            float_labels=pooler.problem != "single_label",
        )


class Tag(ObjectiveConfig):
    """Token classification: one label per word, predicted at the first token of the word."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("decoder-only", "encoder-only")
    head: ClassVar[Literal["vocabulary", "classes", "tags"]] = "tags"
    kind: Literal["tag"] = "tag"


class Word2Vec(ObjectiveConfig):
    """Word vectors from negative sampling (arXiv:1310.4546): predict which words occur near each other."""

    shapes: ClassVar[tuple[ModelShape, ...]] = ("embedding-only",)
    kind: Literal["word2vec"] = "word2vec"
    architecture: Literal["skip_gram", "cbow"] = "skip_gram"
    """skip_gram: predict every context word from the word; cbow: predict the word from the mean of its context."""
    window: PositiveInt = 5
    """Largest distance of a context word; that of each word is drawn evenly between 1 and this in every step."""
    num_negatives: PositiveInt = 5
    """Random words per predicted word that the model learns to tell apart from it."""
    negative_power: Share = 0.75
    """Exponent of the word counts that random words are drawn in proportion to."""
    subsample: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-3
    """Words with a higher share of the text than this are left out at random, the more frequent the more often.
    0: never."""

    def has_softmax(self, model: ModelConfig) -> bool:
        return False

    @property
    def num_predictions(self) -> int:
        """Number of words that are predicted at every position."""
        return 2 * self.window if self.architecture == "skip_gram" else 1

    def batch_layout(self, length: int, model: ModelConfig) -> BatchLayout:
        return BatchLayout(length, num_contexts=2 * self.window, negatives=(self.num_predictions, self.num_negatives))


OBJECTIVE_CONFIGS: tuple[type[ObjectiveConfig], ...] = (
    Causal,
    Prefix,
    Masked,
    Seq2Seq,
    Span,
    Ul2,
    Infill,
    Classify,
    Tag,
    Word2Vec,
)
Objective = Annotated[
    Causal | Prefix | Masked | Seq2Seq | Span | Ul2 | Infill | Classify | Tag | Word2Vec,
    Field(discriminator="kind"),
]


def _kinds() -> dict[str, type[ObjectiveConfig]]:
    return {config.model_fields["kind"].default: config for config in OBJECTIVE_CONFIGS}
