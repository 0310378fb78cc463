"""The initial state of training: the run's latest checkpoint, else the weights in `train.start`, else random weights.

`train.start` names a run directory or a Hugging Face directory. The config may then omit the model and the tokenizer:
they are read from that directory, and `model.*` overrides apply on top. A head that the directory lacks starts with
random weights, and a head that the model lacks is left out: a classifier can start from a masked language model. The
saved config holds the full model, so resuming does not need the directory again.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
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

log = logging.getLogger(__name__)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a run file with overrides applied, complete with the model and tokenizer of `train.start`."""
    config = load_run_file(path)
    if config.model is not None:
        return complete_config(apply_overrides(config, overrides))
    # The model is read from train.start, which an override may set, so its own overrides come last.
    model_overrides = [override for override in overrides if override.startswith("model.")]
    others = [override for override in overrides if override not in model_overrides]
    return complete_config(apply_overrides(config, others), model_overrides)


def complete_config(config: RunConfig, model_overrides: Sequence[str] = ()) -> RunConfig:
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
    # Without data, because the objective may need what the overrides change, such as a new head.
    model = apply_overrides(RunConfig(model=model), model_overrides).model
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
    return program.start(_start_params(program, start)), 0


def _start_params(program: TrainProgram, start: StartConfig) -> Params:
    """The weights of `train.start`, and random ones for a head that it does not have."""
    new = _new_parameters(program, start)
    abstract = flatten_dict(program.abstract_params, sep="/")
    known = {path: leaf for path, leaf in abstract.items() if path not in new}
    params = load_params(start.path, unflatten_dict(known, sep="/"), start.step)
    if not new:
        return params
    log.warning("train.start='%s' has no %s: they start with random weights", start.path, ", ".join(new))

    @partial(jax.jit, out_shardings={path: abstract[path].sharding for path in new})
    def make() -> dict[str, Array]:
        random = flatten_dict(_random_params(program.config), sep="/")
        return {path: random[path] for path in new}

    return unflatten_dict(flatten_dict(params, sep="/") | make(), sep="/")


def _random_params(config: RunConfig) -> Params:
    return init_params(config.model, jax.random.split(jax.random.key(config.seed))[0])


def params_with_vectors(program: TrainProgram, tokenizer: Tokenizer) -> Params:
    """Random parameters in which the words of `train.word_vectors` have these vectors as embeddings."""
    config = program.config
    ids, rows_ND = rows_of_words(config.train.word_vectors, tokenizer.tokens(), config.model.embed_dim)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_params)

    @partial(jax.jit, out_shardings=shardings)
    def make(ids: Array, rows_ND: Array) -> Params:
        params = _random_params(config)
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


def _new_parameters(program: TrainProgram, start: StartConfig) -> list[str]:
    """The parameters of heads that `train.start` lacks; raise if its other weights do not fit the model."""
    model, earlier = program.config.model, read_model(start)
    ours, theirs = _shapes(model), _shapes(earlier)
    other_heads = tuple(prefix for prefix, has_head in _heads(model).items() if has_head != _heads(earlier)[prefix])
    for path in sorted(ours.keys() | theirs.keys()):
        in_both = path in ours and path in theirs
        if ours.get(path) != theirs.get(path) and (in_both or not path.startswith(other_heads)):
            raise UserError(
                f"train.start='{start.path}': parameter '{path}' has shape {theirs.get(path, 'none')} in that "
                f"directory, but {ours.get(path, 'none')} in this config; remove model.* settings that change shapes"
            )
    return sorted(ours.keys() - theirs.keys())


def _heads(model: ModelConfig) -> dict[str, bool]:
    """Whether the model has each kind of head, by the prefix of the head's parameters."""
    return {
        "head/": model.head is not None,
        "pooler/": model.pooler is not None and model.pooler.num_classes is not None,
    }


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(model)[0])
    return {path_name(path): leaf.shape for path, leaf in leaves}
