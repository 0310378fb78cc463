"""Plain bytes as tokens."""

import json
from collections.abc import Sequence

from jaxformer.data.tokenizer.base import Tokenizer

BYTES_FILE = "tokenizer_bytes.json"  # tokenizer.json is Hugging Face's name for its own format


class Bytes(Tokenizer):
    """UTF-8 bytes after three special ids; knows every text and needs no training."""

    vocab_size, pad_id, bos_id, eos_id = 259, 0, 1, 2
    offset = 3

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[byte + self.offset for byte in text.encode("utf-8")] for text in texts]

    def _text(self, ids: list[int]) -> str:
        return bytes(i - self.offset for i in ids).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        return {BYTES_FILE: json.dumps({"kind": "bytes", "offset": self.offset}).encode()}
