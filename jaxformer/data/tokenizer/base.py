"""The tokenizer interface, the byte tokenizer, and the special tokens of a model and its tokenizer.

`encode` adds no special tokens; training objectives add their own. `encode_prompt` and `encode_source` add the special
tokens that a trained model expects around a text.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizer.chat import render_chat
from jaxformer.errors import UserError
from jaxformer.rundir import write_file

BYTES_FILE = "tokenizer_bytes.json"  # not tokenizer.json, which is the name of Hugging Face's format
MASK_TOKENS = ("<mask>", "[MASK]")
SPACES = ("\u2581", "\u0120")  # the first character of a token after a space: SentencePiece's and GPT-2's
LINE_BREAKS = ("\n", "\u010a")  # a line break, and GPT-2's character for it


class TypedIds(NamedTuple):
    """The ids of a text or of a pair of texts with special tokens, and their token types."""

    ids: list[int]
    types: list[int]


class Tokenizer(ABC):
    """Converts text to ids below `vocab_size` and back. A special id is None if the files do not define that token.

    Source texts have ids below `source_vocab_size`, which differs if the source has its own vocabulary."""

    vocab_size: int
    pad_id: int | None
    bos_id: int | None
    eos_id: int | None

    @cached_property
    def source_vocab_size(self) -> int:
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Encode a text without special tokens."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts without special tokens, in parallel where the tokenizer supports it."""

    def encode_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode source texts without special tokens; translation tokenizers expect the source language."""
        return self.encode_batch(texts)

    def encode_prompt(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode prompts for a decoder: bos, then the text."""
        return [[self.bos_id, *ids] for ids in self.encode_batch(texts)]

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode inputs for an encoder: the text, then eos."""
        return [[*ids, self.eos_id] for ids in self.encode_inputs(texts)]

    def encode_sequence(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, max_length: int | None = None
    ) -> list[TypedIds]:
        """Encode texts, or pairs of texts, for classification: bos, text, eos, and for a pair the second text and eos.

        Args:
          max_length: shorten the texts, the longer one of a pair first, so that all ids fit. None: no limit.
        """
        first = self.encode_batch(texts)
        second = [None] * len(first) if pairs is None else self.encode_batch(pairs)
        # Some tokenizers define no bos and use pad instead; pad must not begin a text.
        begin = [] if self.bos_id in (None, self.pad_id) else [self.bos_id]
        end = [] if self.eos_id is None else [self.eos_id]
        return [_join_pair(a, b, begin, end, max_length) for a, b in zip(first, second, strict=True)]

    def encode_masked(self, text: str) -> list[int]:
        """Encode a text in which `<mask>` or `[MASK]` stands for a missing word, with bos and eos around it."""
        parts = re.split("|".join(map(re.escape, MASK_TOKENS)), text)
        # A masked token includes the space before its word.
        parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
        ids = self.encode_batch(parts)
        joined = ids[0] + [id for part in ids[1:] for id in (self.mask_id, *part)]
        return [self.bos_id, *joined, self.eos_id]

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Encode sentences that are split into words: the ids of every word, without special tokens."""
        spaced = [[f" {word}" if i else word for i, word in enumerate(words)] for words in sentences]
        ids = iter(self.encode_batch([word for words in spaced for word in words]))
        return [[next(ids) for _ in words] for words in spaced]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode a conversation up to the beginning of the reply; the chat template writes all special tokens."""
        if self.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template: chat needs the tokenizer.json of a Hugging Face directory, and "
                "its chat_template in tokenizer_config.json or in chat_template.jinja"
            )
        return self.encode(render_chat(self.chat_template, messages, self.named_tokens))

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that writes a conversation as text; only Hugging Face tokenizers can have one."""
        return None

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens that a chat template can use, by name."""
        return {}

    # ------------------------------------------------------------ the vocabulary
    @abstractmethod
    def tokens(self) -> list[str]:
        """All tokens as they are written in the vocabulary, in the order of their ids."""

    @cached_property
    def _ids_by_token(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self.tokens())}

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the vocabulary does not have it."""
        return self._ids_by_token.get(token)

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token of masked language models."""
        return next((id for id in map(self.token_id, MASK_TOKENS) if id is not None), None)

    def with_tokens(self, tokens: Sequence[str]) -> "Tokenizer":
        """This tokenizer with additional special tokens, which no text is encoded to; known ones are not added."""
        new = [token for token in dict.fromkeys(tokens) if self.token_id(token) is None]
        return self._with_new_tokens(new) if new else self

    def _with_new_tokens(self, tokens: list[str]) -> "Tokenizer":
        raise UserError(f"extra_tokens={tokens}: a tokenizer of this kind cannot take additional tokens")

    @cached_property
    def word_starts(self) -> np.ndarray:
        """For every id, whether the token begins a word."""
        return np.array([token.startswith((*SPACES, *LINE_BREAKS, " ", "\t")) for token in self.tokens()])

    @cached_property
    def sentence_ends(self) -> np.ndarray:
        """For every id, whether the token ends a sentence or a line."""
        return np.array([token.endswith((".", "!", "?", *LINE_BREAKS)) for token in self.tokens()])

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text, dropping pad, bos and eos."""
        ids = [int(i) for i in ids]
        unknown = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if unknown is not None:
            raise UserError(f"id {unknown} is outside the tokenizer's vocabulary of {self.vocab_size} ids")
        return self._decode([i for i in ids if i not in (self.pad_id, self.bos_id, self.eos_id)])

    @property
    def digest(self) -> str:
        """A hash of the files; tokenizers with equal digests give equal ids."""
        return hashlib.sha256(b"".join(content for _, content in sorted(self.files().items()))).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Write the files that `load_tokenizer` reads; each file is written atomically."""
        for name, content in self.files().items():
            path = epath.Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name; the one that `load_tokenizer` looks for comes last."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


class Bytes(Tokenizer):
    """One id per UTF-8 byte, and three special ids; encodes any text and needs no training."""

    vocab_size, pad_id, bos_id, eos_id = 259, 0, 1, 2
    offset = 3

    def __init__(self, extra_tokens: Sequence[str] = ()) -> None:
        self._extra_tokens = tuple(extra_tokens)
        self.vocab_size = Bytes.vocab_size + len(self._extra_tokens)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[byte + self.offset for byte in text.encode("utf-8")] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - self.offset for i in ids if i < Bytes.vocab_size).decode("utf-8", errors="replace")

    def tokens(self) -> list[str]:
        return ["<pad>", "<s>", "</s>", *map(chr, range(256)), *self._extra_tokens]

    def _with_new_tokens(self, tokens: list[str]) -> "Bytes":
        return Bytes((*self._extra_tokens, *tokens))

    def files(self) -> dict[str, bytes]:
        fields = {"kind": "bytes", "offset": self.offset}
        if self._extra_tokens:
            fields["extra_tokens"] = list(self._extra_tokens)
        return {BYTES_FILE: json.dumps(fields).encode()}


def load_bytes(path: str | Path) -> Bytes:
    """Load the byte tokenizer, whose file holds its additional tokens."""
    try:
        return Bytes(json.loads(Path(path).read_text(encoding="utf-8")).get("extra_tokens", ()))
    except (ValueError, AttributeError):
        raise UserError(f"'{path}' does not hold a JSON object: restore the file") from None


def _join_pair(
    first: list[int], second: list[int] | None, begin: list[int], end: list[int], max_length: int | None
) -> TypedIds:
    num_special = len(begin) + len(end) * (1 if second is None else 2)
    if max_length is not None:
        first, second = _shorten(first, second, max(max_length - num_special, 0))
    left = [*begin, *first, *end]
    right = [] if second is None else [*second, *end]
    return TypedIds(left + right, [0] * len(left) + [1] * len(right))


def _shorten(first: list[int], second: list[int] | None, length: int) -> tuple[list[int], list[int] | None]:
    """Shorten a text or a pair to `length` ids in total, the longer text of a pair first."""
    if second is None:
        return first[:length], None
    half = length // 2
    num_second = min(len(second), max(half, length - len(first)))
    return first[: length - num_second], second[:num_second]


class SpecialTokens(NamedTuple):
    """The ids that begin and end texts, both in training and in decoding."""

    bos: int | None
    start: int | None
    """The decoder start token of an encoder-decoder."""
    eos: tuple[int, ...]
    """Each of these ids ends a text."""

    @property
    def first_eos(self) -> int:
        """The eos id that training appends to a text; raises if there is none."""
        if not self.eos:
            raise UserError(
                "neither the model nor its tokenizer has an eos token, which ends every training text: set "
                "model.special.eos, or name an eos_token in tokenizer_config.json"
            )
        return self.eos[0]


def special_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> SpecialTokens:
    """Return the special ids of a model, or those of its tokenizer where the model config has none."""
    bos, start, eos = model.special.bos, model.special.decoder_start, model.special.eos
    if tokenizer is not None:
        eos = (tokenizer.eos_id,) if not eos and tokenizer.eos_id is not None else eos
        bos = tokenizer.bos_id if bos is None else bos
        # Without bos, texts begin with eos, as in GPT-2.
        bos = eos[0] if bos is None and eos else bos
    return SpecialTokens(bos, bos if start is None else start, eos)
