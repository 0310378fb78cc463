"""The decode program: prefill and the one-token step of a config, compiled for a list of devices.

Like `train.program`, it works for devices that exist only as a topology description. Parameters are in the compute
dtype, as inference on accelerators keeps them. The step chooses the most likely token; sampling adds little to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxformer.checkpoint import abstract_like
from jaxformer.config import ModelConfig, RunConfig
from jaxformer.decode.cache import cache_axes
from jaxformer.decode.loop import ModelState, Prompt, prefill_prompt, token_step
from jaxformer.decode.slots import prefill_length
from jaxformer.errors import UserError
from jaxformer.layers import Transformer, abstract_params
from jaxformer.run import make_runtime
from jaxformer.sharding import batch_sharding, batch_ways, make_mesh, param_shardings, partition_spec
from jaxformer.typing import Array, Int, Params, PyTree, Tokens


@dataclass(frozen=True)
class DecodeShape:
    """The shape of a batch of requests."""

    batch_size: int
    prompt_length: int
    """Tokens of each prompt; those of the source in an encoder-decoder."""
    max_length: int
    """Capacity of the caches, for prompt and output together; for the output in an encoder-decoder."""


@dataclass(frozen=True)
class DecodeProgram:
    """Prefill and the one-token step of a config on a mesh of devices."""

    model: Transformer
    mesh: Mesh
    prefill: jax.stages.Wrapped
    """`(params, prompt) -> state, logits`."""
    step: jax.stages.Wrapped
    """`(params, state, token_B) -> state, token_B`; the state passed in is donated."""
    abstract_params: PyTree
    """Shapes, dtypes and shardings of the parameters."""
    abstract_prompt: Prompt
    """Those of the prompts of one prefill; longer prompts are prefilled in several parts (`slots.prefill_length`)."""
    abstract_state: ModelState
    """Those of what the step carries: caches are sharded by rows and KV heads."""

    def trace_prefill(self) -> jax.stages.Traced:
        """Prefill traced for the devices of the program, without allocating arrays."""
        with jax.set_mesh(self.mesh):
            return self.prefill.trace(self.abstract_params, self.abstract_prompt)

    def trace_step(self) -> jax.stages.Traced:
        """The step for one token per row, traced likewise."""
        with jax.set_mesh(self.mesh):
            return self.step.trace(self.abstract_params, self.abstract_state, self.abstract_prompt.lengths)


def decode_program(
    config: RunConfig, devices: Sequence[Any], shape: DecodeShape, cache: str = "dtype"
) -> DecodeProgram:
    """The program of a config on these devices, which may come from a topology description.

    Args:
      cache: storage of the KV cache, "dtype" or "int8".
    """
    mesh = make_mesh(config.mesh, devices)
    _check_shape(config.model, shape, mesh)
    runtime = replace(make_runtime(config.train, devices[0].platform), cache=cache)
    model = Transformer(config.model, runtime)
    params, prompt = _abstract_params(model, mesh), _abstract_prompt(model, mesh, shape)
    prefill = partial(prefill_prompt, model, capacity=shape.max_length)
    with jax.set_mesh(mesh):
        state, _ = jax.eval_shape(lambda *args: prefill(*args), params, prompt)
    state = jax.tree.map(partial(_shard_rows, mesh=mesh), state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step_shardings = (shardings, batch_sharding(mesh))
    return DecodeProgram(
        model=model,
        mesh=mesh,
        prefill=jax.jit(prefill, out_shardings=(shardings, None)),
        step=jax.jit(partial(_greedy_step, model=model), donate_argnums=1, out_shardings=step_shardings),
        abstract_params=params,
        abstract_prompt=prompt,
        abstract_state=state,
    )


def _check_shape(model: ModelConfig, shape: DecodeShape, mesh: Mesh) -> None:
    if model.decoder is None or model.head is None:
        raise UserError(f"model: {model.shape} without a decoder and a head over the vocabulary has nothing to decode")
    if model.max_length is not None and shape.max_length > model.max_length:
        raise UserError(
            f"{shape.max_length} tokens of prompt and output are more than the {model.max_length} that the model has "
            "positions for: use fewer"
        )
    if model.encoder is None and shape.prompt_length >= shape.max_length:
        raise UserError(
            f"{shape.max_length} tokens of prompt and output leave no room after a prompt of {shape.prompt_length}: "
            "use more"
        )
    ways = batch_ways(mesh.shape)
    if shape.batch_size % ways:
        raise UserError(
            f"a batch of {shape.batch_size} rows does not divide evenly into {ways} shards (mesh "
            f"data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}): use a multiple of {ways}, or mesh.tensor"
        )


def _abstract_params(model: Transformer, mesh: Mesh) -> PyTree:
    shapes, axes = abstract_params(model.config)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, model.runtime.dtype), shapes)
    return abstract_like(shapes, param_shardings(axes, shapes, mesh))


def _abstract_prompt(model: Transformer, mesh: Mesh, shape: DecodeShape) -> Prompt:
    def array(*dims: int) -> jax.ShapeDtypeStruct:
        return _shard_rows(jax.ShapeDtypeStruct((shape.batch_size, *dims), jnp.int32), mesh)

    if model.config.encoder is not None:
        source = array(shape.prompt_length)
        return Prompt(array(1), array(), Tokens(source, source, source))
    return Prompt(array(prefill_length(model, shape.batch_size, shape.prompt_length)), array())


def _shard_rows(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shard rows, and heads of arrays with more than two dimensions, which are keys and values."""
    axes = cache_axes(leaf.ndim) if leaf.ndim > 2 else ("batch", None)[: leaf.ndim]
    sharding = NamedSharding(mesh, partition_spec(axes, leaf.shape, mesh, "KV cache"))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _greedy_step(
    params: Params, state: ModelState, token_B: Int[Array, " B"], model: Transformer
) -> tuple[ModelState, Int[Array, " B"]]:
    """Append one token to each row; returns the most likely next ones."""
    state, logits_BV = token_step(model, params, state, token_B)
    return state, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
