"""Data configs: sources, tokenizers, sequence lengths and batch size."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from jaxformer.config.base import Config
from jaxformer.config.objectives import Causal, Objective

Paths = str | Annotated[tuple[str, ...], Field(min_length=1)]


# ---------------------------------------------------------------- sources
class TextSource(Config):
    """UTF-8 text files, plain or compressed (.gz, .xz, .bz2)."""

    kind: Literal["text"] = "text"
    paths: Paths
    """Files or glob patterns, relative to the current directory; `**` matches any number of directories."""
    document: Literal["file", "line", "paragraph", "sentence"] = "file"
    """What counts as one document: a whole file, a line, a paragraph (separated by blank lines), or a sentence (ended
    by `.`, `!` or `?` and white space, or by the end of a line)."""


class JsonlSource(Config):
    """JSON Lines files, plain or compressed (.gz, .xz, .bz2): one object per line, a text or a pair.

    A text may have a second text, a label or tags beside it."""

    kind: Literal["jsonl"] = "jsonl"
    paths: Paths
    """Files or glob patterns, relative to the current directory; `**` matches any number of directories."""
    text: str = "text"
    """Name of the JSON field with the text; for tagging, a list of words. Pairs are read from objects without it."""
    text_pair: str = "text_pair"
    """Name of the JSON field with the second text of a classified pair."""
    label: str = "label"
    """Name of the JSON field with the label: a string, a number, or a list of strings (multi-label)."""
    tags: str = "tags"
    """Name of the JSON field with the tags, one per word."""
    inputs: str = "inputs"
    """Name of the JSON field with the source text of a pair."""
    targets: str = "targets"
    """Name of the JSON field with the target text of a pair."""
    max_malformed: NonNegativeInt = 0
    """Number of malformed lines to skip with a warning; more are an error."""


class TsvSource(Config):
    """Tab-separated files without quoting, plain or compressed (.gz, .xz, .bz2): one pair or labelled text per line."""

    kind: Literal["tsv"] = "tsv"
    paths: Paths
    """Files or glob patterns, relative to the current directory; `**` matches any number of directories."""
    inputs: NonNegativeInt = 0
    """Column of the source text, counted from 0. Not used with `text`."""
    targets: NonNegativeInt = 1
    """Column of the target text, counted from 0. Not used with `text`."""
    text: NonNegativeInt | None = None
    """Column of a text, counted from 0, instead of `inputs` and `targets`. None: lines are pairs."""
    text_pair: NonNegativeInt | None = None
    """Column of the second text of a classified pair, counted from 0; needs `text`. None: no second text."""
    label: NonNegativeInt | None = None
    """Column of the label, counted from 0; needs `text`. None: no label."""
    max_malformed: NonNegativeInt = 0
    """Number of malformed lines to skip with a warning; more are an error."""

    @model_validator(mode="after")
    def _text_is_set(self) -> "TsvSource":
        if self.text is None and (self.text_pair is not None or self.label is not None):
            raise ValueError("text_pair and label need text, the column of the text: set it")
        used = {"inputs": self.inputs, "targets": self.targets}
        if self.text is not None:
            used = {"text": self.text, "text_pair": self.text_pair, "label": self.label}
        _check_distinct({name: column for name, column in used.items() if column is not None})
        return self


class ConllSource(Config):
    """Tagged words in CoNLL format, plain or compressed: one word per line, a blank line after each sentence."""

    kind: Literal["conll"] = "conll"
    paths: Paths
    """Files or glob patterns, relative to the current directory; `**` matches any number of directories."""
    word: int = 0
    """Column of the word, counted from 0, or from the last column if negative; white space separates columns."""
    tag: int = -1
    """Column of the tag, counted from 0, or from the last column if negative."""
    max_malformed: NonNegativeInt = 0
    """Number of malformed lines to skip with a warning; more are an error."""

    @model_validator(mode="after")
    def _columns_differ(self) -> "ConllSource":
        _check_distinct({"word": self.word, "tag": self.tag})
        return self


def _check_distinct(columns: dict[str, int]) -> None:
    """Raise if two fields are read from the same column."""
    for column in columns.values():
        same = [other for other in columns if columns[other] == column]
        if len(same) > 1:
            raise ValueError(f"{' and '.join(same)} are both column {column}: change one of them")


class ParallelSource(Config):
    """Parallel text in two files, plain or compressed (.gz, .xz, .bz2): line i of both files is a pair."""

    kind: Literal["parallel"] = "parallel"
    inputs: Paths
    """Files or glob patterns with the source texts, one text per line."""
    targets: Paths
    """Files or glob patterns with the target texts, as many and in the same order as those of `inputs`."""


class ArrayRecordSource(Config):
    """ArrayRecord files whose records are JSON objects as in `jsonl`; records are read one at a time."""

    kind: Literal["array_record"] = "array_record"
    paths: Paths
    """Files or glob patterns, relative to the current directory; `**` matches any number of directories."""
    text: str = "text"
    """Name of the JSON field with the text; for tagging, a list of words. Pairs are read from records without it."""
    text_pair: str = "text_pair"
    """Name of the JSON field with the second text of a classified pair."""
    label: str = "label"
    """Name of the JSON field with the label: a string, a number, or a list of strings (multi-label)."""
    tags: str = "tags"
    """Name of the JSON field with the tags, one per word."""
    inputs: str = "inputs"
    """Name of the JSON field with the source text of a pair."""
    targets: str = "targets"
    """Name of the JSON field with the target text of a pair."""


class MemorySource(Config):
    """Examples written in the config itself: documents, pairs, or examples with named fields."""

    kind: Literal["memory"] = "memory"
    documents: tuple[str, ...] = ()
    """Texts of the documents."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Pairs of source and target text."""
    examples: tuple[dict[str, Any], ...] = ()
    """Examples with the fields `text`, `text_pair`, `label` and `tags`, as in `jsonl`."""

    @model_validator(mode="after")
    def _one_of_all(self) -> "MemorySource":
        if sum(map(bool, (self.documents, self.pairs, self.examples))) != 1:
            raise ValueError("set exactly one of documents, pairs and examples, with at least one entry")
        return self


