"""Checks whether a directory belongs to a run, and writes the files that make a run directory self-contained."""

import shutil
import tempfile
from typing import Any

from jaxformer.config import RunConfig
from jaxformer.convert.generation import GENERATION_FILE, read_generation_fields
from jaxformer.convert.hub import local_directory
from jaxformer.data import complete_labels, load_tokenizer, make_tokenizer, open_split, prepare
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective
from jaxformer.rundir import RunDir, existing_parent, write_json

# Config keys that may change when a run is resumed: how it runs and for how long, not what it computes.
MAY_CHANGE = (
    "workdir",
    "train.steps",
    "train.early_stopping",
    "train.log_every",
    "train.loss_chunks",
    "train.remat",
    "train.unroll",
    "train.attention",
    "train.peak_flops",
    "mesh",
    "checkpoint",
    "evaluate",
    "data.workers",
    "data.prefetch",
)


def check_workdir(config: RunConfig) -> bool:
    """Whether the directory already holds this run; raises if it belongs to another run or is not writable."""
    run_dir = RunDir(config.workdir)
    run_dir.check_writable()
    if not run_dir.has_config:
        return False
    if run_dir.average.exists():
        raise UserError(
            f"workdir '{run_dir}' is an average of checkpoints, which has no optimizer state to continue from: choose "
            f"another directory with workdir=..., and set train.start={run_dir}"
        )
    differences = _differences(run_dir.read_config().model_dump(mode="json"), config.model_dump(mode="json"))
    if differences:
        shown = "\n".join(f"  {key}: saved {old!r}, now {new!r}" for key, old, new in differences)
        raise UserError(
            f"workdir '{run_dir}' belongs to a run with another config; "
            f"choose another directory with workdir=..., or restore these values:\n{shown}"
        )
    return True


def write_run_files(config: RunConfig, tokenizer: Tokenizer) -> RunDir:
    """Create the directory and the files that `load` needs besides checkpoints."""
    run_dir = RunDir(config.workdir)
    run_dir.make()
    tokenizer.save(run_dir.path)
    run_dir.write_config(config)
    return run_dir


def copy_generation_defaults(config: RunConfig) -> None:
    """Copy generation_config.json from the directory that training starts from, if it has one."""
    if config.train.start is None:
        return
    fields = read_generation_fields(local_directory(config.train.start.path))
    if fields is not None:
        write_json(RunDir(config.workdir).path / GENERATION_FILE, fields)


def prepare_run(config: RunConfig) -> str:
    """Tokenise and pack the data of a run into its directory; training then reads it from there."""
    config.check_data()
    config = complete_labels(config)
    tokenizer = find_or_make_tokenizer(config, resumes=check_workdir(config))
    with tempfile.TemporaryDirectory(dir=existing_parent(config.workdir)) as partial:
        # Prepare in a temporary directory first, so that invalid data leaves no run directory behind.
        sets = prepare(config.data, make_objective(config, tokenizer), tokenizer, partial)
        target = write_run_files(config, tokenizer).data
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(partial, target)
    return f"{sets.train.num_tokens:,} training tokens in {len(sets.train):,} rows prepared in {target}"


def find_or_make_tokenizer(config: RunConfig, resumes: bool) -> Tokenizer:
    """The tokenizer in the workdir if the run resumes, else the one that the config specifies."""
    return load_tokenizer(config.workdir) if resumes else make_tokenizer(config, open_split(config.data, "train"))


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if key in MAY_CHANGE or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        nested = (_differences(old.get(n), new.get(n), f"{key}.{n}" if key else n) for n in names)
        return [difference for differences in nested for difference in differences]
    return [(key, old, new)]
