"""Tokenizers: exact round trips, special ids, saving, loading and error messages."""

import argparse
import io
import pickle
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, strategies as st

from jaxformer.config import ByteTokenizer, SentencePieceTokenizer
from jaxformer.data import (
    Bytes,
    SentencePiece,
    load_sentencepiece,
    load_tokenizer,
    make_tokenizer,
    open_source,
    train_sentencepiece,
    train_tokenizer_file,
)
from jaxformer.data.tokenizer.training import select_sentences
from jaxformer.errors import UserError

SOURCE = Path(argparse.__file__).read_text(encoding="utf-8")  # 100 kB of indented Python
AWKWARD = "def f(x):\n\tif  x:\r\n        return 1 \n\n\n   # é 漢字 \x00 <s></s><pad><unk><0x41>\n\u2028 "


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def trained(request) -> SentencePiece:
    return train_sentencepiece([SOURCE], 600, SentencePieceTokenizer(algorithm=request.param))


# ---------------------------------------------------------------- round trips
@pytest.mark.parametrize("text", [SOURCE, AWKWARD, "", " ", "\n", "\t\t", "    a"])
def test_round_trip(trained, text):
    assert trained.decode(trained.encode(text)) == text
    assert Bytes().decode(Bytes().encode(text)) == text


@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\u2581"), max_size=40))
def test_round_trip_of_any_text(text):
    assert SMALL.decode(SMALL.encode(text)) == text
    assert Bytes().decode(Bytes().encode(text)) == text


SMALL = train_sentencepiece([SOURCE[:20_000]], 400, SentencePieceTokenizer(algorithm="bpe"))


def test_round_trip_of_white_space_without_byte_fallback():
    cfg = SentencePieceTokenizer(byte_fallback=False, algorithm="bpe")
    tokenizer = train_sentencepiece(["if x:\n\treturn  y ż\n"] * 20, 25, cfg)
    text = "if x:\n\n\t  return ż\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


# ---------------------------------------------------------------- ids
def test_special_ids_and_size(trained):
    assert (trained.pad_id, trained.bos_id, trained.eos_id, trained.vocab_size) == (0, 1, 2, 600)
    assert not {0, 1, 2, 3} & set(trained.encode(AWKWARD))


def test_bytes_ids():
    assert Bytes().encode("aé") == [100, 198, 172]
    assert Bytes().vocab_size == 259
    assert Bytes().decode([198]) == "\ufffd"


def test_decode_drops_special_ids_and_rejects_unknown_ids(trained):
    for tokenizer in (trained, Bytes()):
        ids = tokenizer.encode("hello")
        assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == "hello"
        with pytest.raises(UserError, match=f"id {tokenizer.vocab_size} is outside"):
            tokenizer.decode([tokenizer.vocab_size])
        with pytest.raises(UserError, match="id -1 is outside"):
            tokenizer.decode([-1])


def test_indentation_is_one_piece_and_digits_are_single(trained):
    assert len(trained.encode("        ")) <= 2
    assert len(trained.encode("1234")) == 4


def test_batch_equals_one_by_one(trained):
    texts = SOURCE.split("\n")[:50]
    assert trained.encode_batch(texts) == [trained.encode(text) for text in texts]


def test_models_without_pad_or_bos():
    t5 = SentencePiece(_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    assert (t5.pad_id, t5.bos_id, t5.eos_id) == (0, 0, 1)
    llama = SentencePiece(_model(unk_id=0, bos_id=1, eos_id=2, pad_id=-1))
    assert (llama.pad_id, llama.bos_id, llama.eos_id) == (0, 1, 2)
    with pytest.raises(UserError, match="no eos id"):
        SentencePiece(_model(unk_id=0, bos_id=1, eos_id=-1))


def _model(**ids: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SOURCE[:2000]]),
        model_writer=model,
        vocab_size=100,
        minloglevel=2,
        model_type="bpe",
        **ids,
    )
    return model.getvalue()


# ---------------------------------------------------------------- training
def test_training_is_deterministic_and_silent(trained, capfd):
    cfg = SentencePieceTokenizer(algorithm="bpe")
    first, second = (train_sentencepiece([SOURCE], 500, cfg) for _ in range(2))
    assert first.digest == second.digest != trained.digest
    assert capfd.readouterr() == ("", "")


