"""Word vectors: batches, the loss against torch, files that gensim reads, metrics, and embeddings of models."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

import jaxformer as jf
from jaxformer.config import (
    DataConfig,
    EvaluateConfig,
    MemorySource,
    OptimConfig,
    RunConfig,
    TrainConfig,
    Word2Vec,
    WordsTokenizer,
    WordVectors,
)
from jaxformer.data import Bytes, build_set, make_loader
from jaxformer.data.tokenizer import Words, huggingface_files, load_tokenizer
from jaxformer.errors import UserError
from jaxformer.evaluate.report import evaluate
from jaxformer.evaluate.word_vectors import analogy_accuracy, read_analogies, read_similarities, similarity
from jaxformer.exchange import export_run
from jaxformer.layers import Transformer, init_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.word2vec import word2vec
from jaxformer.objectives import make_objective
from jaxformer.objectives.word2vec import find_contexts, kept_shares
from jaxformer.ops.losses import LossOptions
from jaxformer.train.loop import train
from jaxformer.word_vectors import format_vectors, read_vectors, rows_of_words

QUIET = Console(quiet=True)
ANIMALS, COLOURS = ["cat", "dog", "cow", "pig"], ["red", "blue", "green", "white"]


def sentences() -> tuple[str, ...]:
    """Animals occur only with animals, and colours with colours."""
    random = np.random.RandomState(0)
    groups = [ANIMALS, COLOURS] * 60
    return tuple(" ".join(random.choice(group, 12)) for group in groups)


def make_config(workdir, **objective) -> RunConfig:
    source = MemorySource(documents=sentences())
    return RunConfig(
        workdir=str(workdir),
        model=word2vec(vocab_size=16, embed_dim=8),
        data=DataConfig(
            train=source,
            heldout=source,
            tokenizer=WordsTokenizer(min_count=1),
            objective=Word2Vec(subsample=0.0, window=3, **objective),
            length=16,
            batch_size=8,
        ),
        optim=OptimConfig(learning_rate=0.03, schedule={"kind": "constant"}, weight_decay=0.0),
        train=TrainConfig(steps=60),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("word2vec") / "run"
    return train(make_config(workdir), QUIET)


# ---------------------------------------------------------------- batches
@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 1000))
def test_contexts_are_the_words_within_reach_in_the_same_text(length, window, seed):
    random = np.random.RandomState(seed)
    tokens, reach = random.randint(4, 9, (2, length)), random.randint(1, window + 1, (2, length))
    segments = np.sort(random.randint(0, 3, (2, length)))[:, ::-1]
    contexts, weights = find_contexts(tokens, segments, reach, window)
    for b, t in np.ndindex(2, length):
        expected = [
            tokens[b, s]
            for s in range(length)
            if s != t and abs(s - t) <= reach[b, t] and segments[b, s] == segments[b, t] > 0
        ]
        assert contexts[b, t][weights[b, t] > 0].tolist() == expected


def test_frequent_words_are_left_out_as_in_gensim():
    word2vec_module = pytest.importorskip("gensim.models.word2vec")
    counts = {"the": 900, "cat": 90, "sat": 10}
    theirs = word2vec_module.Word2Vec(min_count=1, sample=0.01, vector_size=4)
    theirs.build_vocab_from_freq(counts)
    ours = kept_shares(np.array(list(counts.values())), 0.01)
    for word, share in zip(counts, ours, strict=True):
        assert theirs.wv.get_vecattr(word, "sample_int") / 2**32 == pytest.approx(share, rel=1e-5)


def test_random_words_follow_the_counts(objective_for):
    objective = objective_for("word2vec", negative_power=1.0)
    rows = {"tokens": np.full((200, 24), 5, np.int32), "segments": np.ones((200, 24), np.int32)}
    drawn = objective.batch(rows, np.random.RandomState).negatives
    shares = np.bincount(drawn.ravel(), minlength=objective.tokenizer.vocab_size) / drawn.size
    counts = objective.tokenizer.counts
    np.testing.assert_allclose(shares[: len(counts)], counts / counts.sum(), atol=0.01)
    assert not shares[: len(counts)][counts == 0].any(), "special tokens are never drawn"


@pytest.mark.parametrize("architecture", ["skip_gram", "cbow"])
def test_the_loss_equals_that_of_torch(config_for, objective_for, architecture):
    torch = pytest.importorskip("torch")
    config, objective = config_for("word2vec"), objective_for("word2vec")
    config = config.replace(
        data=config.data.replace(objective=config.data.objective.replace(architecture=architecture))
    )
    objective = make_objective(config, objective.tokenizer)
    batch = make_loader(config, build_set(config.data, objective, "train"), objective).batch(0)
    params = jax.tree.map(lambda leaf: leaf * 20, init_params(config.model, jax.random.key(0)))
    sums, _ = objective.loss(Transformer(config.model), params, batch, LossOptions())
    inputs = torch.tensor(np.asarray(params["embedding"]["tokens"]))
    outputs = torch.tensor(np.asarray(params["head"]["output"]["kernel"])).T
    total, count = 0.0, 0
    for b, t in np.ndindex(*batch.tokens.ids.shape):
        contexts = batch.targets[b, t][batch.weights[b, t] > 0]
        if not len(contexts):
            continue
        if architecture == "cbow":
            cases = [(inputs[contexts.tolist()].mean(0), batch.tokens.ids[b, t], batch.negatives[b, t, 0])]
        else:
            all_negatives = batch.negatives[b, t][batch.weights[b, t] > 0]
            cases = [(inputs[batch.tokens.ids[b, t]], *each) for each in zip(contexts, all_negatives, strict=True)]
        for x, word, negatives in cases:
            others = [n for n in negatives.tolist() if n != word]
            logits = torch.stack([outputs[int(word)] @ x, *(outputs[n] @ x for n in others)])
            labels = torch.tensor([1.0] + [0.0] * len(others))
            total += torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum").item()
            count += 1
    assert count == sums.weight
    assert float(sums.loss) == pytest.approx(total, rel=1e-5)


# ---------------------------------------------------------------- training
@pytest.mark.parametrize("architecture", ["skip_gram", "cbow"])
def test_words_of_the_same_contexts_become_similar(architecture, tmp_path):
    run = train(make_config(tmp_path, architecture=architecture), QUIET)
    vectors = dict(zip([*ANIMALS, *COLOURS], jf.embed(run, [*ANIMALS, *COLOURS]), strict=True))
    assert vectors["cat"] @ vectors["dog"] > 0.5 > vectors["cat"] @ vectors["red"]


def test_vectors_are_written_in_the_format_of_gensim(trained, tmp_path):
    gensim = pytest.importorskip("gensim")
    export_run(trained.config.workdir, tmp_path / "vectors.txt")
    theirs = gensim.models.KeyedVectors.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert sorted(theirs.index_to_key) == sorted([*ANIMALS, *COLOURS])
    ids = [trained.tokenizer.encode(word)[0] for word in theirs.index_to_key]
    np.testing.assert_array_equal(theirs.vectors, trained.params["embedding"]["tokens"][np.array(ids)])
    with pytest.raises(UserError, match="exists already"):
        export_run(trained.config.workdir, tmp_path / "vectors.txt")


def test_files_of_gensim_are_read(tmp_path):
    gensim = pytest.importorskip("gensim")
    theirs = gensim.models.KeyedVectors(3)
    theirs.add_vectors(["new york", "b"], np.array([[1, 2, 3], [4, 5, 6.5]], np.float32))
    theirs.save_word2vec_format(str(tmp_path / "vectors.txt"))
    words, vectors = read_vectors(tmp_path / "vectors.txt")
    assert words == theirs.index_to_key
    np.testing.assert_array_equal(vectors, theirs.vectors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2\n", "line 1: expected the number of words"),
        ("1 2\na 1 x\n", "line 2: expected one of 1 words with 2 numbers"),
        ("1 2\na 1\n", "line 2: expected one of 1 words with 2 numbers"),
        ("1 2\na 1 2\nb 1 2\n", "line 3"),
        ("2 2\na 1 2\n", "announces 2 words, but there are 1"),
    ],
)
def test_malformed_files_of_vectors(tmp_path, text, message):
    (tmp_path / "vectors.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_vectors(tmp_path / "vectors.txt")


def test_binary_vectors_are_an_error(tmp_path):
    (tmp_path / "vectors.bin").write_bytes(b"1 2\na \xff\xfe\xfd\xfc\xff\xff\xff\xff\n")
    with pytest.raises(UserError, match=r"vectors\.bin: not UTF-8 text.*binary=False"):
        read_vectors(tmp_path / "vectors.bin")


# ---------------------------------------------------------------- metrics
def test_analogies_and_similarities_equal_those_of_gensim(tmp_path):
    gensim = pytest.importorskip("gensim")
    random = np.random.RandomState(0)
    words = [f"w{i}" for i in range(30)]
    vectors = random.standard_normal((30, 4)).astype(np.float32)
    for d in range(20, 30):  # some analogies hold by construction
        a, b, c = random.choice(20, 3, replace=False)
        vectors[d] = vectors[b] - vectors[a] + vectors[c] + 0.3 * random.standard_normal(4)
    questions = [" ".join(words[i] for i in random.choice(30, 4, replace=False)) for _ in range(300)]
    (tmp_path / "analogies.txt").write_text(": one\n" + "\n".join([*questions, "w1 w2 w3 unknown"]) + "\n")
    pairs = [f"{words[a]}\t{words[b]}\t{value}" for a, b, value in zip(*random.randint(0, 30, (3, 40)), strict=True)]
    (tmp_path / "pairs.tsv").write_text("\n".join([*pairs, "w1\tunknown\t3"]) + "\n")
    theirs = gensim.models.KeyedVectors(4)
    theirs.add_vectors(words, vectors)
    accuracy, _ = theirs.evaluate_word_analogies(str(tmp_path / "analogies.txt"))
    correlation = theirs.evaluate_word_pairs(str(tmp_path / "pairs.tsv"))[1][0]
    assert analogy_accuracy(words, vectors, read_analogies(tmp_path / "analogies.txt")) == pytest.approx(accuracy)
    assert similarity(words, vectors, read_similarities(tmp_path / "pairs.tsv")) == pytest.approx(correlation, abs=1e-6)


def test_runs_report_the_metrics_that_have_files(trained, tmp_path):
    (tmp_path / "analogies.txt").write_text("cat dog pig cow\n")
    (tmp_path / "pairs.csv").write_text("word1,word2,score\ncat,dog,9\ncat,red,1\nblue,red,8\n")
    metric = WordVectors(analogies=str(tmp_path / "analogies.txt"), similarities=str(tmp_path / "pairs.csv"))
    assert set(evaluate(trained.config.workdir)) == {"heldout_loss"}
    values = evaluate(trained.config.workdir, [f"evaluate.metrics=[{metric.model_dump_json()}]"])
    assert set(values) == {"heldout_loss", "analogy_accuracy", "word_similarity"}
    assert values["word_similarity"] > 0.4


def test_word_vectors_are_not_quantized(trained):
    with pytest.raises(UserError, match="word vectors are not quantized"):
        evaluate(trained.config.workdir, weights="int8")


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_analogies, "a b c\n", "line 1: expected four words, got 3"),
        (read_similarities, "a b 1\na b\n", "line 2: expected two words and a number"),
        (read_similarities, "a b 1\na c nan\n", "line 2: expected two words and a number"),
    ],
)
def test_malformed_files_of_words(tmp_path, read, text, message):
    (tmp_path / "words.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read(str(tmp_path / "words.txt"))
    with pytest.raises(UserError, match="cannot be read"):
        read(str(tmp_path / "missing.txt"))


@pytest.mark.parametrize(
    ("metric", "text", "message"),
    [
        ("analogies", "cat dog pig\n", "line 1: expected four words"),
        ("analogies", "cat dog pig moon\n", "analogies=.* has 0 of 1 lines with words of the vocabulary"),
        ("similarities", "cat dog 1\nsun dog 2\n", "similarities=.* has 1 of 2 lines .* at least 2 needed"),
        ("vectors", "2 8\na 1\n", r"train\.word_vectors=.* line 2: expected one of 2 words"),
    ],
)
def test_invalid_files_are_found_before_training(tmp_path, metric, text, message):
    (tmp_path / "words.txt").write_text(text)
    config, path = make_config(tmp_path / "run"), str(tmp_path / "words.txt")
    if metric == "vectors":
        config = config.replace(train=config.train.replace(word_vectors=path))
    else:
        config = config.replace(evaluate=EvaluateConfig(metrics=(WordVectors(**{metric: path}),)))
    with pytest.raises(UserError, match=message):
        train(config, QUIET)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- embeddings of another model
def test_a_model_starts_from_word_vectors(trained, tmp_path):
    config = RunConfig(
        workdir=str(tmp_path / "model"),
        model=gpt2(num_layers=1, embed_dim=8, num_heads=2, vocab_size=16, context_length=16),
        data=DataConfig(
            train=MemorySource(documents=sentences()), tokenizer=WordsTokenizer(min_count=2), length=16, batch_size=8
        ),
        optim=OptimConfig(learning_rate=1e-9),
        train=TrainConfig(steps=1, word_vectors=trained.config.workdir),
        evaluate=EvaluateConfig(every=None),
    )
    run = train(config, QUIET)
    for word in ANIMALS:
        ours, theirs = (each.params["embedding"]["tokens"][each.tokenizer.encode(word)[0]] for each in (run, trained))
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_vectors_are_found_by_the_text_of_a_token(tmp_path):
    (tmp_path / "vectors.txt").write_text(
        format_vectors(["cat", "Red"], np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    )
    ids, rows = rows_of_words(tmp_path / "vectors.txt", ["<pad>", "\u2581cat", "Cat", "Red", "red"], 2)
    assert ids.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(rows, [[1, 2], [1, 2], [3, 4]])
    with pytest.raises(UserError, match=r"has vectors of 2 dimensions, but model\.embed_dim=8"):
        rows_of_words(tmp_path / "vectors.txt", ["cat"], 8)
    with pytest.raises(UserError, match="has no word that is a token"):
        rows_of_words(tmp_path / "vectors.txt", ["dog"], 2)
    with pytest.raises(UserError, match="no such file or directory"):
        rows_of_words(tmp_path / "missing.txt", ["dog"], 2)


# ---------------------------------------------------------------- the tokenizer, and what does not fit
def test_words_are_saved_and_encoded_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = Words({"the": 5, "don't": 3, "caf\u00e9": 2}, extra_tokens=("<mask>",))
    words.save(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "The caf\u00e9, don't -- unknown (THE)!"
    assert again.encode(text) == words.encode(text) == [4, 6, 5, 3, 4]
    assert again.tokens() == words.tokens()
    for name, content in huggingface_files(words, "decoder-only").items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text, add_special_tokens=False).input_ids == words.encode(text)


def test_a_damaged_vocabulary(tmp_path):
    (tmp_path / "words.json").write_text(json.dumps({"counts": 3}))
    with pytest.raises(UserError, match="restore the file"):
        load_tokenizer(tmp_path)


def test_word2vec_needs_words(config_for):
    with pytest.raises(UserError, match=r"set data\.tokenizer\.kind=words"):
        make_objective(config_for("word2vec"), Bytes())


def test_word_vectors_generate_no_text(trained):
    with pytest.raises(UserError, match=r"an embedding-only model does not generate text; jf\.embed returns"):
        jf.generate(trained, ["cat"])
    with pytest.raises(ValueError, match="needs a model that is decoder-only, but model is embedding-only"):
        trained.config.replace(data=trained.config.data.replace(objective={"kind": "causal"}))
