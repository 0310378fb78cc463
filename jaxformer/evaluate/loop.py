"""The evaluation loop: which metrics are due at a step, and their values for a model.

A metric is one file with a function `(config, run, heldout) -> values` and one line in `METRICS`. Its config class and
the names of its values are in `config/metrics.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxformer import hosts
from jaxformer.config import MetricConfig, RunConfig
from jaxformer.data import Objective, PackedSet, make_loader
from jaxformer.evaluate.exact_match import exact_match
from jaxformer.evaluate.heldout import HeldOut
from jaxformer.evaluate.perplexity import perplexity
from jaxformer.run import Run
from jaxformer.sharding import batch_ways

Metric = Callable[[Any, Run, HeldOut], dict[str, float]]
METRICS: Mapping[str, Metric] = {"perplexity": perplexity, "exact_match": exact_match}


class Evaluation:
    """Measures the metrics of a config on its held-out set. Without a held-out set, no metric is ever due."""

    def __init__(self, config: RunConfig, heldout: PackedSet | None, objective: Objective, mesh: Mesh) -> None:
        self._config = config
        self._metrics = config.evaluate.metrics if heldout is not None else ()
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
        return [metric for metric in self._metrics if step == self._config.train.steps or self._is_due(metric, step)]

    def measure(self, run: Run, metrics: Sequence[MetricConfig] | None = None) -> dict[str, float]:
        """The values of these metrics; None measures all of them."""
        values: dict[str, float] = {}
        for metric in self._metrics if metrics is None else metrics:
            values |= METRICS[metric.kind](metric, run, self._heldout)
        return values

    def _is_due(self, metric: MetricConfig, step: int) -> bool:
        every = self._config.evaluate.every if metric.every is None else metric.every
        return isinstance(every, int) and step % every == 0
