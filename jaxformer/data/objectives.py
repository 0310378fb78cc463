"""Objectives: from the ids of one example to the pieces a model trains on.

A piece is what the model reads and what it should answer at each place. A new objective is one function
and one entry in `OBJECTIVES`; packing and the pipeline do not change.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.packing import Layout, Piece
from jaxformer.data.tokenizer import SpecialTokens

Ids = Mapping[str, list[int]]  # ids per field of an example; those of inputs are opened and closed already


class Objective(NamedTuple):
    fields: tuple[str, ...]
    """Fields an example must have."""
    predicted: str
    """The field whose text the targets spell."""
    layout: Callable[[DataConfig], Layout]
    pieces: Callable[[Ids, DataConfig, SpecialTokens], list[Piece]]
    """No piece at all means that the example does not fit and is left out."""


def causal_pieces(ids: Ids, cfg: DataConfig, special: SpecialTokens) -> list[Piece]:
    """A document between bos and eos, cut where a row ends; each token is a target once."""
    stream = np.array([special.bos, *ids["text"], special.first_eos], np.int32)
    tokens, targets = stream[:-1], stream[1:]
    cuts = range(0, len(tokens), cfg.length)
    return [Piece(tokens[cut : cut + cfg.length], targets[cut : cut + cfg.length]) for cut in cuts]


def seq2seq_pieces(ids: Ids, cfg: DataConfig, special: SpecialTokens) -> list[Piece]:
    """A pair, or nothing if either side is too long: half a translation would teach a wrong one."""
    inputs = np.array(ids["inputs"], np.int32)
    stream = np.array([special.start, *ids["targets"], special.first_eos], np.int32)
    if len(inputs) > cfg.objective.input_length or len(stream) - 1 > cfg.length:
        return []
    return [Piece(stream[:-1], stream[1:], inputs)]


OBJECTIVES: dict[str, Objective] = {
    "causal": Objective(
        fields=("text",),
        predicted="text",
        layout=lambda cfg: Layout(cfg.length),
        pieces=causal_pieces,
    ),
    "seq2seq": Objective(
        fields=("inputs", "targets"),
        predicted="targets",
        layout=lambda cfg: Layout(cfg.length, cfg.objective.input_length),
        pieces=seq2seq_pieces,
    ),
}
