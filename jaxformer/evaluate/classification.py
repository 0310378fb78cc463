"""Classification of held-out texts: accuracy, F1, Matthews correlation, and correlations of a regression."""

import numpy as np

from jaxformer.config import Classification
from jaxformer.evaluate import scores
from jaxformer.evaluate.heldout import HeldOut, mean_losses
from jaxformer.run import Run


def classification(config: Classification, run: Run, heldout: HeldOut) -> dict[str, float]:
    """The loss and the scores that suit `model.pooler.problem`."""
    batches = list(heldout.predictions(run, config.batches or run.config.evaluate.batches))
    loss, _ = mean_losses(batch.sums for batch in batches)
    # Empty rows fill up the last batch.
    logits = np.concatenate([batch.logits[batch.weights > 0] for batch in batches])
    labels = np.concatenate([batch.labels[batch.weights > 0] for batch in batches])
    return {"heldout_loss": loss, **PROBLEMS[run.config.model.pooler.problem](logits, labels)}


def single_label(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of class ids [examples]; with two classes also the F1 of the last one."""
    predictions = logits.argmax(axis=1)
    values = {
        "class_accuracy": scores.accuracy(labels, predictions),
        "macro_f1": scores.macro_f1(labels, predictions),
        "matthews": scores.matthews(labels, predictions),
    }
    if logits.shape[1] == 2:
        values["f1"] = scores.binary_f1(labels == 1, predictions == 1)
    return values


def multi_label(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of 0 and 1 for every class, [examples, classes]; a class is predicted if its probability exceeds 0.5."""
    labels, predictions = labels > 0.5, logits > 0
    return {
        "class_accuracy": scores.accuracy(labels, predictions),
        "micro_f1": scores.micro_f1(labels, predictions),
        "macro_f1": scores.macro_f1(labels, predictions),
    }


def regression(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Correlations with the labels [examples, numbers]; the mean over numbers if there are several."""
    columns = list(zip(labels.T, predictions.T, strict=True))
    return {
        "pearson": float(np.mean([scores.pearson(*column) for column in columns])),
        "spearman": float(np.mean([scores.spearman(*column) for column in columns])),
    }


PROBLEMS = {"single_label": single_label, "multi_label": multi_label, "regression": regression}
