"""A trained model as a value: config, model, parameters, tokenizer; loaded from a run directory."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxformer.checkpoint import Checkpoints, abstract_like
from jaxformer.config import RunConfig, TrainConfig, load_json
from jaxformer.data.tokenizer import Tokenizer, load_tokenizer
from jaxformer.layers import Runtime, Transformer, abstract_params
from jaxformer.layers.stack import unstacked
from jaxformer.sharding import param_shardings
from jaxformer.typing import Params


@dataclass
class Run:
    config: RunConfig
    model: Transformer
    params: Params
    tokenizer: Tokenizer | None
    step: int

    @cached_property
    def decode_params(self) -> Params:
        """The parameters layer by layer, as decoding reads them."""
        return jax.jit(unstacked)(self.params)


def load(path: str | Path, *, step: int | None = None, mesh: Mesh | None = None) -> Run:
    """The run in a directory, at its latest checkpoint or at `step`; split over `mesh` if one is given."""
    config = load_json(path)
    shapes, axes = abstract_params(config.model)
    if mesh is None:
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), shapes)
    else:
        shardings = param_shardings(axes, shapes, mesh)
    with Checkpoints(path) as checkpoints:
        params, step = checkpoints.restore_params(abstract_like(shapes, shardings), step)
    model = Transformer(config.model, make_runtime(config.train))
    return Run(config, model, params, load_tokenizer(path), step)


def make_runtime(config: TrainConfig) -> Runtime:
    """How to run on the devices at hand."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return Runtime(jnp.dtype(dtype), config.remat, config.unroll, config.attention)