class StdlibSource(Config):
    """The source code of the Python standard library, one document per file."""

    kind: Literal["stdlib"] = "stdlib"
    split: Literal["train", "heldout"] = "train"
    """Which of the two disjoint splits to read."""
    heldout_percent: Annotated[int, Field(ge=1, le=50)] = 5
    """Approximate percentage of files in the held-out split; must be the same for both splits."""


class DatesSource(Config):
    """Synthetic pairs: a date as written in one of eight languages, and the same date in ISO 8601 format."""

    kind: Literal["dates"] = "dates"
    split: Literal["train", "heldout"] = "train"
    """Which of the two disjoint splits to read."""
    num_examples: PositiveInt = 50_000
    """Number of pairs to generate."""
    heldout_percent: Annotated[int, Field(ge=1, le=50)] = 10
    """Approximate percentage of calendar days in the held-out split; must be the same for both splits."""


AnySource = (
    TextSource
    | JsonlSource
    | TsvSource
    | ConllSource
    | ParallelSource
    | ArrayRecordSource
    | MemorySource
    | StdlibSource
    | DatesSource
)
Source = Annotated[AnySource, Field(discriminator="kind")]


class HeldoutSplit(Config):
    """A part of `data.train`, which is then not trained on.

    A hash of each text, or of the source text of each pair, decides on which side it is. So an example stays on its
    side when files are added, renamed or reordered, and equal texts are on the same side."""

    kind: Literal["split"] = "split"
    percent: Annotated[int, Field(ge=1, le=50)] = 5
    """Approximate percentage of the examples of `data.train` to hold out."""


Heldout = Annotated[AnySource | HeldoutSplit, Field(discriminator="kind")]


