"""The source files of the Python standard library: 11 MB of real text that needs no download."""

import os
import sysconfig
import tokenize
from pathlib import Path

from jaxformer.config import StdlibSource
from jaxformer.data.sources.split import is_heldout
from jaxformer.errors import UserError

# Tests would be half of the corpus and are repetitive; installed packages and caches are not part of the library.
EXCLUDED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Generated when Python is built, with paths of the build machine.
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


def open_stdlib(cfg: StdlibSource) -> list[dict[str, str]]:
    """Return the files of one split, sorted by path, without blank files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = (_text(root / name) for name in split_files(root, cfg))
    documents = [{"text": text} for text in texts if text is not None and text.strip()]
    if not documents:
        raise UserError(
            f"the stdlib source found no Python source under {root}: use a Python installation with .py files"
        )
    return documents


def split_files(root: Path, cfg: StdlibSource) -> list[str]:
    """Return the files of one split, as paths relative to `root`."""
    wanted = cfg.split == "heldout"
    return [name for name in library_files(root) if is_heldout(name, cfg.heldout_percent) == wanted]


def library_files(root: Path) -> list[str]:
    """Return all files of the corpus, as sorted paths relative to `root`."""
    names = []
    for directory, children, files in os.walk(root):
        # Prune the walk in place: site-packages can hold a hundred times more files than the library.
        children[:] = [name for name in children if _is_wanted(name)]
        names += [Path(directory, name) for name in files if name.endswith(".py") and _is_wanted(name)]
    return sorted(path.relative_to(root).as_posix() for path in names)


def _is_wanted(name: str) -> bool:
    return name not in EXCLUDED_DIRECTORIES and not name.startswith(EXCLUDED_PREFIXES)


def _text(path: Path) -> str | None:
    """Read a source file; None if it is invalid in the encoding that it declares."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None
