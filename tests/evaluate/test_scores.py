"""Scores are equal to those of scikit-learn, SciPy, seqeval and sacreBLEU, also for degenerate predictions."""

import math
import warnings

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, strategies as st
from scipy import stats
from seqeval import metrics as seqeval
from sklearn import metrics as sklearn

from jaxformer.evaluate import scores
from jaxformer.evaluate.bleu import corpus_scores
from jaxformer.evaluate.classification import multi_label, regression, single_label
from jaxformer.evaluate.tag_f1 import entities, entity_scores


@pytest.fixture(autouse=True)
def ignore_warnings():
    """The references warn where a score is undefined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pairs(elements, min_size=1):
    """Labels and predictions; few distinct values, so that constant sides and missing classes are frequent."""
    return st.lists(st.tuples(elements, elements), min_size=min_size, max_size=30).map(lambda rows: np.array(rows).T)


def approx(value):
    return pytest.approx(value, abs=1e-12, nan_ok=True)


# ---------------------------------------------------------------- classes
@given(pairs(st.integers(0, 3)))
def test_single_label_scores_are_those_of_scikit_learn(sides):
    labels, predictions = sides
    values = single_label(np.eye(4)[predictions], labels)
    assert values == {
        "class_accuracy": approx(sklearn.accuracy_score(labels, predictions)),
        "macro_f1": approx(sklearn.f1_score(labels, predictions, average="macro")),
        "matthews": approx(sklearn.matthews_corrcoef(labels, predictions)),
    }


@given(pairs(st.integers(0, 1)))
def test_the_last_of_two_classes_is_the_positive_one(sides):
    labels, predictions = sides
    values = single_label(np.eye(2)[predictions], labels)
    assert values["f1"] == approx(sklearn.f1_score(labels, predictions, pos_label=1))
    assert values["matthews"] == approx(sklearn.matthews_corrcoef(labels, predictions))


def test_matthews_of_many_examples_is_exact():
    """The product of counts exceeds 64 bits."""
    labels = np.repeat([0, 1], 200_000)
    predictions = np.roll(labels, 1000)
    assert scores.matthews(labels, predictions) == approx(0.99)


@given(st.integers(1, 4).flatmap(lambda c: pairs(st.lists(st.booleans(), min_size=c, max_size=c))))
def test_multi_label_scores_are_those_of_scikit_learn(sides):
    labels, predictions = np.moveaxis(sides, 0, -1)
    values = multi_label(np.where(predictions, 0.3, -0.3), labels.astype(np.float32))
    expected, found = labels.astype(int), predictions.astype(int)
    # scikit-learn reads a matrix with one column as single-label classes.
    assert values["class_accuracy"] == approx((expected == found).all(axis=1).mean())
    assert values["micro_f1"] == approx(sklearn.f1_score(expected.ravel(), found.ravel()))
    by_class = [sklearn.f1_score(expected[:, c], found[:, c]) for c in range(expected.shape[1])]
    assert values["macro_f1"] == approx(np.mean(by_class))
    if expected.shape[1] > 1:
        assert values["class_accuracy"] == approx(sklearn.accuracy_score(expected, found))
        assert values["micro_f1"] == approx(sklearn.f1_score(expected, found, average="micro"))
        assert values["macro_f1"] == approx(sklearn.f1_score(expected, found, average="macro"))


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    "elements", [st.integers(-2, 2).map(float), st.floats(-1e3, 1e3, width=32)], ids=["few values", "many values"]
)
def test_correlations_are_those_of_scipy(elements):
    @given(pairs(elements, min_size=2))
    def check(sides):
        labels, predictions = sides
        values = regression(predictions[:, None], labels[:, None])
        constant = any((side == side[0]).all() for side in sides)
        assert math.isnan(values["pearson"]) == math.isnan(values["spearman"]) == constant
        # Where the spread is at the precision of the values, SciPy itself warns that its result is inaccurate.
        if constant or all(side.std() > 1e-6 * np.abs(side).max() for side in sides):
            assert values["pearson"] == pytest.approx(stats.pearsonr(labels, predictions)[0], abs=1e-9, nan_ok=True)
        assert values["spearman"] == pytest.approx(stats.spearmanr(labels, predictions)[0], abs=1e-9, nan_ok=True)

    check()


def test_several_numbers_have_the_mean_of_their_correlations():
    labels, predictions = np.random.default_rng(0).normal(size=(2, 20, 3))
    expected = np.mean([stats.pearsonr(labels[:, i], predictions[:, i])[0] for i in range(3)])
    assert regression(predictions, labels)["pearson"] == approx(expected)


# ---------------------------------------------------------------- tags
TAGS = [f"{prefix}-{type}" for prefix in "BIES" for type in ("x", "y", "x-y")]
SENTENCES = st.lists(
    st.lists(st.tuples(*[st.sampled_from(["O", "O", *TAGS])] * 2), min_size=1, max_size=12), min_size=1, max_size=5
)


@given(SENTENCES)
def test_entity_scores_are_those_of_seqeval(sentences):
    """Random tags are mostly invalid sequences."""
    labels, predictions = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    assert entity_scores(labels, predictions) == {
        "tag_precision": approx(seqeval.precision_score(labels, predictions)),
        "tag_recall": approx(seqeval.recall_score(labels, predictions)),
        "tag_f1": approx(seqeval.f1_score(labels, predictions)),
    }
    for tags in labels:
        assert [tuple(entity) for entity in entities(tags)] == seqeval.sequence_labeling.get_entities(tags)


def test_entities_of_a_valid_sentence():
    tags = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-ORG"]
    assert entities(tags) == [("PER", 0, 1), ("LOC", 3, 3), ("LOC", 4, 4), ("ORG", 5, 5)]


# ---------------------------------------------------------------- translations
@pytest.mark.parametrize("tokenize", ["13a", "intl", "char"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_and_chrf_are_those_of_sacrebleu(tokenize, lowercase):
    outputs = ["A man, in a hat, sleeps.", "Two dogs run across the GREEN grass near a fence."]
    targets = ["A man in an orange hat sleeps.", "Two dogs run across the green grass."]
    values = corpus_scores(outputs, targets, tokenize, lowercase)
    reference = sacrebleu.corpus_bleu(outputs, [targets], tokenize=tokenize, lowercase=lowercase)
    assert values["bleu"] == reference.score > 0
    if not lowercase:
        assert values["chrf"] == sacrebleu.corpus_chrf(outputs, [targets]).score
    version, case = sacrebleu.__version__, "lc" if lowercase else "mixed"
    assert values["bleu_signature"] == f"nrefs:1|case:{case}|eff:no|tok:{tokenize}|smooth:exp|version:{version}"
    assert values["chrf_signature"] == f"nrefs:1|case:{case}|eff:yes|nc:6|nw:0|space:no|version:{version}"
