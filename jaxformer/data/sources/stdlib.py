"""The source files of the Python standard library: 11 MB of real text on every machine that can run this."""

import hashlib
import os
import sysconfig
import tokenize
from pathlib import Path

from jaxformer.config import StdlibSource
from jaxformer.errors import UserError

# Tests would be half of the corpus and repeat themselves; the other two are not the library's.
EXCLUDED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Written when Python is built, full of that machine's paths.
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


def open_stdlib(cfg: StdlibSource) -> list[dict[str, str]]:
    """The files of one split, in order of their paths; blank files are no documents."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = (_text(root / name) for name in split_files(root, cfg))
    documents = [{"text": text} for text in texts if text is not None and text.strip()]
    if not documents:
        raise UserError(f"the stdlib source found no Python source under {root}: use a Python with its .py files")
    return documents


def is_heldout(name: str, percent: int) -> bool:
    """Whether a built-in corpus holds out the file or day of this name: a fixed function of the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100 < percent


def split_files(root: Path, cfg: StdlibSource) -> list[str]:
    """Paths relative to `root` of the files of one split."""
    wanted = cfg.split == "heldout"
    return [name for name in library_files(root) if is_heldout(name, cfg.heldout_percent) == wanted]


def library_files(root: Path) -> list[str]:
    """Paths relative to `root` of all files of the corpus, sorted."""
    names = []
    for directory, children, files in os.walk(root):
        # Pruned on the way down: site-packages can hold a hundred times more files than the library.
        children[:] = [name for name in children if _is_wanted(name)]
        names += [Path(directory, name) for name in files if name.endswith(".py") and _is_wanted(name)]
    return sorted(path.relative_to(root).as_posix() for path in names)


def _is_wanted(name: str) -> bool:
    return name not in EXCLUDED_DIRECTORIES and not name.startswith(EXCLUDED_PREFIXES)


def _text(path: Path) -> str | None:
    """The text of a source file, or None if it breaks the encoding that it declares."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None
