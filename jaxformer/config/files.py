"""Loading of Python config files, and reading and writing of `config.json`.

A Python config file defines a function `config()` that returns a `RunConfig`. It is executed only when the user passes
it to a command; the config of a run directory is always read from its `config.json`.
"""

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxformer.config.migrate import VERSION, migrate
from jaxformer.config.overrides import apply_overrides, explained, validate_tree
from jaxformer.config.run import RunConfig
from jaxformer.errors import UserError


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a Python config file; apply the overrides and the default workdir."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"config file '{path}' does not exist: name a Python file such as configs/quickstart.py")
    try:
        with _local_imports(path.resolve().parent):
            function = runpy.run_path(str(path)).get("config")
            config = function() if callable(function) else function
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in explained(error))) from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except SyntaxError as error:
        where = "" if error.lineno is None else f"line {error.lineno}: "
        raise UserError(f"config file '{path}' is not valid Python ({where}{error.msg})") from None
    except ImportError as error:
        raise UserError(f"config file '{path}' cannot be imported ({error}): install or correct the import") from None
    if function is None:
        raise UserError(f"config file '{path}' has no function config(): define one that returns a RunConfig")
    if not isinstance(config, RunConfig):
        raise UserError(f"config file '{path}': config() returned {type(config).__name__}, expected RunConfig")
    config = apply_overrides(config, overrides)
    return config if config.workdir else config.model_copy(update={"workdir": f"runs/{path.stem}"})


def parse_config(text: str, where: str) -> RunConfig:
    """Parse the text of a `config.json` of this or an earlier version; executes no code."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    return validate_tree(RunConfig, migrate(tree, where) if isinstance(tree, dict) else tree, source=where)


def dump_config(config: RunConfig) -> dict[str, Any]:
    """The content of `config.json` as a dictionary."""
    return {"version": VERSION, **config.model_dump(mode="json")}


@contextmanager
def _local_imports(directory: Path) -> Iterator[None]:
    """Let a config file import modules from its own directory.

    They are removed from `sys.modules` afterwards, because configs in other directories may import other modules of
    the same name.
    """
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin is not None and Path(origin).parent == directory:
                del sys.modules[name]
