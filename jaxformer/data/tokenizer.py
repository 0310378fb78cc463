"""Tokenizers: text to ids and back, SentencePiece (arXiv:1808.06226) or plain bytes.

`encode` adds no special ids: objectives do. A trained SentencePiece model keeps text exactly, white space
included, with one exception of the library: U+2581, its mark for a space, comes back as a space.
"""

import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from jaxformer.config import RunConfig, SentencePieceTokenizer, TextSource
from jaxformer.data.sources import open_source
from jaxformer.errors import UserError

SENTENCEPIECE_FILE = "tokenizer.model"
BYTES_FILE = "tokenizer_bytes.json"  # tokenizer.json is Hugging Face's name for its own format
# The sums of the unigram trainer depend on how many threads share the work: a fixed number gives one model on
# every machine.
TRAIN_THREADS = 8
MAX_SENTENCE_CHARS = 2048  # longer lines are cut; SentencePiece would leave them out


class Tokenizer(ABC):
    """Text to ids below `vocab_size` and back."""

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    _file: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores where that helps."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; pad, bos and eos are dropped."""
        ids = [int(i) for i in ids]
        unknown = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if unknown is not None:
            raise UserError(f"id {unknown} is not below the tokenizer's vocabulary size {self.vocab_size}")
        return self._text([i for i in ids if i not in (self.pad_id, self.bos_id, self.eos_id)])

    @property
    def digest(self) -> str:
        """The same for tokenizers that give the same ids."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Write the file `load_tokenizer` reads, whole or not at all."""
        _written(Path(directory) / self._file, self.to_bytes())

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The content of the tokenizer's file."""

    @abstractmethod
    def _text(self, ids: list[int]) -> str: ...


class Bytes(Tokenizer):
    """UTF-8 bytes after three special ids; knows every text and needs no training."""

    vocab_size, pad_id, bos_id, eos_id = 259, 0, 1, 2
    _file = BYTES_FILE
    _offset = 3

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[byte + self._offset for byte in text.encode("utf-8")] for text in texts]

    def _text(self, ids: list[int]) -> str:
        return bytes(i - self._offset for i in ids).decode("utf-8", errors="replace")

    def to_bytes(self) -> bytes:
        return json.dumps({"kind": "bytes", "offset": self._offset}).encode()


