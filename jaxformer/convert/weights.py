"""Reads and writes safetensors files one tensor at a time; pickle files are rejected.

A file starts with the header length as 8 bytes, then come the JSON header and the tensors
(github.com/huggingface/safetensors, README, "Format"). The safetensors library validates a file when it is opened.
This module does the rest, because the library copies every tensor it reads and needs all tensors in memory to write.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxformer.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(ml_dtypes.bfloat16)}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
MAX_FILE_BYTES = 5 * 10**9
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # decimal, as in transformers


class Tensor(NamedTuple):
    """Location, shape and dtype of a tensor whose contents are not loaded yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype name in the file; `DTYPES` lists the supported ones."""
    start: int
    """Offset in the file, in bytes."""


class Weights:
    """The tensors in the safetensors files of a directory, by name."""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        for file in _files(directory):
            for name, tensor in _tensors(file).items():
                if name in self.tensors:
                    raise UserError(f"tensor '{name}' is in '{self.tensors[name].file}' and again in '{file}'")
                self.tensors[name] = tensor
        _check_index(directory, self.tensors)

    def read(self, name: str) -> np.ndarray:
        """Memory-map one tensor, so that only the elements that are used are read."""
        file, shape, dtype, start = self.tensors[name]
        if not math.prod(shape):  # an empty range cannot be memory-mapped
            return np.empty(shape, DTYPES[dtype])
        try:
            return np.memmap(file, DTYPES[dtype], "r", start, shape)
        except (OSError, ValueError) as error:  # the file changed after its header was read
            raise _damage_error(file, error) from None


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="np"), file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
    except SafetensorError as error:
        raise _damage_error(file, error) from None
    except OSError as error:
        raise UserError(f"'{file}' cannot be read ({error.strerror or error})") from None
    header.pop("__metadata__", None)
    return {
        name: Tensor(file, tuple(row["shape"]), row["dtype"], 8 + length + row["data_offsets"][0])
        for name, row in header.items()
    }


def _damage_error(file: Path, error: Exception) -> UserError:
    size = file.stat().st_size
    return UserError(f"'{file}' is damaged or truncated ({size:,} bytes; {error}): fetch it again")


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise UserError(f"'{directory / INDEX}' names '{outside[0]}', which is not in the directory")
        files = [directory / name for name in names]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise UserError(f"'{directory / INDEX}' names '{missing[0].name}', which is missing: fetch it as well")
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
        raise UserError(
            f"'{directory}' has no {SINGLE}, only '{pickles[0]}': pickles can run code when they are read, "
            "so they are rejected; save the model as safetensors with save_pretrained of transformers"
        )
    raise UserError(f"'{directory}' has no weights: it holds neither {SINGLE} nor {INDEX}")


def _weight_map(directory: Path) -> dict[str, str]:
    try:
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"'{directory / INDEX}' is not a valid index of safetensors files ({type(error).__name__}: {error})"
        ) from None


def _check_index(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    if not (directory / INDEX).is_file():
        return
    for name, file in _weight_map(directory).items():
        if name not in tensors or tensors[name].file.name != file:
            raise UserError(
                f"'{directory / INDEX}' says that tensor '{name}' is in '{file}', but that file does not hold it"
            )


# ---------------------------------------------------------------- writing
def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as "200MB" stands for."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)\s*", text, re.IGNORECASE)
    num_bytes = 0 if match is None else int(float(match[1]) * UNITS[match[2].upper()])
    if num_bytes < 1:
        raise UserError(f"shard size '{text}': must be a positive number with a unit, such as 200MB or 5GB")
    return num_bytes


class TensorPlan(NamedTuple):
    """A tensor to write; `make` computes it only when it is written, to save memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(directory: Path, plans: Iterable[TensorPlan], max_bytes: int = MAX_FILE_BYTES) -> None:
    """Write one file, or several of at most `max_bytes` with an index, with one tensor in memory at a time."""
    files: list[list[TensorPlan]] = [[]]
    space = max_bytes
    for tensor in plans:
        if tensor.num_bytes > space and files[-1]:
            files.append([])
            space = max_bytes
        files[-1].append(tensor)
        space -= tensor.num_bytes
    if len(files) == 1:
        _write_file(directory / SINGLE, files[0])
        return
    weight_map = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        _write_file(directory / name, tensors)
        weight_map |= {tensor.name: name for tensor in tensors}
    tensors = [tensor for tensors in files for tensor in tensors]
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.num_bytes for tensor in tensors),
    }
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: list[TensorPlan]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    # Wider dtypes first, as in the safetensors library, so that every tensor is aligned to its item size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        header[tensor.name] = {
            "dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop],
        }  # fmt: skip
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor starts at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors:
            file.write(_to_stored(tensor).view(np.uint8).data)


def _to_stored(tensor: TensorPlan) -> np.ndarray:
    array = tensor.make()
    assert array.shape == tensor.shape, f"{tensor.name}: {array.shape} is not {tensor.shape}"
    with np.errstate(over="ignore"):  # overflow raises below, with the tensor's name
        stored = np.ascontiguousarray(array.astype(tensor.dtype, copy=False))
    if tensor.dtype == np.float16 and array.dtype != np.float16 and (np.isinf(stored) & ~np.isinf(array)).any():
        raise UserError(
            f"tensor '{tensor.name}' holds {np.abs(array).max():.6g}, and the largest float16 is 65504: "
            "export as bfloat16 or float32"
        )
    return stored
