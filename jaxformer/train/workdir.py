"""The run directory: who owns it, and writing the files that make it self-contained."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jaxformer.config import RunConfig, load_json, save_json
from jaxformer.data import load_tokenizer, make_tokenizer, open_source, prepare
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

# What may change between two sittings of one run: how it runs and how long, not what it computes.
MAY_CHANGE = (
    "workdir",
    "train.steps",
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
    """Whether the directory already holds this run; raises if it is someone else's or cannot be written."""
    path = Path(config.workdir)
    _check_writable(path)
    if not (path / "config.json").exists():
        return False
    differences = _differences(load_json(path).model_dump(mode="json"), config.model_dump(mode="json"))
    if differences:
        shown = "\n".join(f"  {key}: there {old!r}, now {new!r}" for key, old, new in differences)
        raise UserError(
            f"workdir '{path}' belongs to a run with another config; "
            f"choose another with workdir=..., or restore these values:\n{shown}"
        )
    return True


def write_run_files(config: RunConfig, tokenizer: Tokenizer) -> Path:
    """Make the directory and what `load` needs besides checkpoints."""
    path = Path(config.workdir)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(path)
    save_json(config, path)
    return path


def prepare_run(config: RunConfig) -> str:
    """Tokenise and pack the data of a run into its directory; training then reads it from there."""
    config.check_data()
    resumes = check_workdir(config)
    tokenizer = load_tokenizer(config.workdir) if resumes else make_tokenizer(config, open_source(config.data.train))
    with tempfile.TemporaryDirectory(dir=_existing_parent(Path(config.workdir))) as partial:
        sets = prepare(config, tokenizer, partial)  # before the run directory exists: bad data leaves none behind
        target = write_run_files(config, tokenizer) / "data"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(partial, target)
    return f"{sets.train.num_tokens:,} training tokens in {len(sets.train):,} rows prepared in {target}"


def _check_writable(path: Path) -> None:
    existing = _existing_parent(path)
    if not existing.is_dir():
        raise UserError(f"workdir '{path}': '{existing}' is a file, choose another with workdir=...")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"workdir '{path}': no permission to write in '{existing}', choose another with workdir=...")


def _existing_parent(path: Path) -> Path:
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if key in MAY_CHANGE or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        below = (_differences(old.get(n), new.get(n), f"{key}.{n}" if key else n) for n in names)
        return [difference for found in below for difference in found]
    return [(key, old, new)]
