"""Scores of predictions, in NumPy: F1, Matthews correlation, Pearson and Spearman correlation.

Single-label classification has class ids as labels and predictions; multi-label classification has matrices
[examples, classes] of booleans. Undefined scores follow scikit-learn and SciPy: an F1 without labels and predictions
and a Matthews correlation with a constant side are 0, a Pearson or Spearman correlation with a constant side is NaN.
"""

import math

import numpy as np


# ---------------------------------------------------------------- classes
def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Fraction of correct predictions; of several labels per example, all must be correct."""
    correct = labels == predictions
    return float(np.mean(correct if correct.ndim == 1 else correct.all(axis=1)))


def binary_f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """F1 of one class; labels and predictions are booleans."""
    return float(_f1(*_counts(labels, predictions)))


def macro_f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Mean F1 of the classes; of single-label classes, those that occur in the labels or the predictions."""
    if labels.ndim == 1:
        classes = np.union1d(labels, predictions)
        labels, predictions = labels[:, None] == classes, predictions[:, None] == classes
    return float(np.mean(_f1(*_counts(labels, predictions))))


def micro_f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """F1 of all labels of all examples together, for multi-label classification."""
    return binary_f1(labels.ravel(), predictions.ravel())


def matthews(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Matthews correlation coefficient of any number of classes: R_K of Gorodkin (2004)."""
    classes = np.union1d(labels, predictions)
    is_label, is_prediction = labels[:, None] == classes, predictions[:, None] == classes

    def covariance(a: np.ndarray, b: np.ndarray) -> int:
        # Python integers: a product of counts is exact at any number of examples.
        total = len(a) * int((a & b).sum())
        return total - sum(x * y for x, y in zip(a.sum(axis=0).tolist(), b.sum(axis=0).tolist(), strict=True))

    product = covariance(is_label, is_label) * covariance(is_prediction, is_prediction)
    return covariance(is_label, is_prediction) / math.sqrt(product) if product else 0.0


def _counts(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of true positives, labels and predictions of each class."""
    return (labels & predictions).sum(axis=0), labels.sum(axis=0), predictions.sum(axis=0)


def _f1(num_correct: np.ndarray, num_labels: np.ndarray, num_predictions: np.ndarray) -> np.ndarray:
    total = num_labels + num_predictions
    return 2 * num_correct / np.where(total > 0, total, 1)


# ---------------------------------------------------------------- numbers
def pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Linear correlation."""
    sides = [np.asarray(side, np.float64) for side in (labels, predictions)]
    if any((side == side[0]).all() for side in sides):
        return math.nan
    # Scaling by the largest value first prevents overflow and underflow of the squares.
    centred = [side - side.mean() for side in sides]
    centred = [side / np.abs(side).max() for side in centred]
    x, y = (side / np.linalg.norm(side) for side in centred)
    return float(np.clip(x @ y, -1.0, 1.0))


def spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Rank correlation: the Pearson correlation of ranks, where equal values share their mean rank."""
    return pearson(_ranks(labels), _ranks(predictions))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
