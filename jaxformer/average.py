"""Checkpoint averaging: the mean of the parameters of several checkpoints as a new run (arXiv:1706.03762, 6.1)."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.checkpoint import Checkpoints
from jaxformer.convert.directory import is_hugging_face
from jaxformer.convert.generation import GENERATION_FILE
from jaxformer.errors import UserError
from jaxformer.exchange import ORIGIN
from jaxformer.layers.partition import Partition
from jaxformer.run import Run, load
from jaxformer.rundir import RunDir, new_directory, write_json


def average_run(
    path: str | Path, target: str | Path, *, last: int | None = None, steps: Sequence[int] | None = None
) -> str:
    """Create a run directory whose only checkpoint holds the mean of the parameters of checkpoints of another run.

    A run that keeps an exponential moving average of its parameters contributes that. The new run has no optimizer
    state: to train it further, name it in `train.start`.

    Args:
      last: average the latest checkpoints, this many.
      steps: average the checkpoints of these steps.
    """
    path, target = Path(path), Path(target)
    if is_hugging_face(path):
        raise UserError(f"'{path}' is a Hugging Face directory: name a run directory with several checkpoints")
    steps = _select_steps(RunDir(path), last, steps)
    with new_directory(target) as partial:
        run = load_average(path, steps)
        config = run.config.model_copy(update={"workdir": str(target)})
        trainable, frozen = Partition(config.model, config.train.freeze).split(run.params)
        state = {"params": trainable} if frozen is None else {"params": trainable, "frozen": frozen}
        with Checkpoints(RunDir(partial), config) as checkpoints:
            checkpoints.save(run.step, state, config, {"step": run.step})
        if run.tokenizer is not None:
            run.tokenizer.save(partial)
        for name in (GENERATION_FILE, ORIGIN):
            if (path / name).is_file():
                shutil.copyfile(path / name, partial / name)
        write_json(RunDir(partial).average, {"run": str(path), "steps": steps})
        RunDir(partial).write_config(config)
    return f"average of steps {', '.join(map(str, steps))} written to {target}"


def load_average(path: str | Path, steps: Sequence[int]) -> Run:
    """The run with the mean of its parameters at these steps, at the last of them."""
    run = load(path, step=steps[0])
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, run.params)
    mean = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), run.params)
    for count, step in enumerate(steps[1:], start=2):
        run = load(path, step=step)
        mean = _add_to_mean(mean, run.params, np.float32(count))
    params = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), mean, dtypes)
    return replace(run, params=params)


@jax.jit
def _add_to_mean(mean, params, count):
    # A running mean needs the memory of two models, and keeps parameters that never change, such as frozen ones, exact.
    return jax.tree.map(lambda old, new: old + (new.astype(jnp.float32) - old) / count, mean, params)


def _select_steps(run_dir: RunDir, last: int | None, steps: Sequence[int] | None) -> list[int]:
    """The steps to average, in order; raises if the run has not kept their checkpoints."""
    config = run_dir.read_config()
    with Checkpoints(run_dir) as checkpoints:
        kept = checkpoints.steps
    if (last is None) == (steps is None):
        raise UserError("give either the number of latest checkpoints (--last N) or their steps (--steps N N ...)")
    wanted = sorted(set(steps)) if last is None else kept[-last:]
    keep = f"set checkpoint.keep_last (it was {config.checkpoint.keep_last}) when training, to keep more"
    if last is not None and last < 1:
        raise UserError(f"--last {last}: must be at least 1")
    if last is not None and last > len(kept):
        raise UserError(f"--last {last}: '{run_dir}' has kept {len(kept)} checkpoints, {kept}: {keep}")
    missing = [step for step in wanted if step not in kept]
    if missing or not wanted:
        raise UserError(f"--steps: '{run_dir}' has no checkpoints of {missing}; there are: {kept}; {keep}")
    return wanted
