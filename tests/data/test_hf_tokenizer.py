"""Tokenizers of Hugging Face directories: parity with transformers, special ids, saving and error messages."""

import argparse
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxformer.config import HuggingFaceTokenizer
from jaxformer.data import (
    Bytes,
    HuggingFace,
    check_vocabulary,
    load_huggingface,
    load_tokenizer,
    make_tokenizer,
)
from jaxformer.errors import UserError

SOURCE = Path(argparse.__file__).read_text(encoding="utf-8")
TEXTS = [
    *SOURCE.split("\n")[:80],
    SOURCE[:3000],
    "",
    " ",
    "  Two  spaces , and\ttabs\n\n. It 's n't \u2581 é 漢字 😀 \x00 x",
    "a <s> b</s> [CLS] c [SEP] <|endoftext|><pad> <extra> [MASK]<0x41>",
]


# ---------------------------------------------------------------- one small tokenizer per family
def _trained(model: models.Model, trainer: trainers.Trainer, **parts: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(SOURCE.split("\n"), trainer)
    return tokenizer


def _template(tokenizer: tokenizers.Tokenizer, single: str) -> tokenizers.Tokenizer:
    names = [name for name in single.split() if name != "$A"]
    special = [(name, tokenizer.token_to_id(name)) for name in names]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=special)
    return tokenizer


def gpt2() -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(
        models.BPE(),
        trainer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        post_processor=processors.ByteLevel(trim_offsets=False),
        decoder=decoders.ByteLevel(),
    )


def bert() -> tokenizers.Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer = _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )
    return _template(tokenizer, "[CLS] $A [SEP]")


def t5() -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer = _trained(
        models.Unigram(),
        trainer,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        decoder=decoders.Metaspace(),
    )
    return _template(tokenizer, "$A </s>")


