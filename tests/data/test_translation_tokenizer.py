"""The tokenizers of OPUS-MT directories against transformers' MarianTokenizer."""

import io
import json

import pytest
import sentencepiece

from jaxformer.data.tokenizer import Translation, load_tokenizer
from jaxformer.errors import UserError

ENGLISH = ["the small frog sat on a log", "Tom asked his teacher for advice.", "numbers 1 2 3, and more!"] * 20
GERMAN = ["der kleine Frosch saß auf einem Baum", "Tom bat seinen Lehrer um Rat.", "Zahlen 1 2 3, und mehr!"] * 20
TEXTS = ["the frog asked Tom", "", "  two  spaces ", "unknown: Ω and 漢字", ">>deu<< Tom sat", "numbers 3 2 1!"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("opus")
    pieces: dict[str, int] = {"</s>": 0, "<unk>": 1, ">>deu<<": 2}
    for name, texts in (("source.spm", ENGLISH), ("target.spm", GERMAN)):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, vocab_size=80, minloglevel=2, hard_vocab_limit=False
        )
        (path / name).write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        for i in range(3, processor.vocab_size()):
            pieces.setdefault(processor.id_to_piece(i), len(pieces))
    pieces["<pad>"] = len(pieces)
    (path / "vocab.json").write_text(json.dumps(pieces), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps({"source_lang": "eng", "target_lang": "deu"}))
    return path


@pytest.fixture(scope="module")
def theirs(directory):
    from transformers import MarianTokenizer

    return MarianTokenizer.from_pretrained(directory)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("text", TEXTS)
def test_source_ids_equal_transformers(directory, theirs, text):
    assert load_tokenizer(directory).encode_source([text]) == [theirs(text).input_ids]


@pytest.mark.parametrize("text", ["der Frosch bat Tom", "Zahlen 3!", "Ω"])
def test_target_ids_and_texts_equal_transformers(directory, theirs, text):
    ours = load_tokenizer(directory)
    wanted = theirs(text_target=text).input_ids
    assert [*ours.encode(text), ours.eos_id] == wanted
    assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)


def test_save_and_load(directory, tmp_path):
    ours = load_tokenizer(directory)
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, Translation)
    assert again.digest == ours.digest
    assert (again.vocab_size, again.eos_id, again.pad_id, again.bos_id) == (
        ours.pad_id + 1,
        0,
        ours.pad_id,
        ours.pad_id,
    )


def test_missing_and_invalid_files(directory, tmp_path):
    (tmp_path / "source.spm").write_bytes((directory / "source.spm").read_bytes())
    with pytest.raises(UserError, match=r"source\.spm but not target\.spm"):
        load_tokenizer(tmp_path)
    (tmp_path / "target.spm").write_bytes(b"no model")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(UserError, match=r"target\.spm is not a SentencePiece model"):
        load_tokenizer(tmp_path)
    (tmp_path / "target.spm").write_bytes((directory / "target.spm").read_bytes())
    with pytest.raises(UserError, match=r"vocab\.json has no '</s>'"):
        load_tokenizer(tmp_path)
