"""Run directories from Hugging Face directories, and the other way round; whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import CheckpointConfig, save_json
from jaxformer.convert.directory import HuggingFaceDirectory, export
from jaxformer.convert.hub import local_directory
from jaxformer.convert.weights import DTYPES
from jaxformer.data.tokenizer import check_vocabulary, huggingface_files
from jaxformer.errors import UserError
from jaxformer.layers import num_params
from jaxformer.run import load

ORIGIN = "huggingface.json"  # in an imported run: the format it came in and the dtype its weights had


def import_run(source: str | Path, target: str | Path) -> str:
    """A run directory with the model of a Hugging Face directory as its checkpoint of step 0."""
    source, target = local_directory(source), Path(target)
    with _whole(target) as partial:
        with HuggingFaceDirectory(source) as files:
            origin = {"model_type": files.format.model_type, "dtype": files.dtype.name}
        run = load(source)
        config = run.config.model_copy(update={"workdir": str(target)})
        with Checkpoints(partial, CheckpointConfig()) as checkpoints:
            checkpoints.save(0, {"params": run.params}, config, {"step": 0}, None)
        if run.tokenizer is not None:
            run.tokenizer.save(partial)
        (partial / ORIGIN).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        save_json(config, partial)
    return f"{origin['model_type']} with {num_params(config.model):,} parameters imported into {target}"


def export_run(
    path: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    model_type: str | None = None,
) -> str:
    """A Hugging Face directory with the model and tokenizer of a run.

    Args:
      dtype: of the weights in the files; none means as they were imported, or float32.
      model_type: the format to write; none means as it was imported, or the first that can hold the model.
    """
    target, origin = Path(target), _origin(Path(path))
    dtype, model_type = dtype or origin.get("dtype", "float32"), model_type or origin.get("model_type")
    if dtype not in {known.name for known in DTYPES.values()}:
        raise UserError(f"dtype={dtype}: there are: {', '.join(known.name for known in DTYPES.values())}")
    run = load(path, step=step)
    with _whole(target) as partial:
        format = export(partial, run.config.model, run.params, np.dtype(jnp.dtype(dtype)), model_type)
        if run.tokenizer is not None:
            check_vocabulary(run.tokenizer, run.config.model.vocab_size, "model.vocab_size")
            for name, content in huggingface_files(run.tokenizer, run.config.model.shape).items():
                (partial / name).write_bytes(content)
    return f"step {run.step} exported as {format.model_type} in {dtype} to {target}"


def _origin(path: Path) -> dict[str, str]:
    file = path / ORIGIN
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A directory that takes the target's name when the block ends well, and else disappears."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' exists and is not empty: choose another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise UserError(f"'{target}' cannot be written ({error.strerror})") from None
    try:
        yield partial
        partial.chmod(0o755)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
