"""The evaluation loop: which metrics are due at a step, and their values for a model.

A metric is one file with a function `(config, run, heldout) -> values` and one line in `METRICS`. Its config class and
the names of its values are in `config/metrics.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxformer import hosts
from jaxformer.config import Bleu, ExactMatch, MetricConfig, RunConfig, WordVectors
from jaxformer.data import Objective, PackedSet, make_loader
from jaxformer.evaluate.bleu import bleu
from jaxformer.evaluate.classification import classification
from jaxformer.evaluate.decoding import check_lengths
from jaxformer.evaluate.exact_match import exact_match
from jaxformer.evaluate.heldout import HeldOut
from jaxformer.evaluate.masked import masked
from jaxformer.evaluate.perplexity import perplexity
from jaxformer.evaluate.pseudo_perplexity import pseudo_perplexity
from jaxformer.evaluate.tag_f1 import tag_f1
from jaxformer.evaluate.word_vectors import check_files, word_vectors
from jaxformer.run import Run
from jaxformer.sharding import batch_ways

MetricValues = dict[str, float | str]
"""Numbers, and texts that say how a number was computed, such as sacreBLEU's signatures."""
Metric = Callable[[Any, Run, HeldOut], MetricValues]
METRICS: Mapping[str, Metric] = {
    metric.__name__: metric
    for metric in (perplexity, masked, pseudo_perplexity, exact_match, bleu, classification, tag_f1, word_vectors)
}


class Evaluation:
    """Measures the metrics of a config on its held-out set. Without a held-out set, no metric is ever due."""

    def __init__(self, config: RunConfig, heldout: PackedSet | None, objective: Objective, mesh: Mesh) -> None:
        self._config = config
        self.metrics = config.metrics if heldout is not None else ()
        for metric in self.metrics:
            if isinstance(metric, WordVectors):
                check_files(metric, objective.tokenizer)
            if isinstance(metric, Bleu | ExactMatch):
                check_lengths(metric, config, objective.tokenizer)
        if heldout is not None:
            num_hosts = hosts.process_count()
            loader = make_loader(
                config,
                heldout,
                objective,
                host=hosts.process_index(),
                num_hosts=num_hosts,
                train=False,
                row_multiple=-(-batch_ways(mesh.shape) // num_hosts),
            )
            self._heldout = HeldOut(config, loader, mesh)

    def due(self, step: int) -> list[MetricConfig]:
        """The metrics to measure after this step; all of them after the last step."""
        return [metric for metric in self.metrics if step == self._config.train.steps or self._is_due(metric, step)]

    def measure(self, run: Run, metrics: Sequence[MetricConfig] | None = None) -> MetricValues:
        """The values of these metrics; None measures all of them."""
        values: MetricValues = {}
        for metric in self.metrics if metrics is None else metrics:
            values |= METRICS[metric.kind](metric, run, self._heldout)
        return values

    def _is_due(self, metric: MetricConfig, step: int) -> bool:
        every = self._config.evaluate.every if metric.every is None else metric.every
        return isinstance(every, int) and step % every == 0
