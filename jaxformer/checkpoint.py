"""Checkpoints: the only file that knows Orbax.

A checkpoint is a step directory with the train state, the data position and the config. It appears under its
name only when complete (Orbax renames a temporary directory), and is written while training goes on.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxformer.config import CheckpointConfig, RunConfig
from jaxformer.errors import UserError
from jaxformer.typing import PyTree

METRIC = "heldout_loss"


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: str | Path, config: CheckpointConfig | None = None) -> None:
        """Without a config the checkpoints are read-only."""
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every phase of every save
        self.directory = Path(directory).resolve() / "checkpoints"
        self._manager = ocp.CheckpointManager(self.directory, options=_options(config))

    def save(
        self, step: int, state: PyTree, config: RunConfig, position: Mapping[str, int], heldout_loss: float | None
    ) -> None:
        """Start writing; returns when the arrays are copied out, before they are on disk."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(dict(position)),
            config=ocp.args.JsonSave(config.model_dump(mode="json")),
        )
        metrics = None if heldout_loss is None else {METRIC: heldout_loss}
        self._manager.save(step, args=items, metrics=metrics, force=True)

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def restore(self, abstract: PyTree, step: int | None = None) -> tuple[PyTree, dict[str, int]]:
        """State and data position; `abstract` gives shapes, dtypes and shardings, of any mesh."""
        step = self._existing(step)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
        restored = self._read(step, items)
        return restored["state"], restored["data"]

    def restore_params(self, abstract: PyTree, step: int | None = None) -> tuple[PyTree, int]:
        """Parameters to decode with (the moving average where there is one) and their step; nothing else is read."""
        step = self._existing(step)
        path = self.directory / str(step) / "state"
        with ocp.PyTreeCheckpointer() as reader:
            saved = self._guarded(step, lambda: reader.metadata(path).item_metadata)
            if saved is None:
                raise self._damaged(step, "its metadata is missing or damaged")
            name = "ema" if saved.tree.get("ema") else "params"
            args = ocp.args.PyTreeRestore(
                {name: abstract},
                restore_args={name: ocp.checkpoint_utils.construct_restore_args(abstract)},
                partial_restore=True,
            )
            state = self._guarded(step, lambda: reader.restore(path, args=args))
        return state[name], step

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if not steps:
            raise UserError(f"'{self.directory.parent}' has no complete checkpoint: train it first")
        if step is not None and step not in steps:
            raise UserError(f"'{self.directory}' has no checkpoint of step {step}; there are: {steps}")
        return steps[-1] if step is None else step

    def _read(self, step: int, items: ocp.args.Composite) -> Any:
        return self._guarded(step, lambda: self._manager.restore(step, args=items))

    def _guarded(self, step: int, read: Any) -> Any:
        try:
            return read()
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise self._damaged(step, str(error).splitlines()[0]) from error

    def _damaged(self, step: int, reason: str) -> UserError:
        others = [s for s in self.steps if s != step]
        remedy = f"delete that directory to go back to step {others[-1]}" if others else "there is no older one"
        return UserError(f"checkpoint '{self.directory / str(step)}' cannot be read ({reason}): {remedy}")


def abstract_like(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes and dtypes of `tree` with these shardings: what `restore` wants."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)


def _options(config: CheckpointConfig | None) -> ocp.CheckpointManagerOptions:
    if config is None:
        return ocp.CheckpointManagerOptions(read_only=True, create=False)
    keep: list[policies.PreservationPolicy] = [policies.LatestN(config.keep_last)]
    if config.keep_best:
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[METRIC],
            reverse=True,
            n=config.keep_best,
            keep_checkpoints_without_metrics=False,
        )
        keep.append(best)
    return ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        cleanup_tmp_directories=True,
    )
