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


@pytest.fixture(scope="module")
def two_vocabularies(directory, tmp_path_factory):
    """The same models with one vocabulary per language; transformers needs the same special ids in both."""
    path = tmp_path_factory.mktemp("separate")
    for model, vocabulary in (("source.spm", "vocab.json"), ("target.spm", "target_vocab.json")):
        (path / model).write_bytes((directory / model).read_bytes())
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path / model))
        pieces: dict[str, int] = {"</s>": 0, "<unk>": 1, "<pad>": 2}
        for i in range(3, processor.vocab_size()):
            pieces.setdefault(processor.id_to_piece(i), len(pieces))
        (path / vocabulary).write_text(json.dumps(pieces), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": True}))
    return path


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_separate_vocabularies_equal_transformers(two_vocabularies):
    from transformers import MarianTokenizer

    ours, theirs = load_tokenizer(two_vocabularies), MarianTokenizer.from_pretrained(two_vocabularies)
    assert ours.encode_source(TEXTS) == [theirs(text).input_ids for text in TEXTS]
    for text in ("der Frosch bat Tom", "Zahlen 3!", "Ω"):
        wanted = theirs(text_target=text).input_ids
        assert [*ours.encode(text), ours.eos_id] == wanted
        assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
    assert (ours.source_vocab_size, ours.vocab_size) == (len(theirs.encoder), len(theirs.target_encoder))
    assert ours.source_vocab_size != ours.vocab_size


def test_each_side_has_its_own_special_ids(two_vocabularies, tmp_path):
    ours = load_tokenizer(two_vocabularies)
    for name, content in ours.files().items():
        (tmp_path / name).write_bytes(content)
    pieces = json.loads((tmp_path / "target_vocab.json").read_text()) | {"</s>": 1, "<unk>": 0}
    (tmp_path / "target_vocab.json").write_text(json.dumps(pieces))
    changed = load_tokenizer(tmp_path)
    assert changed.eos_id == 1
    assert changed.encode_source(["Tom"]) == ours.encode_source(["Tom"]) == [[*ours.encode_inputs(["Tom"])[0], 0]]
    assert changed.encode("Ω")[-1] == 0


def test_separate_vocabularies_need_a_second_file(two_vocabularies, tmp_path):
    ours = load_tokenizer(two_vocabularies)
    ours.save(tmp_path)
    assert load_tokenizer(tmp_path).digest == ours.digest
    (tmp_path / "target_vocab.json").unlink()
    with pytest.raises(UserError, match=r"sets separate_vocabs, but there is no target_vocab\.json: fetch it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json does not hold a JSON object"):
        load_tokenizer(tmp_path)


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
