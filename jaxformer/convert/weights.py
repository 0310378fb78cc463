"""Safetensors files, read tensor by tensor and written so; pickles are refused.

Reading goes through the safetensors library, which maps the file and hands out one tensor at a time. Writing is done
here, since the library's writers want all tensors of a file in memory at once: a file is eight bytes of length, a JSON
header of that length, and the tensors one after another (github.com/huggingface/safetensors, README, "Format").
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxformer.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(ml_dtypes.bfloat16)}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
MAX_FILE_BYTES = 5 * 10**9


class Tensor(NamedTuple):
    """Where a tensor is and what it looks like, before any of it is read."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype


class Weights:
    """The tensors of a directory by name."""

    def __init__(self, directory: Path) -> None:
        self._open = ExitStack()
        self.tensors: dict[str, Tensor] = {}
        self._files = {file: self._opened(file) for file in _files(directory)}
        for file, handle in self._files.items():
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                part = handle.get_slice(name)
                self.tensors[name] = Tensor(file, tuple(part.get_shape()), part.get_dtype())
        _check_index(directory, self.tensors)

    def read(self, name: str) -> np.ndarray:
        """One whole tensor."""
        tensor = self.tensors[name]
        try:
            return self._files[tensor.file].get_tensor(name)
        except SafetensorError as error:
            raise _damaged(tensor.file, error) from None

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _opened(self, file: Path):
        try:
            return self._open.enter_context(safe_open(file, framework="np"))
        except SafetensorError as error:
            raise _damaged(file, error) from None
        except OSError as error:
            raise UserError(f"'{file}' cannot be read ({error.strerror or error})") from None


def _damaged(file: Path, error: Exception) -> UserError:
    size = file.stat().st_size
    return UserError(f"'{file}' is damaged or cut short ({size:,} bytes; {error}): fetch it again")


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        files = sorted({directory / name for name in _weight_map(directory).values()})
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise UserError(f"'{directory / INDEX}' names '{missing[0].name}', which is not there: fetch it as well")
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
        raise UserError(
            f"'{directory}' has no {SINGLE}, only '{pickles[0]}': such files are programs that run when they are read, "
            "so they are refused; save the model as safetensors, in transformers with save_pretrained"
        )
    raise UserError(f"'{directory}' has no weights: neither {SINGLE} nor {INDEX} is there")


def _weight_map(directory: Path) -> dict[str, str]:
    try:
        listed = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"'{directory / INDEX}' is not an index of tensors ({type(error).__name__}: {error})") from None


def _check_index(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    if not (directory / INDEX).is_file():
        return
    for name, file in _weight_map(directory).items():
        if name not in tensors or tensors[name].file.name != file:
            raise UserError(f"'{directory / INDEX}' says that tensor '{name}' is in '{file}', but it is not there")


# ---------------------------------------------------------------- writing
class Planned(NamedTuple):
    """A tensor to be written, and how to get it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_weights(
    directory: Path, planned: Iterable[Planned], dtype: np.dtype, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """One file, or several of at most `max_bytes` with an index; one tensor in memory at a time."""
    files: list[list[Planned]] = [[]]
    room = max_bytes
    for tensor in planned:
        size = _num_bytes(tensor, dtype)
        if size > room and files[-1]:
            files.append([])
            room = max_bytes
        files[-1].append(tensor)
        room -= size
    if len(files) == 1:
        _write_file(directory / SINGLE, files[0], dtype)
        return
    weight_map = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        _write_file(directory / name, tensors, dtype)
        weight_map |= {tensor.name: name for tensor in tensors}
    total = sum(_num_bytes(tensor, dtype) for tensors in files for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: list[Planned], dtype: np.dtype) -> None:
    name = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + _num_bytes(tensor, dtype)
        header[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors:
            array = np.ascontiguousarray(tensor.make().astype(dtype, copy=False))
            assert array.shape == tensor.shape, f"{tensor.name}: {array.shape} is not {tensor.shape}"
            file.write(array.view(np.uint8).data)


def _num_bytes(tensor: Planned, dtype: np.dtype) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * dtype.itemsize
