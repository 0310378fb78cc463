"""OPUS-MT tokenizers: one SentencePiece model per language, with a shared vocabulary or with one for each language.

Ids equal those of transformers' MarianTokenizer if sacremoses is not installed; with sacremoses it also normalises
punctuation. For models with several target languages, a source text starts with a language code such as `>>deu<<`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import sentencepiece

from jaxformer.data.tokenizer.base import Tokenizer
from jaxformer.errors import UserError

SOURCE_FILE, TARGET_FILE, VOCABULARY_FILE = "source.spm", "target.spm", "vocab.json"
TARGET_VOCABULARY_FILE = "target_vocab.json"
SETTINGS_FILE = "tokenizer_config.json"
SIDE_FILES = (TARGET_VOCABULARY_FILE, SETTINGS_FILE, "special_tokens_map.json")
EOS, UNKNOWN, PAD = "</s>", "<unk>", "<pad>"
CODE = re.compile(r">>.*?<<")


class Translation(Tokenizer):
    """`encode` expects text in the target language, `encode_inputs` and `encode_source` in the source language.

    If `separate_vocabs` is set in `tokenizer_config.json`, `vocab.json` has the ids of the source and
    `target_vocab.json` those of the target. Source and target ids each use the special ids of their vocabulary;
    transformers uses those of the source for both.

    Args:
        files: file contents by name: the two models, the vocabulary, and the `SIDE_FILES` that exist.
    """

    def __init__(self, files: Mapping[str, bytes]):
        self._files = dict(files)
        self._source, self._target = (_model(files[name], name) for name in (SOURCE_FILE, TARGET_FILE))
        self._source_ids = self._ids = _vocabulary(files, VOCABULARY_FILE)
        if _has_separate_vocabularies(files):
            self._ids = _vocabulary(files, TARGET_VOCABULARY_FILE)
        self.source_vocab_size = max(self._source_ids.values()) + 1
        self._pieces = {id: piece for piece, id in self._ids.items()}
        self.vocab_size = max(self._pieces) + 1
        self.eos_id, self.pad_id = self._ids[EOS], self._ids[PAD]
        self.bos_id = self.pad_id  # Marian's decoder starts with pad

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return _encode(self._target, self._ids, texts)

    def encode_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        return _encode(self._source, self._source_ids, texts)

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*ids, self._source_ids[EOS]] for ids in self.encode_inputs(texts)]

    def _decode(self, ids: list[int]) -> str:
        pieces = [self._pieces.get(id, UNKNOWN) for id in ids if id != self._ids[UNKNOWN]]
        return self._target.decode_pieces(pieces).replace("\u2581", " ").strip()

    def tokens(self) -> list[str]:
        return [self._pieces.get(id, UNKNOWN) for id in range(self.vocab_size)]

    def files(self) -> dict[str, bytes]:
        last = {SOURCE_FILE: self._files[SOURCE_FILE]}
        return {name: content for name, content in self._files.items() if name != SOURCE_FILE} | last


def load_translation(path: str | Path) -> Translation:
    """Load the tokenizer from the directory of a `source.spm` file."""
    directory = Path(path).parent
    missing = [name for name in (TARGET_FILE, VOCABULARY_FILE) if not (directory / name).is_file()]
    if missing:
        raise UserError(f"'{directory}' has {SOURCE_FILE} but not {missing[0]}: fetch it as well")
    names = (SOURCE_FILE, TARGET_FILE, VOCABULARY_FILE, *SIDE_FILES)
    return Translation({n: (directory / n).read_bytes() for n in names if (directory / n).is_file()})


def _model(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(content)
    except RuntimeError:
        raise UserError(f"{name} is not a SentencePiece model: fetch it again") from None
    return model


def _encode(
    model: sentencepiece.SentencePieceProcessor, ids: Mapping[str, int], texts: Sequence[str]
) -> list[list[int]]:
    rows = []
    for text in texts:
        code = CODE.match(text)
        pieces = [] if code is None else [code[0]]
        pieces += model.encode(text[code.end() :] if code else text, out_type=str)
        rows.append([ids.get(piece, ids[UNKNOWN]) for piece in pieces])
    return rows


def _vocabulary(files: Mapping[str, bytes], name: str) -> dict[str, int]:
    if name not in files:
        raise UserError(f"{SETTINGS_FILE} sets separate_vocabs, but there is no {name}: fetch it as well")
    try:
        ids = {str(piece): int(id) for piece, id in json.loads(files[name]).items()}
    except (ValueError, AttributeError, TypeError):
        raise UserError(f"{name} does not map pieces to ids: fetch it again") from None
    missing = [piece for piece in (EOS, UNKNOWN, PAD) if piece not in ids]
    if missing:
        raise UserError(f"{name} has no '{missing[0]}': it does not belong to {SOURCE_FILE}")
    return ids


def _has_separate_vocabularies(files: Mapping[str, bytes]) -> bool:
    try:
        return bool(json.loads(files.get(SETTINGS_FILE, b"{}")).get("separate_vocabs"))
    except (ValueError, AttributeError):
        raise UserError(f"{SETTINGS_FILE} does not hold a JSON object: fetch it again") from None
