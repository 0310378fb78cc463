"""Reads text files: glob patterns, decompression, UTF-8. Every error message names the file and the fix."""

import bz2
import glob
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxformer.errors import UserError

DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".bz2": bz2.decompress,
}


def matched_files(patterns: str | Iterable[str]) -> list[Path]:
    """Return the files that match one or more patterns, sorted within each pattern."""
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    return [path for pattern in patterns for path in _matches(pattern)]


def unique_files(patterns: str | Iterable[str]) -> list[Path]:
    """Return the files that match one or more patterns, each only once."""
    return list(dict.fromkeys(matched_files(patterns)))


def read_text(path: Path) -> str:
    """Read a possibly compressed UTF-8 file, without its byte order mark and with `\\n` line endings."""
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} at offset {error.start} is not valid UTF-8: "
            "convert the file to UTF-8, for example with iconv"
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file; a line break at its end does not begin another line."""
    # str.splitlines would also split at form feeds and U+2028.
    text = read_text(path)
    return text.removesuffix("\n").split("\n") if text else []


def numbered_lines(path: Path, blank: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines of a file with their line numbers, which start at 1.

    Args:
      blank: the characters that a blank line may hold. None: any white space.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip(blank):
            yield number, line


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise UserError(f"paths: '{pattern}' is a directory: name its files, for example '{pattern.rstrip('/')}/*'")
    if path.exists():  # before globbing, because a file name may contain *, ? or [
        return [path]
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not files:
        raise UserError(f"paths: no file matches '{pattern}', relative to {Path.cwd()}: correct the path")
    return files


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    decompress = DECOMPRESSORS.get(path.suffix)
    if decompress is None or not data:
        return data
    try:
        return decompress(data)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: invalid or truncated {path.suffix} file ({error}): replace or rename it") from None
