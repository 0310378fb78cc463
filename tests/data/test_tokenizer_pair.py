"""Two tokenizers with different vocabularies: encoding, files, training from a config, and export to transformers."""

import io

import pytest
import sentencepiece

from jaxformer.config import ByteTokenizer, DirectoryTokenizer, MemorySource, SentencePieceTokenizer, Seq2Seq
from jaxformer.data import make_tokenizer, open_source
from jaxformer.data.tokenizer import (
    Bytes,
    SentencePiece,
    TokenizerPair,
    check_vocabulary,
    huggingface_files,
    load_tokenizer,
    train_sentencepiece,
)
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective

NOUNS = (("frog", "FROSCH"), ("teacher", "LEHRER"), ("house", "HAUS"), ("tree", "BAUM"), ("number", "ZAHL"))
PAIRS = tuple(
    (f"the {a} {i} sees a {b} and asks", f"DER {c} {i} SIEHT EINEN {d} UND FRAGT")
    for i, ((a, c), (b, d)) in enumerate((x, y) for x in NOUNS for y in NOUNS)
)
TEXTS = ["the frog sat", "", "a log: Ω ß\n", "THE Frog 12", "  two  spaces"]


@pytest.fixture(scope="module")
def pair() -> TokenizerPair:
    options = SentencePieceTokenizer()
    source, target = (
        train_sentencepiece([texts[side] for texts in PAIRS], size, options) for side, size in ((0, 290), (1, 294))
    )
    return TokenizerPair(source, target)


@pytest.fixture
def two_vocabularies(make_config):
    """Builds a config of an encoder-decoder with two vocabularies."""

    def make(source_vocab_size: int = 290, vocab_size: int = 294, **data):
        data = {"train": MemorySource(pairs=PAIRS), "objective": Seq2Seq(input_length=40)} | data
        # The source tokenizer is added last, because a config with it alone is not valid.
        source_tokenizer = data.pop("source_tokenizer", SentencePieceTokenizer())
        config = make_config(vocab_size=vocab_size, **{"tokenizer": SentencePieceTokenizer()} | data)
        config = config.replace(model=config.model.replace(source_vocab_size=source_vocab_size))
        return config.replace(data=config.data.replace(source_tokenizer=source_tokenizer))

    return make


def test_inputs_and_targets_use_their_own_tokenizer(pair):
    assert (pair.source_vocab_size, pair.vocab_size) == (290, 294)
    assert pair.encode_inputs(TEXTS) == pair.source.encode_batch(TEXTS)
    assert pair.encode_source(TEXTS) == pair.source.encode_source(TEXTS)
    assert pair.encode_batch(TEXTS) == pair.target.encode_batch(TEXTS) != pair.source.encode_batch(TEXTS)
    assert pair.encode_prompt(TEXTS) == pair.target.encode_prompt(TEXTS)
    assert [pair.decode([pair.bos_id, *ids, pair.eos_id]) for ids in pair.encode_batch(TEXTS)] == TEXTS


def test_save_and_load(pair, tmp_path):
    pair.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, TokenizerPair)
    assert again.digest == pair.digest != TokenizerPair(pair.target, pair.source).digest
    assert again.encode_source(TEXTS) == pair.encode_source(TEXTS)


def test_kinds_may_differ(pair, tmp_path):
    mixed = TokenizerPair(Bytes(), pair.target)
    mixed.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode_source(["ab"]) == Bytes().encode_source(["ab"])
    assert again.encode("AB") == pair.encode("AB")


def test_a_source_tokenizer_replaces_that_of_a_pair(pair, tmp_path):
    replaced = TokenizerPair(Bytes(), pair)
    replaced.save(tmp_path)
    assert load_tokenizer(tmp_path).digest == replaced.digest == TokenizerPair(Bytes(), pair.target).digest


def test_each_side_is_trained_on_its_own_field(two_vocabularies, pair):
    config = two_vocabularies()
    made = make_tokenizer(config, open_source(config.data.train))
    assert made.digest == pair.digest
    assert make_objective(config, made).special.eos == (pair.target.eos_id,)


def test_one_tokenizer_may_serve_two_tables(two_vocabularies):
    config = two_vocabularies(310, 310, source_tokenizer=None)
    made = make_tokenizer(config, open_source(config.data.train))
    assert made.source_vocab_size == made.vocab_size == 310
    with pytest.raises(UserError, match=r"model\.source_vocab_size=290 is less than the tokenizer's 310 source ids"):
        check_vocabulary(made, config.model.replace(source_vocab_size=290))


def test_a_directory_with_both_tokenizers(two_vocabularies, pair, tmp_path):
    pair.save(tmp_path)
    config = two_vocabularies(tokenizer=DirectoryTokenizer(path=str(tmp_path)), source_tokenizer=None)
    assert make_tokenizer(config, []).digest == pair.digest
    bytes_source = two_vocabularies(tokenizer=DirectoryTokenizer(path=str(tmp_path)), source_tokenizer=ByteTokenizer())
    assert make_tokenizer(bytes_source, []).encode_source(["a"]) == Bytes().encode_source(["a"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_vocab_size": 5000}, r"model\.source_vocab_size=5000 is more than the training text can fill"),
        ({"vocab_size": 5000}, r"model\.vocab_size=5000 is more than the training text can fill"),
        (
            {"source_tokenizer": SentencePieceTokenizer(train_bytes=1)},
            r"data\.source_tokenizer\.train_bytes=1 is too little",
        ),
    ],
)
def test_errors_name_the_side(two_vocabularies, changes, message):
    config = two_vocabularies(**changes)
    with pytest.raises(UserError, match=message):
        make_tokenizer(config, open_source(config.data.train))


def test_training_two_tokenizers_needs_pairs(two_vocabularies):
    with pytest.raises(UserError, match=r"needs examples with inputs and targets, but data\.train has text"):
        make_tokenizer(two_vocabularies(), [{"text": "abc"}])


# ---------------------------------------------------------------- transformers
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_an_exported_pair_is_a_marian_tokenizer(pair, tmp_path):
    from transformers import MarianTokenizer

    for name, content in huggingface_files(pair, "encoder-decoder").items():
        (tmp_path / name).write_bytes(content)
    theirs, again = MarianTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert [theirs(text).input_ids for text in TEXTS] == pair.encode_source(TEXTS) == again.encode_source(TEXTS)
    targets = [[*ids, pair.eos_id] for ids in pair.encode_batch(TEXTS)]
    assert [theirs(text_target=text).input_ids for text in TEXTS] == targets
    # MarianTokenizer removes spaces at both ends.
    texts = [text.strip() for text in TEXTS]
    assert [theirs.decode(ids, skip_special_tokens=True) for ids in targets] == texts
    assert [again.decode(ids) for ids in targets] == texts


def test_other_pairs_cannot_be_exported(pair):
    with pytest.raises(UserError, match=r"two tokenizers \(Bytes and SentencePiece\) cannot be exported"):
        huggingface_files(TokenizerPair(Bytes(), pair.target), "encoder-decoder")


def test_pairs_with_different_special_ids_cannot_be_exported(pair):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text, _ in PAIRS),
        model_writer=model,
        vocab_size=36,
        minloglevel=2,
        pad_id=3,
        hard_vocab_limit=False,
    )
    other = TokenizerPair(SentencePiece(model.getvalue()), pair.target)
    with pytest.raises(UserError, match=r"'<unk>' has the id 0 in the source and 3 in the target"):
        huggingface_files(other, "encoder-decoder")
