"""The contract of every objective, and the targets of causal and sequence-to-sequence training."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxformer.config import Causal, DataConfig, MemorySource, RunConfig, Seq2Seq, SpecialIds
from jaxformer.data import Bytes, build_set, make_loader, make_tokenizer, open_split
from jaxformer.data.tokenizer import TokenizerPair
from jaxformer.errors import UserError
from jaxformer.layers import Transformer, init_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani
from jaxformer.objectives import OBJECTIVES, make_objective
from jaxformer.ops.losses import LossOptions
from jaxformer.typing import abstract_batch

SHAPE = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "vocab_size": 300}
BYTES = Bytes()


# ---------------------------------------------------------------- contract of every objective
def test_batches_have_the_declared_layout(config, objective):
    packed = build_set(config.data, objective, "train")
    batch = make_loader(config, packed, objective).batch(0)
    expected = abstract_batch(config.batch_layout, config.data.batch_size)
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    shapes = [(a.shape, a.dtype) for a in jax.tree.leaves(batch)]
    assert shapes == [(a.shape, a.dtype) for a in jax.tree.leaves(expected)]


def test_empty_rows_have_no_targets(config, objective):
    packed = build_set(config.data, objective, "train")
    batch = objective.batch(packed.rows([0], size=3), lambda row: np.random.RandomState(row))
    assert batch.weights[0].any()
    assert not batch.weights[1:].any()


def test_rows_depend_only_on_their_own_columns_and_generator(config, objective):
    packed = build_set(config.data, objective, "train")
    whole = objective.batch(packed.rows([0, 1, 2]), lambda row: np.random.RandomState(row))
    alone = objective.batch(packed.rows([2]), lambda row: np.random.RandomState(2))
    for ours, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(ours[2:], theirs)


def test_stored_rows_are_not_changed_by_corruption(config, objective):
    rows = build_set(config.data, objective, "train").rows([0, 1])
    before = {name: column.copy() for name, column in rows.items()}
    objective.batch(rows, lambda row: np.random.RandomState(row))
    for name, column in rows.items():
        np.testing.assert_array_equal(column, before[name])


def test_truncation_keeps_the_beginning_of_every_example(config, caplog):
    data = config.data.replace(length=8, too_long="truncate")
    config = config.replace(data=data)
    objective = make_objective(config, make_tokenizer(config, open_split(data, "train")))
    with caplog.at_level("WARNING"):
        packed = build_set(data.replace(pack=False), objective, "train")
    documents = open_split(data, "train")
    assert len(packed) == len(documents)
    if any(len(str(document)) > 60 for document in documents):
        assert "are truncated" in caplog.text


@pytest.mark.parametrize("kind", ["masked", "span", "infill", "word2vec"])
def test_texts_without_tokens_are_skipped_with_a_warning_that_does_not_call_them_long(objective_for, kind, caplog):
    objective = objective_for(kind)
    objective.tokenizer.encode_batch = lambda texts: [BYTES.encode(text.strip(".")) for text in texts]
    data = objective.config.replace(train=MemorySource(documents=("some text", "...", "more text")))
    with caplog.at_level("WARNING"):
        build_set(data, objective, "train")
    assert "1 of 3 examples have too little text that the tokenizer knows and are skipped (example 1)" in caplog.text
    assert "longer" not in caplog.text
    with pytest.raises(UserError, match=r"no example has enough text that the tokenizer knows \(example 0\)"):
        build_set(data.replace(train=MemorySource(documents=("...",))), objective, "train")


def test_loss_and_gradients_are_finite(config, objective):
    packed = build_set(config.data, objective, "train")
    batch = make_loader(config, packed, objective).batch(0)
    model, params = Transformer(config.model), init_params(config.model, jax.random.key(0))
    loss = OBJECTIVES[config.data.objective.kind].loss

    def total(params):
        sums, _ = loss(model, params, batch, LossOptions(label_smoothing=0.1))
        return sums.loss, sums

    (value, sums), gradient = jax.value_and_grad(total, has_aux=True)(params)
    assert np.isfinite(float(value))
    assert float(sums.weight) == batch.weights.sum()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("kind", ["masked", "span", "ul2", "infill"])
def test_corruption_changes_with_the_step(config_for, objective_for, kind):
    config, objective = config_for(kind), objective_for(kind)
    config = config.replace(data=config.data.replace(batch_size=2))
    packed = build_set(config.data, objective, "train")
    loader = make_loader(config, packed, objective)
    assert len(packed) % 2 == 0 or len(packed) > 2
    rows = packed.rows([0, 1])
    first, second = (objective.batch(rows, lambda row, s=step: np.random.RandomState(10 * s + row)) for step in (1, 2))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    again = loader.batch(3)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(loader.batch(3)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# ---------------------------------------------------------------- shapes
@pytest.mark.parametrize("kind", sorted(OBJECTIVES))
def test_a_model_of_another_shape_is_an_error_that_names_the_shapes_that_work(config_for, kind):
    config = config_for(kind)
    shapes = config.data.objective.shapes
    for other in (gpt2(**SHAPE | {"vocab_size": 400}), vaswani(**SHAPE | {"vocab_size": 400}, mlp_dim=8)):
        if other.shape not in shapes:
            with pytest.raises(ValueError, match=f"kind={kind} needs a model that is {' or '.join(shapes)}"):
                config.replace(model=other)


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_a_model_without_classes_is_an_error(config_for, kind):
    config = config_for(kind)
    with pytest.raises(ValueError, match=r"set model\.pooler with num_classes"):
        config.replace(model=config_for("masked").model)


# ---------------------------------------------------------------- causal and seq2seq
def causal(length: int):
    cfg = DataConfig(train=MemorySource(documents=("a",)), length=length, objective=Causal())
    return make_objective(RunConfig(model=gpt2(**SHAPE), data=cfg), BYTES)


def seq2seq(special: SpecialIds, **data):
    cfg = DataConfig(train=MemorySource(pairs=(("a", "b"),)), objective=Seq2Seq(input_length=3), length=4, **data)
    return make_objective(RunConfig(model=vaswani(**SHAPE, mlp_dim=8, special=special), data=cfg), BYTES)


@given(st.text("ab", max_size=40), st.integers(1, 12))
def test_causal_targets_contain_every_token_once(text, length):
    pieces = causal(length).pieces({"text": BYTES.encode(text)})
    tokens, targets = (np.concatenate([p[name] for p in pieces]).tolist() for name in ("tokens", "targets"))
    assert targets == [*BYTES.encode(text), BYTES.eos_id]
    assert tokens == [BYTES.bos_id, *BYTES.encode(text)]
    assert all(len(piece["tokens"]) == length for piece in pieces[:-1])
    assert 1 <= len(pieces[-1]["tokens"]) <= length


def test_seq2seq_shifts_targets_and_appends_eos():
    special = SpecialIds(bos=1, decoder_start=3, eos=(2, 4))
    (piece,) = seq2seq(special).pieces({"inputs": [10, 11, 2], "targets": [20, 21, 22]})
    assert piece["inputs"].tolist() == [10, 11, 2]
    assert piece["tokens"].tolist() == [3, 20, 21, 22]
    assert piece["targets"].tolist() == [20, 21, 22, 2]


@pytest.mark.parametrize(("inputs", "targets"), [([10] * 4, [20]), ([10], [20] * 4)])
def test_seq2seq_skips_pairs_that_do_not_fit(inputs, targets):
    assert seq2seq(SpecialIds()).pieces({"inputs": inputs, "targets": targets}) == []


def test_truncated_texts_count_the_bytes_of_their_targets():
    config = RunConfig(
        model=gpt2(**SHAPE),
        data=DataConfig(train=MemorySource(documents=("abcdefghij", "xyz")), length=5, pack=False, too_long="truncate"),
    )
    packed = build_set(config.data, make_objective(config, BYTES), "train")
    rows = packed.rows([0, 1])
    assert [BYTES.decode(row) for row in rows["targets"]] == ["abcde", "xyz"]
    assert packed.num_bytes == 8


def test_seq2seq_truncates_pairs_if_asked_to():
    encoded = seq2seq(SpecialIds(), too_long="truncate").encode([{"inputs": "abcde", "targets": "abcde"}])
    assert encoded == [
        {"inputs": [*BYTES.encode("ab"), BYTES.eos_id], "targets": BYTES.encode("abc"), "truncated": True}
    ]


@pytest.mark.parametrize("kind", ["span", "ul2", "infill"])
def test_one_text_has_one_tokenizer(config_for, kind):
    """Otherwise the encoder would read ids of the target's vocabulary."""
    config = config_for(kind)
    tokens = Bytes().with_tokens(config.data.objective.tokens)
    with pytest.raises(UserError, match=f"kind={kind} reads the same text on both sides.*source_tokenizer=none"):
        make_objective(config, TokenizerPair(Bytes(), tokens))
    pairs = config_for("seq2seq")
    assert make_objective(pairs, TokenizerPair(Bytes(), tokens)).kind == "seq2seq"