class SentencePiece(Tokenizer):
    """A SentencePiece model, trained here or elsewhere.

    Models from elsewhere may lack special ids. Without pad, unk takes its place (Llama 2); without bos, pad does,
    as T5 starts decoding with it (arXiv:1910.10683)."""

    _file = SENTENCEPIECE_FILE

    def __init__(self, model: bytes):
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)  # the constructor takes an empty model for none at all
        self._model = model
        self.vocab_size = self._processor.vocab_size()
        self.pad_id = _first_defined(self._processor.pad_id(), self._processor.unk_id())
        self.bos_id = _first_defined(self._processor.bos_id(), self.pad_id)
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError("the SentencePiece model has no eos id, which ends every document: train it with one")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def _text(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def to_bytes(self) -> bytes:
        return self._model


def _first_defined(*ids: int) -> int:
    return next(i for i in ids if i >= 0)


# ---------------------------------------------------------------- made or loaded
def make_tokenizer(cfg: RunConfig, documents: Sequence[dict[str, str]]) -> Tokenizer:
    """The tokenizer a config asks for: loaded, or trained on the documents."""
    tokenizer = MAKERS[cfg.data.tokenizer.kind](cfg, documents)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise UserError(
            f"model.vocab_size={cfg.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size} ids: "
            f"set model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer `save` wrote into a directory; executes no code."""
    directory = Path(directory)
    if (directory / SENTENCEPIECE_FILE).is_file():
        return load_sentencepiece(directory / SENTENCEPIECE_FILE)
    if (directory / BYTES_FILE).is_file():
        return Bytes()
    raise UserError(f"'{directory}' has no tokenizer: neither {SENTENCEPIECE_FILE} nor {BYTES_FILE} is there")


def load_sentencepiece(path: str | Path) -> SentencePiece:
    """A SentencePiece `.model` file."""
    try:
        return SentencePiece(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"tokenizer '{path}' cannot be read ({error.strerror}): correct the path") from None
    except RuntimeError:
        raise UserError(f"tokenizer '{path}' is not a SentencePiece model: name a .model file") from None


def train_tokenizer_file(paths: Sequence[str], vocab_size: int, algorithm: str, out: str | Path) -> Path:
    """The SentencePiece `.model` file `out`, trained on text files."""
    documents = open_source(TextSource(paths=tuple(paths)))
    cfg = SentencePieceTokenizer(algorithm=algorithm)
    tokenizer = train_sentencepiece([example["text"] for example in documents], vocab_size, cfg)
    return _written(Path(out), tokenizer.to_bytes())


def _written(path: Path, content: bytes) -> Path:
    """The file with this content, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    return partial.replace(path)


def _make_sentencepiece(cfg: RunConfig, documents: Sequence[dict[str, str]]) -> SentencePiece:
    if cfg.data.tokenizer.path is not None:
        return load_sentencepiece(cfg.data.tokenizer.path)
    texts = [text for example in documents for text in example.values()]
    return train_sentencepiece(texts, cfg.model.vocab_size, cfg.data.tokenizer)


def _make_bytes(cfg: RunConfig, documents: Sequence[dict[str, str]]) -> Bytes:
    return Bytes()


MAKERS: dict[str, Callable[[RunConfig, Sequence[dict[str, str]]], Tokenizer]] = {
    "sentencepiece": _make_sentencepiece,
    "bytes": _make_bytes,
}


# ---------------------------------------------------------------- training
def train_sentencepiece(texts: Sequence[str], vocab_size: int, cfg: SentencePieceTokenizer) -> SentencePiece:
    """A model of exactly `vocab_size` pieces, the same on every machine."""
    sentences = list(_drawn(texts, cfg.train_bytes))
    if not sentences:
        raise UserError(f"data.tokenizer.train_bytes={cfg.train_bytes} is too little text to train on: raise it")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=cfg.algorithm,
            byte_fallback=cfg.byte_fallback,
            # Without bytes to fall back on, a rare character left out would be lost.
            character_coverage=0.9995 if cfg.byte_fallback else 1.0,
            num_threads=TRAIN_THREADS,
            minloglevel=2,  # errors only
            **SPECIAL_IDS,
            **TEXT_OPTIONS,
            **SHORT_TRAINING,
        )
    except RuntimeError as error:
        raise _vocab_size_error(error, vocab_size) from None
    return SentencePiece(model.getvalue())


SPECIAL_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
TEXT_OPTIONS = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,  # an indentation becomes one piece
    "user_defined_symbols": ["\n", "\t"],  # never part of a sentence, so training would not see them
    "split_digits": True,  # numbers of any size are spelt alike
    "max_sentence_length": 4 * MAX_SENTENCE_CHARS,  # in bytes
}
# Unigram starts from a million candidates and prunes a quarter at a time. From fewer, halved each time, 4 MB of code
# take 22 s of processor time in place of 39 s, and held-out code comes out as short.
SHORT_TRAINING = {"seed_sentencepiece_size": 50_000, "shrinking_factor": 0.5, "num_sub_iterations": 1}


def _drawn(texts: Sequence[str], max_bytes: int) -> Iterator[str]:
    """Sentences spread evenly over all texts, `max_bytes` of them at most."""
    total = sum(len(sentence.encode()) for sentence in _sentences(texts))
    seen = kept = 0
    for sentence in _sentences(texts):
        size = len(sentence.encode())
        seen += size
        if (kept + size) * total <= max_bytes * seen:
            kept += size
            yield sentence


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_SENTENCE_CHARS):
                yield line[start : start + MAX_SENTENCE_CHARS]


def _vocab_size_error(error: RuntimeError, vocab_size: int) -> Exception:
    """SentencePiece's complaint about the vocabulary size in terms of the config; anything else unchanged."""
    if too_high := re.search(r"Vocabulary size too high.*<= (\d+)", str(error)):
        return UserError(
            f"model.vocab_size={vocab_size} is more than the training text can fill: "
            f"set model.vocab_size={too_high[1]} or less, or train on more text"
        )
    if too_low := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return UserError(
            f"model.vocab_size={vocab_size} has no room for the characters of the training text: "
            f"set model.vocab_size={too_low[1]} or more"
        )
    return error
