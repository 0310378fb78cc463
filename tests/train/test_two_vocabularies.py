"""An encoder-decoder with separate source and target vocabularies: from training to generation, scores and export."""

import json

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxformer import forward, generate, load, score
from jaxformer.config import (
    DataConfig,
    EvaluateConfig,
    ExactMatch,
    MemorySource,
    OptimConfig,
    Perplexity,
    RunConfig,
    SentencePieceTokenizer,
    Seq2Seq,
    SpecialIds,
    TrainConfig,
)
from jaxformer.data.tokenizer import TokenizerPair
from jaxformer.errors import UserError
from jaxformer.evaluate.report import evaluate
from jaxformer.exchange import export_run
from jaxformer.models.marian import marian
from jaxformer.train.loop import train
from jaxformer.train.start import complete_config
from jaxformer.train.workdir import prepare_run

QUIET = Console(quiet=True)
WORDS = (("zero", "NULL"), ("one", "EINS"), ("two", "ZWEI"), ("three", "DREI"), ("four", "VIER"), ("five", "FUENF"))
PAIRS = tuple((f"{a} and {b}", f"{c} UND {d}") for a, c in WORDS for b, d in WORDS)
SHAPE = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "mlp_dim": 32, "dropout": 0.0}


def make_config(workdir: str, **fields) -> RunConfig:
    model = marian(**SHAPE, vocab_size=300, source_vocab_size=296, context_length=24, special=SpecialIds())
    data = DataConfig(
        train=MemorySource(pairs=PAIRS),
        heldout=MemorySource(pairs=PAIRS[:6]),
        tokenizer=SentencePieceTokenizer(algorithm="bpe"),
        source_tokenizer=SentencePieceTokenizer(algorithm="bpe"),
        objective=Seq2Seq(input_length=24),
        length=24,
        batch_size=16,
        pack=False,
    )
    return RunConfig(
        **{
            "workdir": workdir,
            "model": model,
            "data": data,
            "optim": OptimConfig(learning_rate=1e-2, schedule={"kind": "constant"}),
            "train": TrainConfig(steps=150, log_every=50),
            "evaluate": EvaluateConfig(metrics=(Perplexity(), ExactMatch(num_examples=6))),
        }
        | fields
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The config of a finished run, and the run that `train` returned."""
    config = make_config(str(tmp_path_factory.mktemp("runs") / "pair"))
    return config, train(config, QUIET)


def test_training_writes_both_tokenizers_and_both_tables(trained):
    config, run = trained
    loaded = load(config.workdir)
    assert isinstance(loaded.tokenizer, TokenizerPair)
    assert loaded.tokenizer.digest == run.tokenizer.digest
    assert (loaded.tokenizer.source_vocab_size, loaded.tokenizer.vocab_size) == (296, 300)
    shapes = {name: loaded.params["embedding"][name].shape for name in ("source_tokens", "tokens")}
    assert shapes == {"source_tokens": (296, 32), "tokens": (300, 32)}


def test_generation_and_evaluation_use_both_vocabularies(trained):
    config, _ = trained
    loaded = load(config.workdir)
    inputs, targets = zip(*PAIRS[:6], strict=True)
    assert generate(loaded, list(inputs), max_new_tokens=20) == list(targets)
    ids = [loaded.tokenizer.encode_source([text])[0] for text in inputs]
    new = generate(loaded, ids, max_new_tokens=20)
    assert [loaded.tokenizer.decode(row) for row in new] == list(targets)
    assert generate(loaded, list(inputs), max_new_tokens=20, num_beams=2) == list(targets)
    values = evaluate(config.workdir)
    assert values["exact_match"] == 1.0
    # Scores of targets, with eos, are the held-out loss.
    eos = loaded.tokenizer.eos_id
    scores = score(loaded, [[*loaded.tokenizer.encode(text), eos] for text in targets], list(inputs))
    assert -np.concatenate(scores).mean() == pytest.approx(values["heldout_loss"], abs=1e-5)


def test_int8_weights_generate_the_same(trained):
    config, _ = trained
    quantized = load(config.workdir, weights="int8")
    assert quantized.params["embedding"]["source_tokens"].values.dtype == np.int8
    assert generate(quantized, [PAIRS[7][0]], max_new_tokens=20) == [PAIRS[7][1]]


def test_ids_are_checked_against_the_vocabulary_of_their_side(trained):
    run = load(trained[0].workdir)
    assert len(score(run, [[299]], [[295]])[0]) == 1
    with pytest.raises(UserError, match="token id 296 is outside the vocabulary of 296"):
        generate(run, [[296]])
    with pytest.raises(UserError, match="token id 300 is outside the vocabulary of 300"):
        score(run, [[300]], [[5]])
    eos = run.tokenizer.source.eos_id
    np.testing.assert_array_equal(score(run, [[5, 6]], [[]])[0], score(run, [[5, 6]], [[eos]])[0])


def test_the_source_table_can_be_frozen(trained, tmp_path):
    """Fine-tuning with `train.start` reads the model and both tokenizers from the directory."""
    first, _ = trained
    start = TrainConfig(start=first.workdir, freeze=("embedding/source_tokens",), steps=2)
    data = first.data.replace(source_tokenizer=None, tokenizer=SentencePieceTokenizer())
    config = make_config(str(tmp_path / "tuned"), model=None, data=data, train=start)
    assert complete_config(config).model == first.model
    tuned, before = train(config, QUIET), load(first.workdir)
    assert tuned.tokenizer.digest == before.tokenizer.digest
    ours, theirs = (run.params["embedding"] for run in (load(config.workdir), before))
    np.testing.assert_array_equal(ours["source_tokens"], theirs["source_tokens"])
    assert np.abs(ours["tokens"] - theirs["tokens"]).max() > 1e-3


def test_prepared_data_depends_on_both_tokenizers(trained, tmp_path):
    config = trained[0].replace(workdir=str(tmp_path / "prepared"))
    prepare_run(config)
    assert (tmp_path / "prepared" / "data" / "source_tokenizer" / "tokenizer.model").is_file()
    assert (tmp_path / "prepared" / "source_tokenizer" / "tokenizer.model").is_file()
    run = train(config.replace(train=TrainConfig(steps=1)), QUIET)
    assert run.tokenizer.digest == trained[1].tokenizer.digest


def test_a_mesh_gives_the_same_loss(trained, run_steps):
    config = trained[0].replace(model=trained[0].model.replace(vocab_size=300, source_vocab_size=304))
    _, alone = run_steps(config.replace(mesh={"data": 1}))
    _, sharded = run_steps(config.replace(mesh={"data": 1, "fsdp": 2, "tensor": 2}), num_devices=4)
    assert [step["loss"] for step in sharded] == pytest.approx([step["loss"] for step in alone], abs=1e-5)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_transformers_translates_the_same(trained, tmp_path):
    """The exported directory holds the model and a tokenizer with two vocabularies."""
    import torch
    from transformers import AutoTokenizer, MarianMTModel

    config, _ = trained
    run, target = load(config.workdir), tmp_path / "exported"
    export_run(config.workdir, target)
    fields = json.loads((target / "config.json").read_text())
    assert (fields["vocab_size"], fields["decoder_vocab_size"]) == (296, 300)
    assert not fields["share_encoder_decoder_embeddings"]
    theirs, tokenizer = MarianMTModel.from_pretrained(target).eval(), AutoTokenizer.from_pretrained(target)
    inputs = [text for text, _ in PAIRS[6:10]]
    batch = tokenizer(inputs, return_tensors="pt", padding=True)
    ids = np.random.default_rng(0).integers(0, 300, (4, 7))
    with torch.no_grad():
        logits = theirs(**batch, decoder_input_ids=torch.tensor(ids)).logits.numpy()
        new = theirs.generate(**batch, max_new_tokens=20, num_beams=1, do_sample=False)
    ours = forward(run, ids, batch["input_ids"].numpy(), inputs_mask=batch["attention_mask"].numpy())
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    translated = tokenizer.batch_decode(new, skip_special_tokens=True)
    assert generate(run, inputs, max_new_tokens=20) == translated == [text for _, text in PAIRS[6:10]]
    assert generate(load(target), inputs, max_new_tokens=20) == translated
    assert jax.tree.structure(load(target).params) == jax.tree.structure(run.params)
