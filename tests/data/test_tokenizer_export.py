"""Tokenizers exported as Hugging Face files: the same ids as before, both in jaxformer and in transformers."""

import argparse
import io
import json
import os
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from jaxformer.config import SentencePieceTokenizer
from jaxformer.data import (
    Bytes,
    HuggingFace,
    SentencePiece,
    Tokenizer,
    huggingface_files,
    load_sentencepiece,
    train_sentencepiece,
)
from jaxformer.data.tokenizer import find_tokenizer
from jaxformer.errors import UserError

LIBRARY = Path(argparse.__file__).parent
SOURCE = (LIBRARY / "argparse.py").read_text(encoding="utf-8")
AWKWARD = [
    "def f(x):\n\tif  x:\r\n        return 1234567 \n\n\n   # é 漢字 \x00 <s></s><pad><unk><0x41>\n\u2028 ",
    *(" " * n + "x" + "=" * n for n in range(70)),
    *("ab" * n + "a" + "-" * n for n in range(40)),
    "😀😃 👩‍👩‍👧 naïve Ünï ①②Ⅳ ﬁ \u2581\u2581 \xa0\u3000 3.14159 0x1F 1,000",
    "",
    "\n",
    " \n \t\t\n  ",
]
ALPHABET = st.one_of(
    st.sampled_from(
        [" ", "  ", "\n", "\t", "▁", "def ", "return", "self.", "----", "00", "<s>", "</s>", "<unk>", "<0x41>"]
    ),
    st.characters(exclude_categories=("Cs",)),
)


def _train(algorithm: str, byte_fallback: bool, text: str) -> SentencePiece:
    cfg = SentencePieceTokenizer(algorithm=algorithm, byte_fallback=byte_fallback)
    return train_sentencepiece([text], 560, cfg)


# The last one is trained without the characters of special token names such as "<s>", so these are not pieces.
TRAINED = {
    "bpe": _train("bpe", True, SOURCE),
    "unigram": _train("unigram", True, SOURCE),
    "bpe without bytes": _train("bpe", False, SOURCE),
    "unigram without bytes": _train("unigram", False, SOURCE),
    "unigram without names": _train("unigram", False, SOURCE.translate({ord(c): " " for c in "<>/spadunk0x"})),
}
ALL: dict[str, Tokenizer] = TRAINED | {"bytes": Bytes()}
CONVERTED = {name: HuggingFace(huggingface_files(tokenizer, "decoder-only")) for name, tokenizer in ALL.items()}


# ---------------------------------------------------------------- equal ids
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "file", ["json/encoder.py", "html/entities.py", pytest.param("_pydecimal.py", marks=pytest.mark.slow)]
)
def test_ids_of_documents_and_lines(name, file):
    text = (LIBRARY / file).read_text(encoding="utf-8")
    texts = [text, *text.split("\n"), *AWKWARD]
    assert CONVERTED[name].encode_batch(texts) == ALL[name].encode_batch(texts)


@given(pieces=st.lists(ALPHABET, max_size=30))
def test_ids_of_any_text(pieces):
    text = "".join(pieces)
    for name, tokenizer in ALL.items():
        ids = tokenizer.encode(text)
        assert CONVERTED[name].encode(text) == ids
        if name in ("bpe", "unigram", "bytes"):  # without byte fallback, unknown characters are lost
            assert CONVERTED[name].decode(ids) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 258), max_size=20))
def test_decoding_of_any_bytes(ids):
    assert CONVERTED["bytes"].decode(ids) == Bytes().decode(ids)


@pytest.mark.parametrize("name", ALL)
def test_special_ids(name):
    ours, converted = ALL[name], CONVERTED[name]
    for field in ("pad_id", "bos_id", "eos_id", "vocab_size"):
        assert getattr(converted, field) == getattr(ours, field)


@pytest.mark.parametrize("name", ["bpe", "bytes"])
def test_extra_tokens_keep_their_ids(name):
    """A masked language model needs its mask token after an export, too."""
    ours = ALL[name].with_tokens(["<mask>", "<extra_id_0>"])
    converted = HuggingFace(huggingface_files(ours, "encoder-only"))
    assert converted.vocab_size == ours.vocab_size == ALL[name].vocab_size + 2
    assert converted.mask_id == ours.mask_id == ALL[name].vocab_size
    assert converted.token_id("<extra_id_0>") == ours.token_id("<extra_id_0>")
    text = "a <mask> and <extra_id_0>"
    assert converted.encode(text) == ours.encode(text), "no text is encoded to them"


