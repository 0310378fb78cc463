"""Saving and restoring of checkpoints; no other module uses Orbax.

A checkpoint is a directory per step with the train state, the data position and the config. It is written while
training continues, and atomically: Orbax renames a temporary directory when it is complete.
"""

import logging
import math
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from jaxformer.config import RunConfig, dump_config
from jaxformer.errors import UserError
from jaxformer.rundir import RunDir
from jaxformer.typing import PyTree


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: RunDir, config: RunConfig | None = None) -> None:
        """Open the checkpoints for reading, and with a config also for writing."""
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every phase of every save
        self.directory = _absolute(run_dir.checkpoints)
        self._best = None if config is None else config.checkpoint.best
        self._manager = ocp.CheckpointManager(self.directory, options=_options(config))

    def save(
        self,
        step: int,
        state: PyTree,
        config: RunConfig,
        position: Mapping[str, Any],
        metrics: Mapping[str, float | str] | None = None,
    ) -> None:
        """Start writing a checkpoint; returns when the arrays are copied from the devices, before they are on disk.

        Args:
          metrics: values measured at this step; only steps with a value of `checkpoint.best` can be kept as best.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(dict(position)),
            config=ocp.args.JsonSave(dump_config(config)),
        )
        best = (metrics or {}).get(self._best)
        # An undefined value, such as the correlation with constant predictions, cannot be ranked.
        measured = {self._best: best} if best is not None and math.isfinite(best) else None
        self._manager.save(step, args=items, metrics=measured, force=True)

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    @property
    def position(self) -> dict[str, Any]:
        """The data position of the latest checkpoint."""
        return self._read_items(self._find_step(None), ocp.args.Composite(data=ocp.args.JsonRestore()))["data"]

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def restore(self, abstract: PyTree, step: int | None = None) -> tuple[PyTree, dict[str, Any]]:
        """Restore the state and the data position of a step, by default the latest.

        Args:
          abstract: shapes, dtypes and shardings; the mesh may differ from that of the run that saved the checkpoint.
        """
        step = self._find_step(step)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
        restored = self._read_items(step, items)
        return restored["state"], restored["data"]

    def restore_params(
        self, trainable: PyTree, frozen: PyTree | None = None, step: int | None = None
    ) -> tuple[PyTree, PyTree | None, int]:
        """Restore only the parameters for inference: trainable, frozen, and their step.

        The trainable parameters are the moving average if the run keeps one.
        """
        step = self._find_step(step)
        path = self.directory / str(step) / "state"
        with ocp.PyTreeCheckpointer() as reader:
            saved = self._read(step, lambda: reader.metadata(path).item_metadata)
            if saved is None:
                raise self._read_error(step, "its metadata is missing or damaged")
            name = "ema" if saved.tree.get("ema") else "params"
            abstract = {name: trainable} if frozen is None else {name: trainable, "frozen": frozen}
            args = ocp.args.PyTreeRestore(
                abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
            )
            state = self._read(step, lambda: reader.restore(path, args=args))
        return state[name], state.get("frozen"), step

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def _find_step(self, step: int | None) -> int:
        steps = self.steps
        if not steps:
            raise UserError(f"'{self.directory.parent}' has no complete checkpoint: train it first")
        if step is not None and step not in steps:
            raise UserError(f"'{self.directory}' has no checkpoint of step {step}; there are: {steps}")
        return steps[-1] if step is None else step

    def _read_items(self, step: int, items: ocp.args.Composite) -> Any:
        return self._read(step, lambda: self._manager.restore(step, args=items))

    def _read(self, step: int, read: Any) -> Any:
        try:
            return read()
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise self._read_error(step, str(error).splitlines()[0]) from error

    def _read_error(self, step: int, reason: str) -> UserError:
        others = [s for s in self.steps if s != step]
        remedy = f"delete that directory to go back to step {others[-1]}" if others else "there is no older one"
        return UserError(f"checkpoint '{self.directory / str(step)}' cannot be read ({reason}): {remedy}")


def abstract_like(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes and dtypes of `tree` with these shardings, the argument of `restore`."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)


def _options(config: RunConfig | None) -> ocp.CheckpointManagerOptions:
    if config is None:
        return ocp.CheckpointManagerOptions(read_only=True, create=False)
    keep: list[policies.PreservationPolicy] = [policies.LatestN(config.checkpoint.keep_last)]
    if config.checkpoint.keep_best:
        best = config.checkpoint.best
        keep.append(
            policies.BestN(
                get_metric_fn=lambda metrics: metrics[best],
                reverse=config.reported[best] == "min",
                n=config.checkpoint.keep_best,
                keep_checkpoints_without_metrics=False,
            )
        )
    return ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(keep),
        cleanup_tmp_directories=True,
        create=False,  # saving creates the directory: a run that fails before leaves nothing behind
    )


def _absolute(path: epath.Path) -> epath.Path:
    """Orbax requires absolute paths; a path in an object store is already absolute."""
    return path if "://" in str(path) else epath.Path(os.path.abspath(path))
