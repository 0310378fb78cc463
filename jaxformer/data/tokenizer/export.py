"""Exports byte, word and SentencePiece tokenizers as files for `transformers.AutoTokenizer`, with the same ids.

Known differences for SentencePiece models:
* Bytes that are not valid UTF-8 decode to one U+FFFD per byte, and unknown pieces to nothing instead of U+2047.
* Unigram: if two segmentations have the same score, the choice may differ, because it depends on the rounding of
  float32 sums in SentencePiece. Models from `training` have rounded scores to avoid this.
For model type `qwen2`, AutoTokenizer ignores the files and uses Qwen2Tokenizer, which gives different ids: load the
files with `transformers.PreTrainedTokenizerFast.from_pretrained` instead.
"""

import json
from collections.abc import Callable, Iterator
from typing import Literal

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.data.tokenizer.base import Bytes, Tokenizer
from jaxformer.data.tokenizer.huggingface import SETTINGS_FILE, TOKENIZER_FILE, HuggingFace
from jaxformer.data.tokenizer.pair import TokenizerPair
from jaxformer.data.tokenizer.sentencepiece import SENTENCEPIECE_FILE, SentencePiece
from jaxformer.data.tokenizer.translation import (
    SOURCE_FILE,
    TARGET_FILE,
    TARGET_VOCABULARY_FILE,
    VOCABULARY_FILE,
    Translation,
)
from jaxformer.data.tokenizer.words import WORD, Words
from jaxformer.errors import UserError

Shape = Literal["encoder-decoder", "decoder-only", "encoder-only", "embedding-only"]
Piece = ModelProto.SentencePiece
SPACE = "\u2581"  # SentencePiece's space marker
UNKNOWN = "\U0010ffff"  # a noncharacter, which Unicode will never assign
NEVER = -1e6  # a score below that of any segmentation into normal pieces


def huggingface_files(
    tokenizer: Tokenizer, shape: Shape, classifies: bool = False, has_types: bool = False
) -> dict[str, bytes]:
    """Return the names and contents of the files, including the tokenizer's own files.

    The exported tokenizer adds bos before the text of a decoder-only model, eos after the text of an encoder-decoder,
    and both for an encoder-only model. The files of a tokenizer from a Hugging Face directory are returned unchanged. A
    pair of SentencePiece models becomes a MarianTokenizer, the only class of transformers that has two vocabularies.

    Args:
      classifies: whether the model classifies texts or tokens, which have bos and eos in models of every shape.
      has_types: whether the model has different embeddings for the two texts of a pair.
    """
    if isinstance(tokenizer, HuggingFace | Translation):
        return tokenizer.files()
    if isinstance(tokenizer, TokenizerPair):
        return _pair_files(tokenizer)
    backend = CONVERTERS[type(tokenizer)](tokenizer)
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    if tokenizer.mask_id is not None:
        roles["mask_token"] = tokenizer.mask_id
    names = {role: backend.id_to_token(id) for role, id in roles.items()}
    is_sequence = classifies or shape == "encoder-only"
    template = _sequence_template(tokenizer, names) if is_sequence else _template(names, shape)
    special = [(token, backend.token_to_id(token)) for token in {names["bos_token"], names["eos_token"]}]
    backend.post_processor = processors.TemplateProcessing(*template, special_tokens=special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # the text "</s>" is not the eos token
        "model_input_names": ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
        **names,
    }
    return tokenizer.files() | {
        SETTINGS_FILE: json.dumps(settings, indent=2).encode(),
        TOKENIZER_FILE: backend.to_str(pretty=True).encode(),
    }


def _template(names: dict[str, str], shape: Shape) -> tuple[list[str], list[str]]:
    """The special tokens around a text and around a pair of texts, as in generation."""
    bos, eos = names["bos_token"], names["eos_token"]
    if shape == "decoder-only":
        return [bos, "$A"], [bos, "$A", "$B"]
    return ["$A", eos], ["$A", eos, "$B", eos]


def _sequence_template(tokenizer: Tokenizer, names: dict[str, str]) -> tuple[list[str], list[str]]:
    """The same as in `Tokenizer.encode_sequence`, with the token types of a pair."""
    begin = [] if tokenizer.bos_id == tokenizer.pad_id else [f"{names['bos_token']}:0"]
    eos = names["eos_token"]
    return [*begin, "$A:0", f"{eos}:0"], [*begin, "$A:0", f"{eos}:0", "$B:1", f"{eos}:1"]


