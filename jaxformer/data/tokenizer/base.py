"""The tokenizer interface, the byte tokenizer, and the special tokens of a model and its tokenizer.

`encode` adds no special tokens; training objectives add their own. `encode_prompt` and `encode_source` add the special
tokens that a trained model expects around a text.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizer.chat import render_chat
from jaxformer.errors import UserError
from jaxformer.rundir import write_file

BYTES_FILE = "tokenizer_bytes.json"  # not tokenizer.json, which is the name of Hugging Face's format


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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[byte + self.offset for byte in text.encode("utf-8")] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - self.offset for i in ids).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        return {BYTES_FILE: json.dumps({"kind": "bytes", "offset": self.offset}).encode()}


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
