"""Progress display and metric logging during training, without making the device wait."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxformer.errors import UserError
from jaxformer.train.metrics import MetricWriter

# Number of steps whose metrics may be in flight, so that reading metrics does not wait for the step just dispatched.
LAG = 2
# Shown until the first step is complete.
COMPILING = "compiling the train step..."


class PhaseTimer:
    """Measures the wall time of each phase of a run; a phase may be entered many times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class DivergedError(UserError):
    """The loss or the gradient norm is not finite."""


class Recorder:
    """Receives the metrics of each step as device arrays, checks that they are finite, and logs every few steps."""

    def __init__(
        self, writer: MetricWriter, bar: "Bar", *, log_every: int, step_flops: float, peak_flops: float | None
    ) -> None:
        self._writer, self._bar, self._log_every = writer, bar, log_every
        self._step_flops, self._peak_flops = step_flops, peak_flops
        self._pending: deque[tuple[int, dict[str, jax.Array]]] = deque()
        self._latest: tuple[int, dict[str, float]] = (0, {})
        self._held: tuple[int, dict[str, float | str]] | None = None
        self._start_interval()

    def add(self, step: int, metrics: dict[str, jax.Array], input_wait: float) -> None:
        """Queue the metrics of a step just dispatched; `input_wait` is the time in seconds its batch took to arrive."""
        self._input_wait += input_wait
        self._pending.append((step, metrics))
        while len(self._pending) > LAG:
            self._process(*self._pending.popleft())

    def flush(self) -> None:
        """Wait for all metrics in flight and check them."""
        while self._pending:
            self._process(*self._pending.popleft())

    def attach(self, extra: Mapping[str, float | str]) -> None:
        """Log the latest step with the results of an evaluation, even if `log_every` would skip that step."""
        self._held = (self._latest[0], {**(self._held or self._latest)[1], **extra})

    def pause(self) -> None:
        """Restart the timer, so that evaluation and compilation do not count as training time."""
        self._start_interval()

    def close(self) -> None:
        """Write the last record, which was held back so that evaluation results could be added to it."""
        if self._held is not None:
            self._writer.write(*self._held)
            self._held = None

    def _process(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.close()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                raise DivergedError(f"{name} is {values[name]} at step {step}")
        self._steps += 1
        self._tokens += values.pop("tokens")
        speed = self._speed()
        self._bar.update(step, values["loss"], speed["tokens_per_second"])
        self._latest = (step, values | speed)
        if step % self._log_every == 0:
            self._held = self._latest
            self._start_interval()

    def _speed(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        speed = {
            "tokens_per_second": self._tokens / seconds,
            "step_seconds": seconds / self._steps,
            "input_wait": self._input_wait / seconds,
        }
        if self._peak_flops is not None:
            speed["mfu"] = self._step_flops * self._steps / seconds / self._peak_flops
        return speed

    def _start_interval(self) -> None:
        self._since, self._steps, self._tokens, self._input_wait = time.perf_counter(), 0, 0.0, 0.0


class Bar:
    """Progress bar with step, loss, tokens per second and time left; plain lines if there is no terminal."""

    def __init__(self, console: Console, start: int, steps: int) -> None:
        self._console, self._steps, self._next_line = console, steps, start
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(COMPILING, total=steps, completed=start, loss="-", speed="-")

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        fields: dict[str, Any] = {"loss": f"{loss:.3f}", "speed": f"{tokens_per_second:,.0f}"}
        self._progress.update(self._task, description="training", completed=step, **fields)
        if not self._console.is_terminal and (step >= self._next_line or step == self._steps):
            self._console.print(f"step {step}/{self._steps}  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")
            self._next_line = step + max(1, self._steps // 20)

    def __enter__(self) -> "Bar":
        if not self._console.is_terminal:
            self._console.print(COMPILING)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
