"""The tokenizer interface, the byte tokenizer, and the special tokens of a model with its tokenizer.

`encode` adds no special ids: objectives do. `encode_prompt` and `encode_source` add those that a trained model expects
around a text.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from etils import epath

from jaxformer.config import ModelConfig
from jaxformer.errors import UserError
from jaxformer.rundir import write_file

BYTES_FILE = "tokenizer_bytes.json"  # tokenizer.json is Hugging Face's name for its own format


class Tokenizer(ABC):
    """Text to ids below `vocab_size` and back. A special id is none where the tokenizer's files name no such token."""

    vocab_size: int
    pad_id: int | None
    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ids."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores where that helps."""

    def encode_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of source texts, without special ids; translation tokenizers encode another language here."""
        return self.encode_batch(texts)

    def encode_prompt(self, texts: Sequence[str]) -> list[list[int]]:
        """What a decoder continues: bos and the text."""
        return [[self.bos_id, *ids] for ids in self.encode_batch(texts)]

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """What an encoder reads: the text and eos."""
        return [[*ids, self.eos_id] for ids in self.encode_inputs(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without pad, bos and eos."""
        ids = [int(i) for i in ids]
        unknown = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if unknown is not None:
            raise UserError(f"id {unknown} is not below the tokenizer's vocabulary size {self.vocab_size}")
        return self._decode([i for i in ids if i not in (self.pad_id, self.bos_id, self.eos_id)])

    @property
    def digest(self) -> str:
        """A hash of the files; equal digests mean equal ids."""
        return hashlib.sha256(b"".join(content for _, content in sorted(self.files().items()))).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Write the files that `load_tokenizer` reads, each atomically."""
        for name, content in self.files().items():
            write_file(epath.Path(directory) / name, content)

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Names and contents of the tokenizer's files; the one that `load_tokenizer` looks for comes last."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


class Bytes(Tokenizer):
    """UTF-8 bytes after three special ids; encodes every text and needs no training."""

    vocab_size, pad_id, bos_id, eos_id = 259, 0, 1, 2
    offset = 3

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[byte + self.offset for byte in text.encode("utf-8")] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - self.offset for i in ids).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        return {BYTES_FILE: json.dumps({"kind": "bytes", "offset": self.offset}).encode()}


class SpecialTokens(NamedTuple):
    """The ids that open and close texts, in training and in decoding alike."""

    bos: int | None
    start: int | None
    """What the decoder of an encoder-decoder reads first."""
    eos: tuple[int, ...]
    """Any of them ends a text."""

    @property
    def first_eos(self) -> int:
        """The eos that training puts at the end of a text; raises if there is none."""
        if not self.eos:
            raise UserError(
                "neither the model nor its tokenizer has an eos token, which ends every training text: set "
                "model.special.eos, or name an eos_token in tokenizer_config.json"
            )
        return self.eos[0]


def special_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> SpecialTokens:
    """The model's special ids, and those of its tokenizer where the model names none."""
    bos, start, eos = model.special.bos, model.special.decoder_start, model.special.eos
    if tokenizer is not None:
        eos = (tokenizer.eos_id,) if not eos and tokenizer.eos_id is not None else eos
        bos = tokenizer.bos_id if bos is None else bos
        # A tokenizer without bos begins texts with its eos, as GPT-2 does; one without both uses the model's eos.
        bos = eos[0] if bos is None and eos else bos
    return SpecialTokens(bos, bos if start is None else start, eos)
