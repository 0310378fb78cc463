"""SentencePiece models (arXiv:1808.06226), trained by `training` or by other programs.

Models from `training` round-trip text exactly, including white space, with one exception: U+2581, which SentencePiece
uses as the space marker, decodes to a space.
"""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from jaxformer.data.tokenizer.base import Tokenizer
from jaxformer.errors import UserError

SENTENCEPIECE_FILE = "tokenizer.model"


class SentencePiece(Tokenizer):
    """A SentencePiece model.

    If the model does not define pad, unk is used instead (Llama 2). If it does not define bos, pad is used instead, as
    T5 starts decoding with pad (arXiv:1910.10683)."""

    def __init__(self, model: bytes):
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)  # the constructor treats an empty model as no model
        self._model = model
        self.vocab_size = self._processor.vocab_size()
        self.pad_id = _first_defined(self._processor.pad_id(), self._processor.unk_id())
        self.bos_id = _first_defined(self._processor.bos_id(), self.pad_id)
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError(
                "the SentencePiece model has no eos id, which ends every document: train a model that has one"
            )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        if not ModelProto.FromString(self._model).normalizer_spec.add_dummy_prefix:
            return super().encode_words(sentences)
        return [self._processor.encode(list(words)) for words in sentences]  # the model itself adds the spaces

    def tokens(self) -> list[str]:
        return [self._processor.id_to_piece(id) for id in range(self.vocab_size)]

    def _with_new_tokens(self, tokens: list[str]) -> "SentencePiece":
        proto = ModelProto.FromString(self._model)
        for token in tokens:
            # Control symbols never result from text, whatever it contains.
            proto.pieces.add(piece=token, score=0.0, type=ModelProto.SentencePiece.CONTROL)
        return SentencePiece(proto.SerializeToString(deterministic=True))

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def files(self) -> dict[str, bytes]:
        return {SENTENCEPIECE_FILE: self._model}


def load_sentencepiece(path: str | Path) -> SentencePiece:
    """Load a SentencePiece `.model` file."""
    try:
        return SentencePiece(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"tokenizer '{path}' cannot be read ({error.strerror}): correct the path") from None
    except RuntimeError:
        raise UserError(f"tokenizer '{path}' is not a SentencePiece model: name a .model file") from None


def _first_defined(*ids: int) -> int:
    return next(i for i in ids if i >= 0)