def test_training_text_is_sampled_evenly():
    texts = [f"{i:03d} line\n" * 100 for i in range(100)]
    sample = list(select_sentences(texts, 20_000))
    assert 19_000 < sum(map(len, sample)) <= 20_000
    assert len({sentence[:3] for sentence in sample}) == 100
    assert list(select_sentences(texts, 10**6)) == [line for text in texts for line in text.split("\n") if line]


def test_long_lines_are_trained_on():
    tokenizer = train_sentencepiece(["wordy " * 20_000], 275, SentencePieceTokenizer(algorithm="bpe"))
    assert len(tokenizer.encode("wordy")) < 5


# ---------------------------------------------------------------- tokenizers of a config
@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
def test_vocabulary_larger_than_the_text_can_fill(make_config, algorithm):
    cfg = make_config(vocab_size=5000, tokenizer=SentencePieceTokenizer(algorithm=algorithm))
    with pytest.raises(UserError, match=r"model\.vocab_size=5000 is more than .*: set model\.vocab_size=\d+ or less"):
        make_tokenizer(cfg, open_source(cfg.data.train))


def test_the_suggested_vocabulary_works(make_config):
    cfg = make_config(vocab_size=5000, tokenizer=SentencePieceTokenizer(algorithm="bpe"))
    documents = [{"inputs": SOURCE[:500], "targets": SOURCE[500:1000]}]
    with pytest.raises(UserError) as error:
        make_tokenizer(cfg, documents)
    size = int(str(error.value).split("set model.vocab_size=")[1].split(" ")[0])
    cfg = make_config(vocab_size=size, tokenizer=cfg.data.tokenizer)
    assert make_tokenizer(cfg, documents).vocab_size == size


def test_vocabulary_too_small_for_the_characters(make_config):
    cfg = make_config(vocab_size=100, tokenizer=SentencePieceTokenizer())
    with pytest.raises(
        UserError, match=r"model\.vocab_size=100 is too small for .*: set model\.vocab_size=26\d or more"
    ):
        make_tokenizer(cfg, [{"text": "abc"}])


def test_too_little_training_text(make_config):
    cfg = make_config(tokenizer=SentencePieceTokenizer(train_bytes=1))
    with pytest.raises(UserError, match=r"data\.tokenizer\.train_bytes=1 is too little"):
        make_tokenizer(cfg, [{"text": "hello"}])


def test_loaded_model_must_fit_the_vocabulary(make_config, trained, tmp_path):
    trained.save(tmp_path)
    tokenizer = SentencePieceTokenizer(path=str(tmp_path / "tokenizer.model"))
    assert make_tokenizer(make_config(vocab_size=640, tokenizer=tokenizer), []).digest == trained.digest
    with pytest.raises(UserError, match=r"model\.vocab_size=599 is less than the tokenizer's 600 ids"):
        make_tokenizer(make_config(vocab_size=599, tokenizer=tokenizer), [])


def test_bytes_from_config(make_config):
    assert isinstance(make_tokenizer(make_config(tokenizer=ByteTokenizer()), []), Bytes)


# ---------------------------------------------------------------- saving and loading
def test_save_and_load(trained, tmp_path):
    for i, tokenizer in enumerate((trained, Bytes())):
        directory = tmp_path / str(i)
        directory.mkdir()
        tokenizer.save(directory)
        loaded = load_tokenizer(directory)
        assert type(loaded) is type(tokenizer)
        assert loaded.digest == tokenizer.digest
        assert loaded.encode(AWKWARD) == tokenizer.encode(AWKWARD)


def test_train_tokenizer_file(tmp_path):
    (tmp_path / "a.txt").write_text(SOURCE[:5000])
    path = train_tokenizer_file([str(tmp_path / "*.txt")], 350, "bpe", tmp_path / "my.model")
    assert path == tmp_path / "my.model"
    assert load_sentencepiece(path).vocab_size == 350


def test_pickle(trained):
    assert pickle.loads(pickle.dumps(trained)).encode(AWKWARD) == trained.encode(AWKWARD)


def test_missing_and_invalid_files(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer: it holds none of tokenizer\.json, tokenizer\.model,"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"no\.model' cannot be read \(No such file"):
        load_sentencepiece(tmp_path / "no.model")
    for content in (b"", b"not a model", b"PK\x03\x04"):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.model' is not a SentencePiece model"):
            load_sentencepiece(tmp_path / "bad.model")
