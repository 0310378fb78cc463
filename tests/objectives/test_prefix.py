"""Prefix language models: what is predicted, the attention mask, and decoding with the same mask."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxformer as jf
from jaxformer.config import Causal, Prefix, RunConfig
from jaxformer.convert.export import export_model
from jaxformer.data.packing import fill_records, split_records
from jaxformer.errors import UserError
from jaxformer.layers import Transformer, init_params
from jaxformer.models.llama import llama
from jaxformer.models.rnn import rnn
from jaxformer.models.vaswani import vaswani
from jaxformer.run import Run

MODEL = llama(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=50, context_length=128).replace(
    prefix=True
)


def make_run(model=MODEL) -> Run:
    params = init_params(model, jax.random.key(0))
    # Larger than usual, so that the most likely token depends on the whole context.
    return Run(RunConfig(model=model), Transformer(model), jax.tree.map(lambda leaf: leaf * 4, params), None, 0)


def causal_run(run: Run) -> Run:
    """The same weights as a causal language model."""
    model = MODEL.replace(prefix=False)
    return Run(RunConfig(model=model), Transformer(model), run.params, None, 0)


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


# ---------------------------------------------------------------- batches
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=2), st.integers(0, 100), st.data())
def test_the_tokens_after_a_random_prefix_are_predicted(objective_for, lengths, seed, data):
    low, high = sorted(data.draw(st.floats(0, 1)) for _ in range(2))
    objective = objective_for("prefix", min_fraction=low, max_fraction=high)
    pieces = [objective.pieces({"text": list(range(5, 5 + n))})[0] for n in lengths]
    rows = split_records(fill_records(pieces, np.zeros(len(pieces), int), objective.layout), objective.layout)
    batch = objective.batch(rows, lambda i: np.random.RandomState(seed))
    start = 0
    for piece in pieces:
        where = slice(start, start := start + len(piece["tokens"]))
        size, num_tokens = int(batch.tokens.prefix[0, where].sum()), len(piece["tokens"])
        assert batch.tokens.prefix[0, where][:size].all(), "a prefix is at the beginning"
        least = max(1, np.ceil(low * num_tokens))
        assert least <= size <= max(least, high * num_tokens)
        np.testing.assert_array_equal(batch.weights[0, where], np.arange(num_tokens) >= size - 1)
        np.testing.assert_array_equal(batch.targets[0, where], piece["targets"])
    assert not batch.tokens.prefix[0, start:].any()
    assert not batch.weights[0, start:].any()


def test_the_inputs_of_a_pair_are_the_prefix_of_its_targets(objective_for):
    objective = objective_for("prefix", fields="pairs")
    (ids,) = objective.encode([{"inputs": "ab", "targets": "c"}])
    (piece,) = objective.pieces(ids)
    prompt = objective.tokenizer.encode_prompt(["ab"])[0]
    stream = [*prompt, *objective.tokenizer.encode_batch(["c"])[0], objective.special.first_eos]
    np.testing.assert_array_equal(piece["tokens"], stream[:-1])
    np.testing.assert_array_equal(piece["targets"], stream[1:])
    rows = split_records(fill_records([piece], np.zeros(1, int), objective.layout), objective.layout)
    batch = objective.batch(rows, None)
    assert batch.tokens.prefix.sum() == len(prompt)
    np.testing.assert_array_equal(batch.weights[0, : len(stream) - 1], [0] * (len(prompt) - 1) + [1, 1])


def test_pairs_longer_than_a_row_are_dropped_or_truncated(objective_for):
    objective = objective_for("prefix", fields="pairs")
    pair = {"inputs": "a" * 30, "targets": "b" * 30}
    assert objective.pieces(objective.encode([pair])[0]) == []
    objective.config = objective.config.replace(too_long="truncate")
    (ids,) = objective.encode([pair])
    (piece,) = objective.pieces(ids)
    assert ids["truncated"]
    assert (len(piece["tokens"]), piece["prefix"].sum()) == (24, 23)


# ---------------------------------------------------------------- configs
@pytest.mark.parametrize(
    ("model", "objective", "message"),
    [
        (MODEL, Causal(), "model.prefix=false or data.objective.kind=prefix"),
        (MODEL.replace(prefix=False), Prefix(), "set model.prefix=true or data.objective.kind=causal"),
        (
            vaswani(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=300),
            Prefix(),
            "needs a model that is decoder-only, but model is encoder-decoder",
        ),
    ],
)
def test_models_and_objectives_that_do_not_fit_are_errors(config_for, model, objective, message):
    config = config_for("causal")
    with pytest.raises(ValueError, match=message):
        config.replace(model=model, data=config.data.replace(objective=objective))


def test_recurrent_models_have_no_prefix():
    model = rnn(cell="lstm", num_layers=1, embed_dim=8, dim=8, vocab_size=300)
    with pytest.raises(ValueError, match="prefix=true on a model that is recurrent: only a decoder-only transformer"):
        model.replace(prefix=True)


def test_fractions_out_of_order_are_an_error():
    with pytest.raises(ValueError, match=r"min_fraction=0\.9 is more than max_fraction=0\.1"):
        Prefix(min_fraction=0.9, max_fraction=0.1)


# ---------------------------------------------------------------- the mask
def test_logits_equal_those_of_transformers_with_the_same_mask(run, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "hf").mkdir()
    export_model(tmp_path / "hf", causal_run(run).config.model, run.params, np.dtype("float32"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    ids, prefix = np.arange(20).reshape(2, 10) + 5, np.arange(10) < np.array([[4], [7]])
    seen = np.tril(np.ones((10, 10), bool)) | prefix[:, None, :]
    mask = torch.tensor(np.where(seen, 0, -np.inf)[:, None], dtype=torch.float32)
    expected = theirs(torch.tensor(ids), attention_mask=mask).logits.detach().numpy()
    np.testing.assert_allclose(jf.forward(run, ids, prefix=prefix), expected, atol=1e-4)
    assert abs(expected - np.asarray(jf.forward(run, ids))).max() > 0.1, "the prefix must matter"


WINDOW = MODEL.replace(
    decoder=MODEL.decoder.replace(
        pattern=tuple(block.replace(attention=block.attention.replace(window=4)) for block in MODEL.decoder.pattern)
    )
)


@pytest.mark.parametrize("model", [pytest.param(MODEL, id="full"), pytest.param(WINDOW, id="window")])
@pytest.mark.parametrize("options", [{}, {"num_beams": 1, "batch_size": 1}])
def test_decoding_uses_the_mask_of_training(model, options, monkeypatch):
    run = make_run(model)
    monkeypatch.setattr("jaxformer.decode.slots.PREFILL_CHUNK", 4)
    prompts = [[5, 9, 30, 2, 44, 7, 8, 20, 21], [11, 12, 13]]
    outputs = jf.generate(run, prompts, max_new_tokens=6, **options)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = list(prompt)
        for _ in range(6):
            prefix = (np.arange(len(ids)) < len(prompt))[None]
            ids.append(int(np.asarray(jf.forward(run, np.array([ids]), prefix=prefix))[0, -1].argmax()))
        assert ids[len(prompt) :] == list(output)


def test_scores_of_targets_after_a_prompt(run):
    prompts, targets = [[5, 9, 30], [7]], [[4, 8], [10, 11, 12]]
    for prompt, target, values in zip(prompts, targets, jf.score(run, targets, prompts), strict=True):
        ids = np.array([[*prompt, *target]])
        logits = jf.forward(run, ids, prefix=(np.arange(ids.shape[1]) < len(prompt))[None])
        log_probs = jax.nn.log_softmax(logits[0, len(prompt) - 1 : -1])
        np.testing.assert_allclose(values, log_probs[np.arange(len(target)), target], atol=1e-5)
    with pytest.raises(UserError, match="add_bos=True"):
        jf.score(run, targets, prompts, add_bos=True)


def test_embeddings_read_texts_in_both_directions(run):
    ids = [[5, 9, 30, 2]]
    causal = causal_run(run)
    assert abs(jf.embed(run, ids) - jf.embed(causal, ids)).max() > 1e-3


def test_a_prefix_language_model_cannot_be_exported(run, tmp_path):
    with pytest.raises(UserError, match="llama: its prefix would be False, not True"):
        export_model(tmp_path, MODEL, run.params, np.dtype("float32"))


def test_other_models_take_no_prefix(run):
    causal = causal_run(run)
    with pytest.raises(UserError, match=r"model.prefix=false\); leave prefix out"):
        jf.forward(causal, np.ones((1, 3), int), prefix=np.ones((1, 3)))
    with pytest.raises(UserError, match="takes no inputs"):
        jf.score(causal, [[1, 2]], [[3]])
