"""Marian directories whose source and target have separate vocabularies and embedding tables."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from jaxformer import forward, generate, load
from jaxformer.convert import SAMPLES
from jaxformer.convert.directory import HuggingFaceDirectory
from jaxformer.convert.sample import VOCAB
from jaxformer.errors import UserError
from jaxformer.exchange import export_run, import_run
from jaxformer.show import _describe_tokenizer

NAME = "marian two vocabularies"
SOURCE_VOCAB = SAMPLES[NAME].fields["vocab_size"]
TEXTS = {
    "source.spm": ["the small frog sat on a log", "Tom asked his teacher for advice.", "numbers 1 2 3, and more!"],
    "target.spm": ["DER FROSCH SASS AUF DEM BAUM", "TOM BAT SEINEN LEHRER UM RAT."],
}
INPUTS = ["the frog asked Tom", "3 logs", ""]


def write_tokenizer(directory) -> None:
    """One SentencePiece model and one vocabulary per language; special tokens have the same ids in both."""
    for (name, texts), vocabulary in zip(TEXTS.items(), ("vocab.json", "target_vocab.json"), strict=True):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts * 9), model_writer=model, vocab_size=70, minloglevel=2, hard_vocab_limit=False
        )
        (directory / name).write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        pieces = {"</s>": 0, "<unk>": 1}
        for i in range(3, processor.vocab_size()):
            pieces.setdefault(processor.id_to_piece(i), len(pieces))
        # Fill up to the padding id of the model, so that generated ids have a piece.
        pieces |= {f"piece{i}": i for i in range(len(pieces), VOCAB - 1)}
        (directory / vocabulary).write_text(json.dumps(pieces | {"<pad>": VOCAB - 1}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": True}))


@pytest.fixture(scope="module")
def directory(sample_dir, tmp_path_factory):
    path = Path(shutil.copytree(sample_dir(NAME), tmp_path_factory.mktemp("two") / "marian"))
    write_tokenizer(path)
    return path


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_translations_equal_transformers(directory):
    from transformers import AutoTokenizer, MarianMTModel

    theirs, tokenizer = MarianMTModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    batch = tokenizer(INPUTS, return_tensors="pt", padding=True)
    new = theirs.generate(**batch, max_new_tokens=12, num_beams=1, do_sample=False)
    run = load(directory)
    assert generate(run, INPUTS, max_new_tokens=12) == tokenizer.batch_decode(new, skip_special_tokens=True)


@pytest.mark.parametrize("tied", [True, False])
def test_source_ids_beyond_the_target_vocabulary(tied, tmp_path):
    import torch

    sample = replace(SAMPLES[NAME], fields=SAMPLES[NAME].fields | {"tie_word_embeddings": tied})
    theirs, run = sample.save(tmp_path), load(tmp_path)
    assert run.config.model.head.tied == tied
    rng = np.random.default_rng(0)
    inputs, tokens = rng.integers(VOCAB, SOURCE_VOCAB, (3, 9)), rng.integers(3, VOCAB - 1, (3, 7))
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(inputs), decoder_input_ids=torch.tensor(tokens)).logits.numpy()
    # Relative to the largest logit, which is above 10 with these random tables.
    np.testing.assert_allclose(forward(run, tokens, inputs), logits, atol=1e-6 * np.abs(logits).max())


def test_import_then_export_preserves_every_file(directory, tmp_path):
    import_run(directory, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "again")
    names = {"model.safetensors", "source.spm", "target.spm", "vocab.json", "target_vocab.json"}
    for name in names | {"tokenizer_config.json"}:
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes(), name
    imported = load(tmp_path / "run")
    assert imported.tokenizer.digest == load(directory).tokenizer.digest
    assert generate(imported, INPUTS, max_new_tokens=8) == generate(load(directory), INPUTS, max_new_tokens=8)


def test_a_vocabulary_larger_than_its_table(copy_sample):
    source = copy_sample(NAME)
    write_tokenizer(source.path)
    assert _describe_tokenizer(source.path) == f"tokenizer: Translation with {VOCAB} ids"
    pieces = json.loads((source.path / "vocab.json").read_text()) | {"extra": SOURCE_VOCAB}
    (source.path / "vocab.json").write_text(json.dumps(pieces))
    assert _describe_tokenizer(source.path) == f"tokenizer: Translation with {VOCAB} ids, 113 source ids"
    with pytest.raises(UserError, match=r"source_vocab_size=112 is less than the tokenizer's 113 source ids"):
        load(source.path)


def test_a_stored_copy_of_the_output_projection(copy_sample):
    """Files of older versions store the tied projection twice."""
    source = copy_sample(NAME)
    tensors = source.tensors()
    table = tensors["model.decoder.embed_tokens.weight"]
    source.put(tensors | {"lm_head.weight": table})
    HuggingFaceDirectory(source.path)
    source.put(tensors | {"lm_head.weight": table + 1})
    with pytest.raises(UserError, match=r"'lm_head\.weight' differs from 'model\.decoder\.embed_tokens\.weight'"):
        HuggingFaceDirectory(source.path)


def test_a_size_that_differs_from_the_weights(copy_sample):
    source = copy_sample(NAME)
    source.set(decoder_vocab_size=VOCAB + 1)
    with pytest.raises(UserError, match=r"decoder\.embed_tokens\.weight' has shape \(96, 32\), but"):
        HuggingFaceDirectory(source.path)
