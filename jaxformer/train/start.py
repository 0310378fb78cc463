"""The initial state of training: the run's latest checkpoint, else the weights in `train.start`, else random weights.

`train.start` names a run directory or a Hugging Face directory. The config may then omit the model and the tokenizer:
they are read from that directory, and `model.*` overrides apply on top. The saved config holds the full model, so
resuming does not need the directory again.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
from pydantic import ValidationError

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    DirectoryTokenizer,
    ModelConfig,
    RunConfig,
    SentencePieceTokenizer,
    StartConfig,
    apply_overrides,
    load_run_file,
)
from jaxformer.config.overrides import explained
from jaxformer.convert.directory import HuggingFaceDirectory, is_hugging_face
from jaxformer.convert.hub import local_directory
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params, init_params
from jaxformer.run import load_params
from jaxformer.rundir import RunDir
from jaxformer.sharding import path_name
from jaxformer.train.program import TrainProgram
from jaxformer.train.state import TrainState
from jaxformer.typing import Array, Params
from jaxformer.word_vectors import rows_of_words


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a run file with overrides applied, complete with the model and tokenizer of `train.start`."""
    # `model.*` overrides come last: the model may be read from train.start, which another override may set.
    model_overrides = [override for override in overrides if override.startswith("model.")]
    others = [override for override in overrides if override not in model_overrides]
    return apply_overrides(complete_config(load_run_file(path, others)), model_overrides)


def complete_config(config: RunConfig) -> RunConfig:
    """The config with the model and the tokenizer of `train.start` filled in, where it omits them."""
    start = config.train.start
    if start is None:
        return config
    model, data = config.model, config.data
    takes_tokenizer = data is not None and data.tokenizer == SentencePieceTokenizer()
    earlier = _earlier_config(config)
    if earlier is not None:
        model = model or earlier.model
        data = data.replace(tokenizer=earlier.data.tokenizer) if takes_tokenizer else data
    else:
        model = model or read_model(start)
        if takes_tokenizer:
            data = data.replace(tokenizer=DirectoryTokenizer(path=str(local_directory(start.path))))
    try:
        return config.replace(model=model, data=data)
    except ValidationError as error:
        raise UserError("\n".join(f"train.start={start.path}: {line}" for line in explained(error))) from None


def read_model(start: StartConfig) -> ModelConfig:
    """The model config of a run directory or Hugging Face directory; no weights are read."""
    directory = local_directory(start.path)
    return (
        HuggingFaceDirectory(directory).model if is_hugging_face(directory) else RunDir(directory).read_config().model
    )


def first_state(program: TrainProgram, checkpoints: Checkpoints, tokenizer: Tokenizer) -> tuple[TrainState, int]:
    """The state to train from and its step: the latest checkpoint, the weights of `train.start`, or random weights."""
    if checkpoints.latest is not None:
        state, position = checkpoints.restore(program.abstract_state)
        return state, position["step"]
    start = program.config.train.start
    if start is None and program.config.train.word_vectors is not None:
        return program.start(params_with_vectors(program, tokenizer)), 0
    if start is None:
        return program.init(), 0
    _check_shapes(program, start)
    return program.start(load_params(start.path, program.abstract_params, start.step)), 0


def params_with_vectors(program: TrainProgram, tokenizer: Tokenizer) -> Params:
    """Random parameters in which the words of `train.word_vectors` have these vectors as embeddings."""
    config = program.config
    ids, rows_ND = rows_of_words(config.train.word_vectors, tokenizer.tokens(), config.model.embed_dim)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_params)

    @partial(jax.jit, out_shardings=shardings)
    def make(ids: Array, rows_ND: Array) -> Params:
        params = init_params(config.model, jax.random.split(jax.random.key(config.seed))[0])
        tokens_VD = params["embedding"]["tokens"].at[ids].set(rows_ND)
        return params | {"embedding": params["embedding"] | {"tokens": tokens_VD}}

    return make(ids, rows_ND)


def _earlier_config(config: RunConfig) -> RunConfig | None:
    """The config of the run in this workdir, if it started from the same weights."""
    run_dir = RunDir(config.workdir)
    if not config.workdir or not run_dir.has_config:
        return None
    earlier = run_dir.read_config()
    return earlier if earlier.train.start == config.train.start else None


def _check_shapes(program: TrainProgram, start: StartConfig) -> None:
    """Raise if the weights of `train.start` do not fit the model of the config."""
    ours, theirs = _shapes(program.config.model), _shapes(read_model(start))
    for path in sorted(ours.keys() | theirs.keys()):
        if ours.get(path) != theirs.get(path):
            raise UserError(
                f"train.start='{start.path}': parameter '{path}' has shape {theirs.get(path, 'none')} in that "
                f"directory, but {ours.get(path, 'none')} in this config; remove model.* settings that change shapes"
            )


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(model)[0])
    return {path_name(path): leaf.shape for path, leaf in leaves}
