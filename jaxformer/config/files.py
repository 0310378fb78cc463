"""Run files in, `config.json` in and out.

A run file is Python with a function `config()` that returns a `RunConfig`. It is executed only when the
user names it on the command line; a run directory is always reloaded from its `config.json`.
"""

import json
import runpy
from pathlib import Path

from pydantic import ValidationError

from jaxformer.config.overrides import apply_overrides, explained, validated
from jaxformer.config.run import RunConfig
from jaxformer.errors import UserError

FILE_NAME = "config.json"


def load_run_file(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> RunConfig:
    """The config a Python run file returns, with overrides and the default workdir applied."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"config file '{path}' does not exist: name a Python file such as configs/quickstart.py")
    try:
        function = runpy.run_path(str(path)).get("config")
        if function is None:
            raise UserError(f"config file '{path}' has no function config()")
        config = function()
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in explained(error))) from None
    if not isinstance(config, RunConfig):
        raise UserError(f"config file '{path}': config() returned {type(config).__name__}, expected RunConfig")
    config = apply_overrides(config, overrides)
    return config if config.workdir else config.model_copy(update={"workdir": f"runs/{path.stem}"})


def load_json(directory: str | Path) -> RunConfig:
    """The config of a run directory; executes no code."""
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        raise UserError(f"'{directory}' is not a run directory: it has no {FILE_NAME}")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    return validated(RunConfig, tree, source=str(path))


def save_json(config: RunConfig, directory: str | Path) -> None:
    """Write `config.json`, whole or not at all."""
    path = Path(directory) / FILE_NAME
    partial = path.with_suffix(".json.partial")
    partial.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