def llama() -> tokenizers.Tokenizer:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    trained = _trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(split=False))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(model["vocab"], merges, fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _template(tokenizer, "<s> $A")


EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False}
FAMILIES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "gpt2": (gpt2, {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "bert": (bert, {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]"}),
    "t5": (t5, {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "extra_ids": 0}),
    "llama": (llama, {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": EOS}),
}


@pytest.fixture(scope="module")
def backends() -> dict[str, tokenizers.Tokenizer]:
    return {name: make() for name, (make, _) in FAMILIES.items()}


@pytest.fixture
def directory(backends, tmp_path) -> Callable[..., Path]:
    """Writes the tokenizer directory of a family; `settings` replace its default settings, `files` are added."""

    def write(name: str, settings: dict[str, Any] | None = None, **files: Any) -> Path:
        (tmp_path / "tokenizer.json").write_text(backends[name].to_str())
        settings = FAMILIES[name][1] if settings is None else settings
        for file, content in {"tokenizer_config": settings, "config": {"model_type": name}, **files}.items():
            (tmp_path / f"{file}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def assert_like_transformers(path: Path) -> HuggingFace:
    """Load the tokenizer of a directory after comparing it with transformers on all texts."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(path), load_tokenizer(path)
    with_special = theirs(TEXTS)["input_ids"]
    assert ours.encode_prompt(TEXTS) == ours.encode_source(TEXTS) == with_special
    assert ours.encode_batch(TEXTS) == theirs(TEXTS, add_special_tokens=False)["input_ids"]
    for ids in with_special:
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    return ours


# ---------------------------------------------------------------- parity
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_texts_equal_transformers(directory, name):
    ours = assert_like_transformers(directory(name, FAMILIES[name][1] | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert type(ours) is HuggingFace


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_texts_equal_the_tokenizer_class_of_the_family(directory, name):
    assert_like_transformers(directory(name))


def test_special_tokens_around_a_text(directory, backends):
    cases = {"gpt2": ([], []), "bert": (["[CLS]"], ["[SEP]"]), "t5": ([], ["</s>"]), "llama": (["<s>"], [])}
    for name, around in cases.items():
        tokenizer = load_tokenizer(directory(name))
        before, after = ([backends[name].token_to_id(token) for token in tokens] for tokens in around)
        ids = tokenizer.encode("hello world")
        assert tokenizer.encode_prompt(["hello world"]) == [[*before, *ids, *after]]


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("value", [True, False])
def test_post_processor_overrides_add_bos_and_add_eos(directory, flag, value):
    settings = FAMILIES["llama"][1] | {flag: value, "tokenizer_class": "PreTrainedTokenizerFast"}
    ours = assert_like_transformers(directory("llama", settings))
    assert ours.encode_prompt([""]) == [[ours.bos_id]]


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("force_bpe", [True, False])
def test_clean_up_of_spaces_follows_the_settings(directory, name, force_bpe):
    clean_up = {"clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    force = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": force_bpe}
    ours = assert_like_transformers(directory(name, FAMILIES[name][1] | clean_up | force))
    assert (ours.decode(ours.encode("so . it 's")) == "so. it's") == (name != "gpt2" or force_bpe)


def test_added_tokens_and_tokens_without_an_id_yet(directory):
    added = {"content": "<extra>", "lstrip": True, "rstrip": False, "single_word": False, "special": False}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["[SEP]"],
        "added_tokens_decoder": {"500": added | {"normalized": False}},
    }
    ours = assert_like_transformers(directory("gpt2", settings, special_tokens_map={"pad_token": "ignored"}))
    assert (ours.pad_id, ours.vocab_size) == (501, 503)
    assert ours.decode(ours.encode("a<pad>b [SEP]c <extra>")) == "ab c<extra>"


def test_split_special_tokens(directory):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True, "eos_token": "</s>"}
    ours = assert_like_transformers(directory("llama", settings))
    assert ours.eos_id not in ours.encode("a</s>")
    assert pickle.loads(pickle.dumps(ours)).encode(TEXTS[-1]) == ours.encode(TEXTS[-1])


def test_truncation_and_padding_in_the_file_are_ignored(directory, backends):
    path = directory("t5", FAMILIES["t5"][1] | {"tokenizer_class": "PreTrainedTokenizerFast"})
    backend = tokenizers.Tokenizer.from_str(backends["t5"].to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(path / "tokenizer.json"))
    assert_like_transformers(path)


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_byte_level_round_trip_of_any_text(text):
    assert GPT2.decode(GPT2.encode(text)) == text.replace("<|endoftext|>", "")


GPT2 = HuggingFace({"tokenizer.json": gpt2().to_str().encode()})


# ---------------------------------------------------------------- special ids
@pytest.mark.parametrize(
    ("name", "settings", "pad_bos_eos"),
    [
        ("gpt2", {}, ("<|endoftext|>", "<|endoftext|>", "<|endoftext|>")),
        ("bert", {}, ("[PAD]", "[CLS]", "[SEP]")),
        ("bert", {"cls_token": "[MASK]", "sep_token": "[UNK]"}, ("[PAD]", "[MASK]", "[UNK]")),
        ("t5", {}, ("<pad>", "<pad>", "</s>")),
        ("t5", {"pad_token": "<unk>", "bos_token": None}, ("<unk>", "<unk>", "</s>")),
        ("llama", {}, ("</s>", "<s>", "</s>")),
        ("llama", {"eos_token": "<s>", "bos_token": {"content": "</s>"}}, ("<s>", "</s>", "<s>")),
    ],
)
def test_special_ids(directory, backends, name, settings, pad_bos_eos):
    tokenizer = load_tokenizer(directory(name, settings))
    expected = tuple(backends[name].token_to_id(token) for token in pad_bos_eos)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == expected


def test_special_tokens_map_overrides_old_settings(directory, backends):
    path = directory("llama", {"eos_token": "<s>"}, special_tokens_map={"eos_token": {"content": "</s>"}})
    assert load_tokenizer(path).eos_id == backends["llama"].token_to_id("</s>")


def test_decode_drops_all_special_tokens(directory, backends):
    tokenizer = load_tokenizer(directory("bert"))
    mask = backends["bert"].token_to_id("[MASK]")
    assert tokenizer.decode([mask, *tokenizer.encode("parser"), mask]) == "parser"
    with pytest.raises(UserError, match="id 500 is outside the tokenizer's vocabulary of 500 ids"):
        tokenizer.decode([500])


# ---------------------------------------------------------------- making, saving and loading
def test_saved_files_are_byte_identical(directory, tmp_path):
    path = directory("llama", special_tokens_map={"eos_token": "</s>"})
    (path / "chat_template.jinja").write_text("{{ messages }}")
    ours, copy = load_tokenizer(path), tmp_path / "copy"
    copy.mkdir()
    ours.save(copy)
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    assert {file.name for file in copy.iterdir()} == names
    assert all((copy / name).read_bytes() == (path / name).read_bytes() for name in names)
    assert load_tokenizer(copy).digest == ours.digest
    (copy / "config.json").write_bytes((path / "config.json").read_bytes())
    assert_like_transformers(copy)


def test_digest_covers_the_side_files(directory):
    first = load_tokenizer(directory("llama")).digest
    assert load_tokenizer(directory("llama", {"eos_token": "<s>"})).digest != first


def test_tokenizer_json_is_preferred(directory):
    path = directory("llama")
    (path / "tokenizer.model").write_bytes(b"not even a model")
    Bytes().save(path)
    assert type(load_tokenizer(path)) is HuggingFace


@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_made_from_a_config(directory, make_config, file):
    path = directory("llama")
    cfg = make_config(vocab_size=600, tokenizer=HuggingFaceTokenizer(path=str(path / file)))
    assert make_tokenizer(cfg, []).digest == load_tokenizer(path).digest
    with pytest.raises(UserError, match=r"model\.vocab_size=599 is less than the tokenizer's 600 ids"):
        make_tokenizer(make_config(vocab_size=599, tokenizer=cfg.data.tokenizer), [])


def test_vocabulary_may_be_smaller_than_the_embedding(make_config):
    model = make_config(vocab_size=259).model
    check_vocabulary(Bytes(), model)
    check_vocabulary(Bytes(), model.replace(vocab_size=320))
    with pytest.raises(UserError, match=r"'x': vocab_size=258 is less than the tokenizer's 259 ids"):
        check_vocabulary(Bytes(), model.replace(vocab_size=258), "'x': ")


def test_spiece_model_is_loaded(tmp_path):
    from jaxformer.config import SentencePieceTokenizer
    from jaxformer.data import train_sentencepiece

    tokenizer = train_sentencepiece([SOURCE[:5000]], 350, SentencePieceTokenizer(algorithm="bpe"))
    (tmp_path / "spiece.model").write_bytes(tokenizer.files()["tokenizer.model"])
    assert load_tokenizer(tmp_path).digest == tokenizer.digest
    assert tokenizer.encode_prompt(["a"]) == [[1, *tokenizer.encode("a")]]
    assert tokenizer.encode_source(["a"]) == [[*tokenizer.encode("a"), 2]]
    # The sentinels of T5, as transformers numbers them.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 100}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.vocab_size, loaded.token_id("<extra_id_0>"), loaded.token_id("<extra_id_99>")) == (450, 449, 350)
    assert loaded.decode([449, *tokenizer.encode("a")]) == "a"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json' does not hold a JSON object with a number extra_ids"):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------- error messages
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Unknown"}}', "\x00\x01"])
def test_not_a_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json': not a tokenizer of the tokenizers library"):
        load_huggingface(tmp_path)


@pytest.mark.parametrize(("content", "problem"), [("{", "is not valid JSON"), ("[1]", "does not hold a JSON object")])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_bad_side_files(directory, file, content, problem):
    path = directory("gpt2")
    (path / file).write_text(content)
    with pytest.raises(UserError, match=rf"{file} {problem}"):
        load_tokenizer(path)


def test_files_that_name_no_eos_token(tmp_path):
    """The special ids are None, and text can still be encoded and decoded."""
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (None, None, None)
    assert tokenizer.encode_prompt(["a"]) == tokenizer.encode_source(["a"]) == [[0]]
    assert tokenizer.decode([0]) == "a"


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json' cannot be read \(No such file"):
        load_huggingface(tmp_path)


@pytest.mark.parametrize("file", ["sentencepiece.bpe.model", "vocab.json", "vocab.txt"])
def test_unsupported_tokenizer_files(tmp_path, file):
    (tmp_path / file).write_text("")
    with pytest.raises(UserError, match=rf"has no tokenizer: .*{file} alone is not enough: save the tokenizer"):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------- real data, if available
@pytest.mark.skipif("JAXFORMER_DATA" not in os.environ, reason="JAXFORMER_DATA names no data directory")
def test_the_vocabulary_of_gpt2(tmp_path):
    import base64

    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    lines = (Path(os.environ["JAXFORMER_DATA"]) / "tokenizers" / "gpt2.tiktoken").read_text().split("\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    vocabulary = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = sorted(
        (rank, left, right)
        for token, rank in vocabulary.items()
        for left, right in ((token[:i], token[i:]) for i in range(1, len(token)))
        if vocabulary.get(left, rank) < rank and vocabulary.get(right, rank) < rank
    )
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [merge[1:] for merge in merges]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')  # like GPT-2's published file
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ours = assert_like_transformers(tmp_path)
    assert (ours.pad_id, ours.bos_id, ours.eos_id) == (50256, 50256, 50256)
    assert ours.encode("Hello world") == [15496, 995]