# ---------------------------------------------------------------- two vocabularies
def _pair_files(pair: TokenizerPair) -> dict[str, bytes]:
    if not (isinstance(pair.source, SentencePiece) and isinstance(pair.target, SentencePiece)):
        kinds = f"{type(pair.source).__name__} and {type(pair.target).__name__}"
        raise UserError(
            f"the two tokenizers ({kinds}) cannot be exported: MarianTokenizer, the only class of "
            "transformers with two vocabularies, needs two SentencePiece models"
        )
    models = [tokenizer.files()[SENTENCEPIECE_FILE] for tokenizer in (pair.source, pair.target)]
    source_ids, target_ids = (_piece_ids(model) for model in models)
    for token in MARIAN_TOKENS.values():
        if token not in source_ids or source_ids[token] != target_ids.get(token):
            raise UserError(
                f"the two SentencePiece models cannot be exported: '{token}' has the id {source_ids.get(token)} in "
                f"the source and {target_ids.get(token)} in the target, but MarianTokenizer needs the same id in both"
            )
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True, **MARIAN_TOKENS}
    return {
        VOCABULARY_FILE: json.dumps(source_ids, ensure_ascii=False).encode(),
        TARGET_VOCABULARY_FILE: json.dumps(target_ids, ensure_ascii=False).encode(),
        TARGET_FILE: models[1],
        SETTINGS_FILE: json.dumps(settings, indent=2).encode(),
        SOURCE_FILE: models[0],
    }


MARIAN_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _piece_ids(model: bytes) -> dict[str, int]:
    return {piece.piece: id for id, piece in enumerate(ModelProto.FromString(model).pieces)}


# ---------------------------------------------------------------- bytes
def _from_bytes(tokenizer: Bytes) -> tokenizers.Tokenizer:
    special = {"<pad>": tokenizer.pad_id, "<s>": tokenizer.bos_id, "</s>": tokenizer.eos_id}
    special |= {token: id for id, token in enumerate(tokenizer.tokens()) if id >= Bytes.vocab_size}  # extra tokens
    vocabulary = special | {letter: byte + tokenizer.offset for byte, letter in enumerate(_byte_letters())}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return backend


