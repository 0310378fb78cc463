"""Beam search against transformers: the same hypotheses in the same order with the same scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.convert import SAMPLES
from jaxformer.decode.beam_search import BeamSearchConfig
from jaxformer.decode.cache import reorder_rows, repeat_rows
from jaxformer.errors import UserError

NUM_BEAMS, NEW = 4, 10
TRANSFORMERS_NAMES = {"heuristic": False, "exact": True, "never": "never"}
QUICK = {("exact", 0.0), ("never", 2.0), ("heuristic", -1.0)}


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=pytest.mark.slow), "gpt2"])
def both(request, tmp_path_factory):
    """A random model of transformers, and the run with the same weights."""
    directory = tmp_path_factory.mktemp(request.param)
    return SAMPLES[request.param].save(directory), jf.load(directory)


def prompts(number: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 90, rng.integers(3, 12)).tolist() for _ in range(number)]


def transformers_search(model, prompt, **settings):
    """The hypotheses of transformers, new tokens only and without eos, and their scores."""
    import torch

    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        num_beams=NUM_BEAMS,
        num_return_sequences=NUM_BEAMS,
        do_sample=False,
        use_cache=model.config.model_type != "t5",  # transformers makes as many caches as T5 has encoder layers
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    eos = model.generation_config.eos_token_id
    rows = [row[start:] for row in result.sequences.tolist()]
    return [row[: row.index(eos)] if eos in row else row for row in rows], result.sequences_scores.numpy()


@pytest.mark.parametrize("num_prompts", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_many_prompts_in_one_call(both, num_prompts):
    model, run = both
    results = jf.search(run, prompts(num_prompts), NEW, num_beams=NUM_BEAMS)
    for prompt, ours in zip(prompts(num_prompts), results, strict=True):
        rows, scores = transformers_search(model, prompt)
        assert [hypothesis.output for hypothesis in ours] == rows
        np.testing.assert_allclose([hypothesis.score for hypothesis in ours], scores, atol=1e-4)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"),
    [
        pytest.param(rule, penalty, marks=() if (rule, penalty) in QUICK else pytest.mark.slow)
        for rule in sorted(TRANSFORMERS_NAMES)
        for penalty in (0.0, 2.0, -1.0)
    ],
)
def test_every_early_stopping_rule_and_length_penalty(both, early_stopping, length_penalty):
    model, run = both
    settings = {"length_penalty": length_penalty}
    results = jf.search(run, prompts(4), NEW, num_beams=NUM_BEAMS, early_stopping=early_stopping, **settings)
    for prompt, ours in zip(prompts(4), results, strict=True):
        rows, scores = transformers_search(model, prompt, early_stopping=TRANSFORMERS_NAMES[early_stopping], **settings)
        assert [hypothesis.output for hypothesis in ours] == rows
        np.testing.assert_allclose([hypothesis.score for hypothesis in ours], scores, atol=1e-4)


def test_generate_returns_the_best_hypothesis(both):
    _, run = both
    best = [hypotheses[0].output for hypotheses in jf.search(run, prompts(3), NEW, num_beams=NUM_BEAMS)]
    assert jf.generate(run, prompts(3), NEW, num_beams=NUM_BEAMS) == best


def test_one_beam_is_greedy(both):
    _, run = both
    results = jf.search(run, prompts(5), NEW, num_beams=1)
    assert [hypotheses[0].output for hypotheses in results] == jf.generate(run, prompts(5), NEW)


@pytest.mark.slow
def test_hypotheses_do_not_depend_on_the_batch(both):
    _, run = both
    together = jf.search(run, prompts(5), NEW, num_beams=3)
    for prompt, ours in zip(prompts(5), together, strict=True):
        alone = jf.search(run, [prompt], NEW, num_beams=3)[0]
        assert [each.output for each in alone] == [each.output for each in ours]
        np.testing.assert_allclose([each.score for each in alone], [each.score for each in ours], atol=1e-5)


def test_scores_are_those_of_score(both):
    """The score of an unfinished hypothesis is the mean log-probability of its tokens."""
    _, run = both
    prompt = prompts(1)[0]
    best = next(each for each in jf.search(run, [prompt], NEW, num_beams=NUM_BEAMS)[0] if len(each.output) == NEW)
    if run.config.model.shape == "encoder-decoder":
        logp = jf.score(run, [best.output], [prompt])[0]
    else:
        logp = jf.score(run, [[*prompt, *best.output]])[0][len(prompt) :]
    np.testing.assert_allclose(logp.mean(), best.score, atol=1e-5)


def test_length_normalisation_conventions():
    """The "gnmt" convention divides by ((5 + length) / 6) ** alpha (arXiv:1609.08144, equation 14)."""
    search = BeamSearchConfig(4, length_penalty=0.6, convention="gnmt")
    assert search.normalizer(7) == pytest.approx(2.0**0.6)
    assert BeamSearchConfig(4, length_penalty=0.5).normalizer(9) == pytest.approx(3.0)


def test_zero_new_tokens_and_bad_settings(both):
    _, run = both
    assert jf.search(run, [[5, 6]], 0)[0][0].output == []
    for settings, words in (
        ({"num_beams": 0}, "num_beams=0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"convention": "words"}, "convention='words'"),
        ({"early_stopping": True}, "early_stopping=True"),
    ):
        with pytest.raises(UserError, match=words):
            jf.search(run, [[5, 6]], 3, **settings)


def test_beams_share_cross_attention_keys_and_values(both):
    """Self-attention caches are repeated; cross-attention keys and values exist once per request."""
    from jaxformer.decode.cache import make_caches
    from jaxformer.layers import Runtime
    from jaxformer.layers.attention import KeysValues

    model = both[1].config.model
    cross = None
    if model.encoder is not None:
        source = jnp.arange(2.0)[:, None, None, None]
        cross = [KeysValues(source, source)] * model.decoder.num_layers
    caches = make_caches(model, 2, 3, Runtime(), cross)
    grown = reorder_rows(repeat_rows(caches, 3), jnp.array([5, 0, 0, 1, 2, 3]))
    for before, after in zip(caches, grown, strict=True):
        assert {leaf.shape[0] for leaf in jax.tree.leaves(after.attention)} == {6}
        assert after.cross is before.cross
