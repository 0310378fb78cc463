"""Early stopping: training ends when the value of `checkpoint.best` has not improved for a number of evaluations.

The history is stored in every checkpoint, so an interrupted run stops at the same step as an uninterrupted one.
"""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import RunConfig


class EarlyStopping:
    """Counts evaluations without improvement; never stops if `train.early_stopping` is none."""

    def __init__(self, config: RunConfig, position: Mapping[str, Any] | None) -> None:
        """`position` is the data position of the checkpoint to continue from; None: the run begins."""
        self._config, self._name = config.train.early_stopping, config.checkpoint.best
        self._sign = 1.0 if config.reported.get(self._name) == "max" else -1.0
        history = (position or {}).get("early_stopping", {})
        # Values of another metric cannot be compared.
        history = history if history.get("value") == self._name else {}
        self._best: float | None = history.get("best")
        self._best_step: int = history.get("best_step", 0)
        self._num_worse: int = history.get("num_worse", 0)

    def add(self, step: int, values: Mapping[str, float | str]) -> bool:
        """Whether the values of an evaluation are better than the best so far; NaN is never an improvement."""
        if self._config is None or self._name not in values:
            return False
        value, delta = float(values[self._name]), self._config.min_delta
        if value == value and (self._best is None or self._sign * (value - self._best) > delta):
            self._best, self._best_step, self._num_worse = value, step, 0
            return True
        self._num_worse += 1
        return False

    @property
    def stops(self) -> bool:
        return self._config is not None and self._num_worse >= self._config.patience

    @property
    def history(self) -> dict[str, Any]:
        """What a checkpoint stores besides the step."""
        if self._config is None:
            return {}
        names = {"value": self._name, "best": self._best, "best_step": self._best_step, "num_worse": self._num_worse}
        return {"early_stopping": names}

    @property
    def reason(self) -> str:
        since = "since the run began" if self._best is None else f"since step {self._best_step} ({self._best:.4g})"
        times = f"{self._num_worse} evaluation{'s' * (self._num_worse > 1)}"
        return f"{self._name} has not improved {since}, for {times}"
