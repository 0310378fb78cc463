"""Entity-level precision, recall and F1 of tags, as conlleval and seqeval's default mode count them.

Tags are `O`, `B-type`, `I-type`, and `E-type` and `S-type` of the IOBES scheme. A predicted entity is correct if its
first word, last word and type are. Invalid sequences also contain entities: an `I-` or `E-` tag that does not continue
an entity of the same type begins one.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.config import TagF1
from jaxformer.evaluate.heldout import HeldOut, Predictions, mean_losses
from jaxformer.run import Run


class Entity(NamedTuple):
    type: str
    first: int
    last: int


def tag_f1(config: TagF1, run: Run, heldout: HeldOut) -> dict[str, float]:
    """The loss, the accuracy of the tags, and the scores of entities if the tags delimit any."""
    batches = list(heldout.predictions(run, config.batches or run.config.evaluate.batches))
    loss, accuracy = mean_losses(batch.sums for batch in batches)
    values = {"heldout_loss": loss, "tag_accuracy": accuracy}
    model = run.config.model
    if "tag_f1" in config.reported(run.config.data.objective, model):
        sentences = [sentence for batch in batches for sentence in _sentences(batch, model.pooler.labels)]
        values |= entity_scores(*zip(*sentences, strict=True))
    return values


def entity_scores(labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of the entities of all sentences; 0 where a fraction has no denominator."""
    num_correct = num_labels = num_predictions = 0
    for expected, found in zip(labels, predictions, strict=True):
        expected, found = entities(expected), entities(found)
        num_correct += len(set(expected) & set(found))
        num_labels += len(expected)
        num_predictions += len(found)
    return {
        "tag_precision": num_correct / max(num_predictions, 1),
        "tag_recall": num_correct / max(num_labels, 1),
        "tag_f1": 2 * num_correct / max(num_labels + num_predictions, 1),
    }


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, in order."""
    found: list[Entity] = []
    previous = ""
    for i, (prefix, type) in enumerate(map(_split_tag, tags)):
        continues = prefix in "IE" and previous in ("B", "I") and found[-1].type == type
        if continues:
            found[-1] = found[-1]._replace(last=i)
        elif prefix != "O":
            found.append(Entity(type, i, i))
        previous = prefix
    return found


def _split_tag(tag: str) -> tuple[str, str]:
    prefix, _, type = tag.partition("-")
    return prefix, type


def _sentences(batch: Predictions, names: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Labels and predictions of every sentence of the packed rows, at the first token of each word."""
    predictions = batch.logits.argmax(axis=-1)
    for row, segments in enumerate(batch.segments):
        for segment in range(1, segments.max() + 1):
            words = np.flatnonzero((segments == segment) & (batch.weights[row] > 0))
            yield tuple([names[id] for id in ids[row, words]] for ids in (batch.labels, predictions))