# ---------------------------------------------------------------- tokenizers
class SentencePieceTokenizer(Config):
    """A SentencePiece model, loaded from a file or trained on the training data."""

    kind: Literal["sentencepiece"] = "sentencepiece"
    path: str | None = None
    """SentencePiece `.model` file to load. None: train one on `data.train` with as many pieces as the model has ids."""
    algorithm: Literal["unigram", "bpe"] = "unigram"
    """Training algorithm: unigram language model (unigram) or byte-pair encoding (bpe). Not used with `path`."""
    byte_fallback: bool = True
    """Train a model that encodes unknown characters as UTF-8 bytes, not as an unknown token. Not used with `path`."""
    train_bytes: PositiveInt = 4_000_000
    """Maximum bytes of text to train the tokenizer on, spread evenly over the documents. Not used with `path`."""
    extra_tokens: tuple[str, ...] = ()
    """Special tokens to append to the vocabulary, such as `<mask>` or T5's sentinels; no text is encoded to them."""


class ByteTokenizer(Config):
    """UTF-8 bytes as tokens: pad, bos and eos have the ids 0, 1 and 2, byte b has the id b + 3; 259 ids in total."""

    kind: Literal["bytes"] = "bytes"
    extra_tokens: tuple[str, ...] = ()
    """Special tokens to append to the vocabulary, such as `<mask>` or T5's sentinels; no text is encoded to them."""


class WordsTokenizer(Config):
    """The most frequent words of the training data; all other words are one unknown word, and punctuation is left out.

    pad, bos, eos and the unknown word have the ids 0 to 3, words the following ids, the most frequent first."""

    kind: Literal["words"] = "words"
    min_count: PositiveInt = 5
    """Words that occur less often are unknown; so are the rarest words beyond `model.vocab_size`."""
    lowercase: bool = True
    """Convert texts to lower case."""
    extra_tokens: tuple[str, ...] = ()
    """Special tokens to append to the vocabulary, such as `<mask>` or T5's sentinels; no text is encoded to them."""


class HuggingFaceTokenizer(Config):
    """A Hugging Face `tokenizer.json`."""

    kind: Literal["huggingface"] = "huggingface"
    path: str
    """The `tokenizer.json` or its directory; special tokens are read from the files next to it."""
    extra_tokens: tuple[str, ...] = ()
    """Special tokens to append to the vocabulary, such as `<mask>` or T5's sentinels; no text is encoded to them."""


class DirectoryTokenizer(Config):
    """The tokenizer stored in a run directory or a Hugging Face directory."""

    kind: Literal["directory"] = "directory"
    path: str
    """The run directory or Hugging Face directory."""
    extra_tokens: tuple[str, ...] = ()
    """Special tokens to append to the vocabulary, such as `<mask>` or T5's sentinels; no text is encoded to them."""


Tokenizer = Annotated[
    SentencePieceTokenizer | ByteTokenizer | WordsTokenizer | HuggingFaceTokenizer | DirectoryTokenizer,
    Field(discriminator="kind"),
]


# ---------------------------------------------------------------- data
class DataConfig(Config):
    """Training and held-out data, and how they become batches."""

    train: Source
    """Source of the training examples."""
    heldout: Heldout | None = None
    """Held-out examples for evaluation: a source, or `split` for a part of `train`. None: no evaluation."""
    tokenizer: Tokenizer = SentencePieceTokenizer()
    """Tokenizer of all texts. With `train.start`, the default is replaced by the tokenizer of that directory."""
    source_tokenizer: Tokenizer | None = None
    """Tokenizer of the inputs of a model with `model.source_vocab_size`. None: `tokenizer` encodes both sides."""
    objective: Objective = Causal()
    """Training objective; it must support the model's shape."""
    length: PositiveInt = 256
    """Tokens per row that the model trains on; in an encoder-decoder, tokens per decoder row."""
    batch_size: PositiveInt = 8
    """Rows in the global batch of one optimizer step, over all hosts and gradient-accumulation steps."""
    pack: bool = True
    """Pack several short examples into one row, separated by segment ids. False, and always if the objective labels
    whole rows (classify): one example per row."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What to do with examples that do not fit into a row. drop: leave out labelled texts and pairs, and split other
    texts into several rows; truncate: use the beginning of every example."""
    workers: NonNegativeInt = 0
    """Worker processes that build batches. 0: a thread of the training process builds them."""
    prefetch: PositiveInt = 8
    """Batches to build ahead of training."""
