"""Our tokenizers as files that `transformers.AutoTokenizer` loads: the same ids, and the same texts from them.

What differs for SentencePiece models:
* ids that spell no UTF-8 come back as U+FFFD for each byte of the run, and unknown pieces as nothing, not as U+2047;
* unigram: of two paths with the same score, a model not trained here may take the other, as SentencePiece decides by
  the rounding of its float32 sums (`training` rounds scores so that it need not).
For models of the type `qwen2`, AutoTokenizer takes a class of its own whatever the files say, which gives other ids:
there, `transformers.PreTrainedTokenizerFast.from_pretrained` reads them as they are.
"""

import json
from collections.abc import Callable, Iterator
from typing import Literal

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.data.tokenizer.base import Tokenizer
from jaxformer.data.tokenizer.bytes import Bytes
from jaxformer.data.tokenizer.huggingface import SETTINGS_FILE, TOKENIZER_FILE, HuggingFace
from jaxformer.data.tokenizer.sentencepiece import SENTENCEPIECE_FILE, SentencePiece
from jaxformer.data.tokenizer.translation import Translation
from jaxformer.errors import UserError

Shape = Literal["encoder-decoder", "decoder-only", "encoder-only"]
Piece = ModelProto.SentencePiece
SPACE = "\u2581"  # SentencePiece's mark for a space
UNKNOWN = "\U0010ffff"  # by Unicode's promise never a character
NEVER = -1e6  # a score that no path through real pieces falls to


def huggingface_files(tokenizer: Tokenizer, shape: Shape) -> dict[str, bytes]:
    """Names and contents of the files; a text gets bos in front for a decoder, eos at its end for an encoder.

    A tokenizer's own files are among them. One that came from Hugging Face keeps them as they were."""
    if isinstance(tokenizer, HuggingFace | Translation):
        return tokenizer.files()
    backend = CONVERTERS[type(tokenizer)](tokenizer)
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {role: backend.id_to_token(id) for role, id in roles.items()}
    backend.post_processor = _template(backend, names, shape)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text that spells </s> means just that
        **names,
    }
    return tokenizer.files() | {
        SETTINGS_FILE: json.dumps(settings, indent=2).encode(),
        TOKENIZER_FILE: backend.to_str(pretty=True).encode(),
    }


def _template(backend: tokenizers.Tokenizer, names: dict[str, str], shape: Shape) -> processors.TemplateProcessing:
    bos, eos = names["bos_token"], names["eos_token"]
    if shape == "decoder-only":
        single, pair = [bos, "$A"], [bos, "$A", "$B"]
    else:
        single, pair = ["$A", eos], ["$A", eos, "$B", eos]
    special = [(token, backend.token_to_id(token)) for token in {bos, eos}]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


# ---------------------------------------------------------------- bytes
def _from_bytes(tokenizer: Bytes) -> tokenizers.Tokenizer:
    special = {"<pad>": tokenizer.pad_id, "<s>": tokenizer.bos_id, "</s>": tokenizer.eos_id}
    vocabulary = special | {letter: byte + tokenizer.offset for byte, letter in enumerate(_byte_letters())}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return backend


def _byte_letters() -> list[str]:
    """The letter GPT-2 writes for each byte: itself where it can be seen, else the next one from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]


# ---------------------------------------------------------------- SentencePiece
def _from_sentencepiece(tokenizer: SentencePiece) -> tokenizers.Tokenizer:
    proto = ModelProto.FromString(tokenizer.files()[SENTENCEPIECE_FILE])
    obstacle = next(_obstacles(proto), None)
    if obstacle is not None:
        raise UserError(
            f"the SentencePiece model has no equal in {TOKENIZER_FILE}: {obstacle}; export without the tokenizer"
        )
    backend = tokenizers.Tokenizer(MODELS[proto.trainer_spec.model_type](proto))
    backend.normalizer = normalizers.Sequence(list(_normalizers(proto)))
    backend.decoder = decoders.Sequence(list(_decoders(proto)))
    if proto.trainer_spec.model_type == TrainerSpec.UNIGRAM and proto.trainer_spec.byte_fallback:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(_unknown(proto)), "isolated")
    special = [piece.piece for piece in proto.pieces if piece.type in (Piece.CONTROL, Piece.UNKNOWN)]
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in _user_defined(proto)])
    return backend


CONVERTERS: dict[type[Tokenizer], Callable[[Tokenizer], tokenizers.Tokenizer]] = {
    Bytes: _from_bytes,
    SentencePiece: _from_sentencepiece,
}


def _obstacles(proto: ModelProto) -> Iterator[str]:
    """What a `tokenizer.json` cannot say."""
    normal = {piece.piece for piece in proto.pieces if piece.type == Piece.NORMAL}
    spec = proto.normalizer_spec
    if proto.trainer_spec.model_type not in MODELS:
        yield "it is neither unigram nor bpe"
    if proto.trainer_spec.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        yield "it marks spaces in another way than before a word"
    if _user_defined(proto) and (spec.add_dummy_prefix or spec.remove_extra_whitespaces):
        yield "user-defined symbols together with add_dummy_prefix or remove_extra_whitespaces"
    if any(piece.type == Piece.UNUSED for piece in proto.pieces):
        yield "it has unused pieces"
    if lone := {char for piece in normal for char in piece} - normal:
        yield f"{min(lone)!r} is part of pieces but no piece itself"
    if proto.trainer_spec.model_type == TrainerSpec.BPE and (tied := _tied(proto)):
        yield f"the bpe pieces {tied} have the same score"


def _tied(proto: ModelProto) -> list[str]:
    """Pieces that no order of merges can tell apart; repetitions of one character (Llama 2's indentations) it can."""
    by_score: dict[float, list[str]] = {}
    for piece in proto.pieces:
        if piece.type == Piece.NORMAL and len(piece.piece) > 1:
            by_score.setdefault(piece.score, []).append(piece.piece)
    return next((tied for tied in by_score.values() if len(tied) > 1 and len(set("".join(tied))) > 1), [])


def _unigram(proto: ModelProto) -> models.Unigram:
    # Pieces that only byte fall-back or the template may give must not be found in a text that spells them.
    scores = [(piece.piece, piece.score if piece.type == Piece.NORMAL else NEVER) for piece in proto.pieces]
    return models.Unigram(scores, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


def _unknown(proto: ModelProto) -> str:
    """A pattern of the characters that are part of no piece.

    The unigram model of the library scores them below every piece, also below those that must not be found, and would
    rather find one of these in a text that spells its name: where a character falls back on bytes it is cut off from
    its neighbours, which changes nothing else, and where it does not, another takes its place."""
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
    """Every pair of pieces that makes a piece, best piece first.

    SentencePiece merges the pair whose result scores best and of equal ones the leftmost. Two pairs with one result
    overlap only in a repetition, whose rest stands at its right end: the pair with the longer left part."""
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
        yield normalizers.Replace(Regex(_unknown(proto) + "+"), UNKNOWN)


def _decoders(proto: ModelProto) -> Iterator[decoders.Decoder]:
    yield decoders.Replace(SPACE, " ")
    yield decoders.ByteFallback()
    yield decoders.Fuse()
    if proto.normalizer_spec.add_dummy_prefix or proto.normalizer_spec.remove_extra_whitespaces:
        yield decoders.Strip(" ", left=1, right=0)


def _user_defined(proto: ModelProto) -> list[str]:
    return [piece.piece for piece in proto.pieces if piece.type == Piece.USER_DEFINED]
