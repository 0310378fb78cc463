"""Training objectives, one file each: from the examples of a source to the loss of a batch.

Their config classes are in `config/objectives.py`. To add an objective, write its config class and a file in this
package, and add it to `OBJECTIVES`.
"""

from jaxformer.config import RunConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.objectives.base import Objective as Objective
from jaxformer.objectives.causal import Causal
from jaxformer.objectives.classify import Classify
from jaxformer.objectives.infill import Infill
from jaxformer.objectives.masked import Masked
from jaxformer.objectives.prefix import Prefix
from jaxformer.objectives.seq2seq import Seq2Seq
from jaxformer.objectives.span import Span
from jaxformer.objectives.tag import Tag
from jaxformer.objectives.ul2 import Ul2
from jaxformer.objectives.word2vec import Word2Vec

OBJECTIVES: dict[str, type[Objective]] = {
    objective.kind: objective
    for objective in (Causal, Prefix, Masked, Seq2Seq, Span, Ul2, Infill, Classify, Tag, Word2Vec)
}


def make_objective(config: RunConfig, tokenizer: Tokenizer) -> Objective:
    """The objective of a run. Its loss alone is `OBJECTIVES[kind].loss`, which needs no tokenizer."""
    return OBJECTIVES[config.data.objective.kind](config, tokenizer)
