"""Training objectives, one file each: from the token ids of an example to the loss of a batch.

Their config classes are in `config/objectives.py`. To add an objective, write its config class and a file in this
package, and add it to `OBJECTIVES`.
"""

from jaxformer.config import RunConfig
from jaxformer.data.tokenizer import Tokenizer, special_ids
from jaxformer.objectives.base import Objective as Objective
from jaxformer.objectives.causal import Causal
from jaxformer.objectives.seq2seq import Seq2Seq

OBJECTIVES: dict[str, type[Objective]] = {objective.kind: objective for objective in (Causal, Seq2Seq)}


def make_objective(config: RunConfig, tokenizer: Tokenizer) -> Objective:
    """The objective of a run. Its loss alone is `OBJECTIVES[kind].loss`, which needs no tokenizer."""
    return OBJECTIVES[config.data.objective.kind](config.data, special_ids(config.model, tokenizer))