# ---------------------------------------------------------------- in transformers
@pytest.mark.parametrize("name", ["bpe", "unigram", "bytes"])
@pytest.mark.parametrize(
    ("shape", "model_type"),
    [
        ("decoder-only", "gpt2"),
        ("decoder-only", "llama"),
        ("encoder-decoder", "t5"),
        ("encoder-decoder", "bart"),
        ("encoder-only", "bert"),
    ],
)
def test_transformers_loads_exported_tokenizers(tmp_path, name, shape, model_type):
    from transformers import AutoTokenizer

    for file, content in huggingface_files(ALL[name], shape).items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ALL[name]
    expected = {
        "decoder-only": ours.encode_prompt,
        "encoder-decoder": ours.encode_source,
        "encoder-only": lambda texts: [typed.ids for typed in ours.encode_sequence(texts)],
    }[shape](AWKWARD)
    assert theirs(AWKWARD)["input_ids"] == expected
    assert [theirs.decode(ids, skip_special_tokens=True) for ids in expected] == [ours.decode(ids) for ids in expected]
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize("name", ["bpe", "bytes"])
@pytest.mark.parametrize(
    ("shape", "model_type"), [("decoder-only", "llama"), ("encoder-decoder", "bart"), ("encoder-only", "bert")]
)
def test_exported_tokenizers_of_classifiers(tmp_path, name, shape, model_type):
    """Texts and pairs have the ids, and pairs the token types, that the classifier was trained on."""
    from transformers import AutoTokenizer

    has_types = shape == "encoder-only"
    for file, content in huggingface_files(ALL[name], shape, classifies=True, has_types=has_types).items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs, pairs = AutoTokenizer.from_pretrained(tmp_path), AWKWARD[::-1]
    assert theirs(AWKWARD)["input_ids"] == [typed.ids for typed in ALL[name].encode_sequence(AWKWARD)]
    encoded, expected = theirs(AWKWARD, pairs), ALL[name].encode_sequence(AWKWARD, pairs)
    assert encoded["input_ids"] == [typed.ids for typed in expected]
    assert ("token_type_ids" in encoded) == has_types
    if has_types:
        assert encoded["token_type_ids"] == [typed.types for typed in expected]


def test_hugging_face_files_are_returned_unchanged():
    files = HuggingFace(huggingface_files(TRAINED["bpe"], "encoder-decoder")).files()
    assert sorted(files) == ["tokenizer.json", "tokenizer_config.json"]
    assert huggingface_files(HuggingFace(files), "decoder-only") == files


@pytest.mark.parametrize("name", TRAINED)
def test_sentencepiece_model_is_exported_too(tmp_path, name):
    """Programs that read SentencePiece models can use the original model."""
    _write(tmp_path, ALL[name])
    assert load_sentencepiece(tmp_path / "tokenizer.model").digest == ALL[name].digest


@pytest.mark.parametrize("name", ALL)
def test_exported_directory_gives_the_same_ids_and_texts(tmp_path, name):
    _write(tmp_path, ALL[name])
    exported, ids = find_tokenizer(tmp_path), ALL[name].encode_batch(AWKWARD)
    assert exported.encode_batch(AWKWARD) == ids
    assert exported.encode_prompt(AWKWARD) == ALL[name].encode_prompt(AWKWARD)
    if name in ("bpe", "unigram", "bytes"):  # without byte fallback, unknown characters are lost
        assert [exported.decode(row) for row in ids] == [ALL[name].decode(row) for row in ids]


def _write(directory: Path, tokenizer: Tokenizer) -> None:
    for file, content in huggingface_files(tokenizer, "decoder-only").items():
        (directory / file).write_bytes(content)


# ---------------------------------------------------------------- models of other programs
@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
def test_default_normalization_of_sentencepiece(algorithm):
    tokenizer = SentencePiece(_model(model_type=algorithm))  # the defaults: NFKC, single spaces, a dummy prefix
    converted = HuggingFace(huggingface_files(tokenizer, "encoder-decoder"))
    texts = [*SOURCE.split("\n")[:200], "  a  b ", "ﬁ Ⅳ\xa0x"]
    assert converted.encode_batch(texts) == tokenizer.encode_batch(texts)


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"model_type": "char"}, "it is neither unigram nor bpe"),
        ({"treat_whitespace_as_suffix": True}, "it does not mark a space as the prefix of the next word"),
        ({"user_defined_symbols": ["@@"]}, "it combines user-defined symbols with add_dummy_prefix"),
    ],
)
def test_unsupported_sentencepiece_options(options, obstacle):
    tokenizer = SentencePiece(_model(**options))
    with pytest.raises(
        UserError, match=f"cannot be written as tokenizer.json: {obstacle}.*; export without the tokenizer"
    ):
        huggingface_files(tokenizer, "decoder-only")


@pytest.mark.parametrize(
    ("algorithm", "edit", "obstacle"),
    [
        ("bpe", {"score": -1.0}, r"the bpe pieces \['.*'\] have the same score"),
        ("unigram", {"piece": "\u1234\u1235"}, "'\u1234' is part of pieces but not a piece itself"),
        ("unigram", {"type": ModelProto.SentencePiece.UNUSED}, "it has unused pieces"),
    ],
)
def test_unsupported_sentencepiece_pieces(algorithm, edit, obstacle):
    proto = ModelProto.FromString(_model(model_type=algorithm))
    for field, value in edit.items():
        setattr(
            next(piece for piece in proto.pieces if piece.type == piece.NORMAL and len(piece.piece) > 1), field, value
        )
    with pytest.raises(UserError, match=obstacle):
        huggingface_files(SentencePiece(proto.SerializeToString()), "decoder-only")


def _model(**options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCE.split("\n")), model_writer=model, vocab_size=100, minloglevel=2, **options
    )
    return model.getvalue()


@pytest.mark.skipif("JAXFORMER_DATA" not in os.environ, reason="JAXFORMER_DATA names no data directory")
@pytest.mark.parametrize("name", ["llama2_tokenizer.model", "t5-base.spiece.model"])
def test_real_models(name):
    tokenizer = load_sentencepiece(os.path.join(os.environ["JAXFORMER_DATA"], "tokenizers", name))
    converted = HuggingFace(huggingface_files(tokenizer, "decoder-only"))
    assert (converted.pad_id, converted.bos_id, converted.eos_id) == (
        tokenizer.pad_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
    )
    texts = [SOURCE, *SOURCE.split("\n"), "Grüße, <s>naïve</s> 東京  — “quotes”"]
    assert converted.encode_batch(texts) == tokenizer.encode_batch(texts)