@pytest.mark.parametrize("kind", ["classify", "tag", "causal"])
@pytest.mark.parametrize("options", [LossOptions(label_smoothing=0.1), LossOptions(z_loss=0.1)])
def test_smoothing_and_z_loss_change_every_loss_with_a_softmax(config_for, objective_for, kind, options):
    config, objective = config_for(kind), objective_for(kind)
    batch = make_loader(config, build_set(config.data, objective, "train"), objective).batch(0)
    model, params = Transformer(config.model), init_params(config.model, jax.random.key(0))
    plain, changed = (objective.loss(model, params, batch, each)[0] for each in (LossOptions(), options))
    assert plain.loss == pytest.approx(plain.nll)
    assert changed.loss != plain.loss
    assert changed.nll == plain.nll


def test_losses_without_a_softmax_take_no_smoothing(config_for):
    regression = config_for("classify")
    pooler = regression.model.pooler.replace(problem="regression")
    regression = {"model": regression.model.replace(pooler=pooler), "data": regression.data}
    word2vec = {"model": config_for("word2vec").model, "data": config_for("word2vec").data}
    for parts, name in ((regression, "label_smoothing"), (regression, "z_loss"), (word2vec, "label_smoothing")):
        with pytest.raises(ValueError, match=rf"train\.{name}=0\.1 changes a softmax, which data\.objective\.kind="):
            RunConfig(**parts, train={name: 0.1})