def _byte_letters() -> list[str]:
    """Return GPT-2's character for each byte: the byte itself if printable, else the next character from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


# ---------------------------------------------------------------- words
def _from_words(tokenizer: Words) -> tokenizers.Tokenizer:
    vocabulary = {token: id for id, token in enumerate(tokenizer.tokens())}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=tokenizer.tokens()[tokenizer.unk_id]))
    if tokenizer.lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokenizer.special_tokens])
    return backend


# ---------------------------------------------------------------- SentencePiece
def _from_sentencepiece(tokenizer: SentencePiece) -> tokenizers.Tokenizer:
    proto = ModelProto.FromString(tokenizer.files()[SENTENCEPIECE_FILE])
    obstacle = next(_obstacles(proto), None)
    if obstacle is not None:
        raise UserError(
            f"the SentencePiece model cannot be written as {TOKENIZER_FILE}: {obstacle}; export without the tokenizer"
        )
    backend = tokenizers.Tokenizer(MODELS[proto.trainer_spec.model_type](proto))
    backend.normalizer = normalizers.Sequence(list(_normalizers(proto)))
    backend.decoder = decoders.Sequence(list(_decoders(proto)))
    if proto.trainer_spec.model_type == TrainerSpec.UNIGRAM and proto.trainer_spec.byte_fallback:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(_unknown_characters(proto)), "isolated")
    special = [piece.piece for piece in proto.pieces if piece.type in (Piece.CONTROL, Piece.UNKNOWN)]
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in _user_defined(proto)])
    return backend


CONVERTERS: dict[type[Tokenizer], Callable[[Tokenizer], tokenizers.Tokenizer]] = {
    Bytes: _from_bytes,
    SentencePiece: _from_sentencepiece,
    Words: _from_words,
}


def _obstacles(proto: ModelProto) -> Iterator[str]:
    """Yield the reasons why a `tokenizer.json` cannot represent the model."""
    normal = {piece.piece for piece in proto.pieces if piece.type == Piece.NORMAL}
    spec = proto.normalizer_spec
    if proto.trainer_spec.model_type not in MODELS:
        yield "it is neither unigram nor bpe"
    if proto.trainer_spec.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        yield "it does not mark a space as the prefix of the next word"
    if _user_defined(proto) and (spec.add_dummy_prefix or spec.remove_extra_whitespaces):
        yield "it combines user-defined symbols with add_dummy_prefix or remove_extra_whitespaces"
    if any(piece.type == Piece.UNUSED for piece in proto.pieces):
        yield "it has unused pieces"
    if lone := {char for piece in normal for char in piece} - normal:
        yield f"{min(lone)!r} is part of pieces but not a piece itself"
    if proto.trainer_spec.model_type == TrainerSpec.BPE and (tied := _tied_pieces(proto)):
        yield f"the bpe pieces {tied} have the same score"


def _tied_pieces(proto: ModelProto) -> list[str]:
    """Return pieces with the same score, for which the order of BPE merges is undefined.

    Repetitions of a single character, such as the indentation pieces of Llama 2, need no order."""
    by_score: dict[float, list[str]] = {}
    for piece in proto.pieces:
        if piece.type == Piece.NORMAL and len(piece.piece) > 1:
            by_score.setdefault(piece.score, []).append(piece.piece)
    return next((tied for tied in by_score.values() if len(tied) > 1 and len(set("".join(tied))) > 1), [])


def _unigram(proto: ModelProto) -> models.Unigram:
    # Byte and control pieces must not match text that spells their names, such as `<0x41>`.
    scores = [(piece.piece, piece.score if piece.type == Piece.NORMAL else NEVER) for piece in proto.pieces]
    return models.Unigram(scores, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


def _unknown_characters(proto: ModelProto) -> str:
    """Return a regular expression for the characters that occur in no piece.

    The unigram model of the tokenizers library scores an unknown character even lower than `NEVER`, so it would prefer
    a byte or control piece whose name occurs in the text. To prevent this, a pre-tokenizer isolates unknown characters
    in models with byte fallback, and a normalizer replaces them by `UNKNOWN` in models without it."""
    known = {char for piece in proto.pieces if piece.type == Piece.NORMAL for char in piece.piece}
    return "[^" + "".join(f"\\x{{{ord(char):x}}}" for char in sorted(known)) + "]"


def _bpe(proto: ModelProto) -> models.BPE:
    return models.BPE(
        {piece.piece: id for id, piece in enumerate(proto.pieces)},
        _merges(proto),
        unk_token=proto.pieces[proto.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _merges(proto: ModelProto) -> list[tuple[str, str]]:
    """Return all merges: every pair of pieces whose concatenation is a piece, in order of decreasing score.

    SentencePiece merges the pair whose result has the highest score, and the leftmost of equal pairs. Two pairs with
    the same result can overlap only in a repetition of one character; there, the longer left part comes first.
    """
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == Piece.NORMAL}
    splits = ((whole, whole[:i], whole[i:]) for whole in scores for i in range(1, len(whole)))
    pairs = [split for split in splits if split[1] in scores and split[2] in scores]
    pairs.sort(key=lambda split: (-scores[split[0]], -len(split[1])))
    return [(left, right) for _, left, right in pairs]


MODELS = {TrainerSpec.UNIGRAM: _unigram, TrainerSpec.BPE: _bpe}


def _normalizers(proto: ModelProto) -> Iterator[normalizers.Normalizer]:
    spec = proto.normalizer_spec
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(Regex("^ +| +$"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)
    if proto.trainer_spec.model_type == TrainerSpec.UNIGRAM and not proto.trainer_spec.byte_fallback:
        yield normalizers.Replace(Regex(_unknown_characters(proto) + "+"), UNKNOWN)


def _decoders(proto: ModelProto) -> Iterator[decoders.Decoder]:
    yield decoders.Replace(SPACE, " ")
    yield decoders.ByteFallback()
    yield decoders.Fuse()
    if proto.normalizer_spec.add_dummy_prefix or proto.normalizer_spec.remove_extra_whitespaces:
        yield decoders.Strip(" ", left=1, right=0)


def _user_defined(proto: ModelProto) -> list[str]:
    return [piece.piece for piece in proto.pieces if piece.type == Piece.USER_DEFINED]
