"""What a run reads: sources, tokenizer, lengths and batch size."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from jaxformer.config.base import Config
from jaxformer.config.objectives import Causal, Objective
from jaxformer.typing import BatchLayout

Paths = Annotated[tuple[str, ...], Field(min_length=1)]


# ---------------------------------------------------------------- sources
class TextSource(Config):
    """UTF-8 text files, plain or compressed (.gz, .xz, .bz2); globs allowed."""

    kind: Literal["text"] = "text"
    paths: Paths
    document: Literal["file", "line", "paragraph"] = "file"
    """What one document is; a paragraph ends at an empty line."""


class JsonlSource(Config):
    """One JSON object per line; fields `text`, or `inputs` and `targets`, or as named here."""

    kind: Literal["jsonl"] = "jsonl"
    paths: Paths
    text: str = "text"
    inputs: str = "inputs"
    targets: str = "targets"


class TsvSource(Config):
    """Tab-separated pairs, no quoting."""

    kind: Literal["tsv"] = "tsv"
    paths: Paths
    inputs: NonNegativeInt = 0
    """Column of the source text."""
    targets: NonNegativeInt = 1


class ArrayRecordSource(Config):
    """ArrayRecord files whose records are JSON objects with the fields of `JsonlSource`."""

    kind: Literal["array_record"] = "array_record"
    paths: Paths
    text: str = "text"
    inputs: str = "inputs"
    targets: str = "targets"


class MemorySource(Config):
    """Documents, or (inputs, targets) pairs, written in the config itself."""

    kind: Literal["memory"] = "memory"
    documents: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @model_validator(mode="after")
    def _one_of_both(self) -> "MemorySource":
        if bool(self.documents) == bool(self.pairs):
            raise ValueError("set exactly one of documents and pairs, with at least one entry")
        return self


class StdlibSource(Config):
    """The source files of the Python standard library, split by file."""

    kind: Literal["stdlib"] = "stdlib"
    split: Literal["train", "heldout"] = "train"
    heldout_percent: Annotated[int, Field(ge=1, le=50)] = 5


class DatesSource(Config):
    """Written dates in several languages and formats paired with their ISO form."""

    kind: Literal["dates"] = "dates"
    split: Literal["train", "heldout"] = "train"
    num_examples: PositiveInt = 50_000
    heldout_percent: Annotated[int, Field(ge=1, le=50)] = 10
    """Share of the calendar's days that only the held-out split shows."""


Source = Annotated[
    TextSource | JsonlSource | TsvSource | ArrayRecordSource | MemorySource | StdlibSource | DatesSource,
    Field(discriminator="kind"),
]


# ---------------------------------------------------------------- tokenizers
class SentencePieceTokenizer(Config):
    """A SentencePiece model, loaded from `path` or trained on the training source.

    A trained one has `model.vocab_size` pieces."""

    kind: Literal["sentencepiece"] = "sentencepiece"
    path: str | None = None
    algorithm: Literal["unigram", "bpe"] = "unigram"
    byte_fallback: bool = True
    train_bytes: PositiveInt = 4_000_000
    """Train on at most this much text, drawn evenly over the documents."""


class ByteTokenizer(Config):
    """UTF-8 bytes after three special ids: pad 0, bos 1, eos 2, byte b is b + 3. 259 ids in all."""

    kind: Literal["bytes"] = "bytes"


class HuggingFaceTokenizer(Config):
    """The tokenizer of a Hugging Face directory."""

    kind: Literal["huggingface"] = "huggingface"
    path: str
    """The directory, or its `tokenizer.json`; the files beside it name the special tokens."""


class DirectoryTokenizer(Config):
    """The tokenizer of a run directory or a Hugging Face directory, such as the one training starts from."""

    kind: Literal["directory"] = "directory"
    path: str


Tokenizer = Annotated[
    SentencePieceTokenizer | ByteTokenizer | HuggingFaceTokenizer | DirectoryTokenizer, Field(discriminator="kind")
]


# ---------------------------------------------------------------- data
class DataConfig(Config):
    train: Source
    heldout: Source | None = None
    """Evaluated during and after training; none means no evaluation."""
    tokenizer: Tokenizer = SentencePieceTokenizer()
    """With train.start, the default means the tokenizer of that directory."""
    objective: Objective = Causal()
    length: PositiveInt = 256
    """Tokens in a row the model trains on."""
    batch_size: PositiveInt = 8
    """Rows in one step's global batch, over all hosts and accumulation steps."""
    pack: bool = True
    """Put several short documents into one row, kept apart by segment ids."""
    workers: NonNegativeInt = 0
    """Worker processes that build batches; 0 uses threads of the training process."""
    prefetch: PositiveInt = 8
    """Batches held ready."""

    @property
    def batch_layout(self) -> BatchLayout:
        """Lengths of the arrays in a batch."""
        return BatchLayout(self.length, self.objective.source_length)
