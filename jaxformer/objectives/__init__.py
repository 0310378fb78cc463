"""Objectives: one file each, from the ids of an example to the loss of a batch; `config/objectives.py` has their keys.

A new objective is its config class, its file here, and one line in `OBJECTIVES`.
"""

from jaxformer.config import RunConfig
from jaxformer.data.tokenizer import Tokenizer, special_ids
from jaxformer.objectives.base import Objective as Objective
from jaxformer.objectives.causal import Causal
from jaxformer.objectives.seq2seq import Seq2Seq

OBJECTIVES: dict[str, type[Objective]] = {objective.kind: objective for objective in (Causal, Seq2Seq)}


def make_objective(config: RunConfig, tokenizer: Tokenizer) -> Objective:
    """The objective of a run; its loss alone needs no tokenizer: `OBJECTIVES[kind].loss`."""
    return OBJECTIVES[config.data.objective.kind](config.data, special_ids(config.model, tokenizer))
