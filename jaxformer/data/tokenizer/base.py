"""What every tokenizer is: ids, special ids, and files.

`encode` adds no special ids: objectives do. `encode_prompt` and `encode_source` add what a trained model expects
around a text.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from etils import epath

from jaxformer.errors import UserError
from jaxformer.rundir import write_file


class Tokenizer(ABC):
    """Text to ids below `vocab_size` and back."""

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores where that helps."""

    def encode_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for what an encoder reads, where its language has rules of its own."""
        return self.encode_batch(texts)

    def encode_prompt(self, texts: Sequence[str]) -> list[list[int]]:
        """What a decoder continues: bos and the text."""
        return [[self.bos_id, *ids] for ids in self.encode_batch(texts)]

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """What an encoder reads: the text and eos."""
        return [[*ids, self.eos_id] for ids in self.encode_inputs(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; pad, bos and eos are dropped."""
        ids = [int(i) for i in ids]
        unknown = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if unknown is not None:
            raise UserError(f"id {unknown} is not below the tokenizer's vocabulary size {self.vocab_size}")
        return self._text([i for i in ids if i not in (self.pad_id, self.bos_id, self.eos_id)])

    @property
    def digest(self) -> str:
        """The same for tokenizers with the same files, and so the same ids."""
        return hashlib.sha256(b"".join(content for _, content in sorted(self.files().items()))).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Write the files `load_tokenizer` reads, each whole or not at all."""
        for name, content in self.files().items():
            write_file(epath.Path(directory) / name, content)

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Names and contents of the tokenizer's files; the one that `load_tokenizer` looks for comes last."""

    @abstractmethod
    def _text(self, ids: list[int]) -> str: ...
