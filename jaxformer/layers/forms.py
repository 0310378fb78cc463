"""Other forms of a model's parameters, for decoding: whole numbers, and outputs before inputs."""

import re

import jax
from jax.sharding import Mesh, NamedSharding

from jaxformer.config import ModelConfig
from jaxformer.layers.parameters import abstract_params
from jaxformer.ops import transposed
from jaxformer.ops.quantized import Int8Matrix, quantize
from jaxformer.ops.transposed import OutputsFirst
from jaxformer.sharding import partition_spec, path_name
from jaxformer.typing import Params

# Projections, tables of tokens, experts. Routers stay: one that rounds sends tokens elsewhere.
_MATRICES = re.compile(r"(?!.*/router/)(.*/kernel|embedding/tokens|.*/mlp/(up|gate|down))")

_PROJECTIONS = re.compile(r"(?!.*/router/)decoder/.*/kernel")


def quantized(params: Params, config: ModelConfig, mesh: Mesh | None) -> Params:
    """The same parameters with every large matrix an `Int8Matrix`."""

    def one(path: tuple, leaf: jax.Array, axes: tuple[str | None, ...]) -> jax.Array | Int8Matrix:
        name = path_name(path)
        if not _MATRICES.fullmatch(name):
            return leaf
        num_lead, num_in = _dims(name, axes)
        shardings = None
        if mesh is not None:
            lead, inputs, outs = axes[:num_lead], axes[num_lead : num_lead + num_in], axes[num_lead + num_in :]
            shapes = jax.eval_shape(lambda a: quantize(a, num_in, num_lead), leaf)
            specs = [
                partition_spec(names, shape.shape, mesh, name)
                for names, shape in zip(((*lead, *outs, *inputs), (*lead, *outs)), shapes, strict=True)
            ]
            shardings = Int8Matrix(*(NamedSharding(mesh, spec) for spec in specs))
        return jax.jit(lambda a: quantize(a, num_in, num_lead), out_shardings=shardings)(leaf)

    return jax.tree_util.tree_map_with_path(one, params, abstract_params(config)[1])


def outputs_first(params: Params, config: ModelConfig) -> Params:
    """The same parameters with the decoder's projections as a single row reads them best."""

    def one(path: tuple, leaf: jax.Array, axes: tuple[str | None, ...]) -> jax.Array | OutputsFirst:
        name = path_name(path)
        if not _PROJECTIONS.fullmatch(name):
            return leaf
        num_lead, num_in = _dims(name, axes)
        return jax.jit(lambda a: transposed.outputs_first(a, num_in, num_lead))(leaf)

    return jax.tree_util.tree_map_with_path(one, params, abstract_params(config)[1])


def _dims(name: str, axes: tuple[str | None, ...]) -> tuple[int, int]:
    """How many dimensions count layers, experts or tokens, and how many are contracted."""
    num_lead = sum(axis in ("layers", "expert") for axis in axes)
    if name == "embedding/tokens":
        return 1, 1  # a scale a token, which is an output channel of a tied head
    width = len(axes) - num_lead
    # What goes in is the model's width, or everything where the model's width comes out.
    return num_lead, 1 if axes[num_lead] == "embed" else width - 1


def is_quantized(params: Params) -> bool:
    return isinstance(params["embedding"]["tokens"], Int8Matrix)
