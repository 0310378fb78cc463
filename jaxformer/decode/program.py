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
from jaxformer.config import RunConfig
from jaxformer.decode.cache import cache_axes
from jaxformer.decode.loop import ModelState, Prompt, prefill, token_step
from jaxformer.decode.slots import prefill_length
from jaxformer.errors import UserError
from jaxformer.layers import Transformer, abstract_params
from jaxformer.run import make_runtime
from jaxformer.sharding import batch_sharding, batch_ways, make_mesh, param_shardings, partition_spec
from jaxformer.typing import Array, Float, Int, Params, PyTree, Tokens


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
    shape: DecodeShape

    @property
    def abstract_params(self) -> PyTree:
        """Shapes, dtypes and shardings of the parameters."""
        shapes, axes = abstract_params(self.model.config)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.model.runtime.dtype), shapes)
        return abstract_like(shapes, param_shardings(axes, shapes, self.mesh))

    @property
    def abstract_prompt(self) -> Prompt:
        """The prompts of one prefill. Longer ones are prefilled in several parts (`decode.slots.prefill_length`)."""
        lengths, one = self._array(), self._array(1)
        if self.model.config.encoder is not None:
            source = self._array(self.shape.prompt_length)
            return Prompt(one, lengths, Tokens(source, source, source))
        chunk = prefill_length(self.model, self.shape.batch_size, self.shape.prompt_length)
        return Prompt(self._array(chunk), lengths)

    @property
    def abstract_state(self) -> ModelState:
        """Shapes, dtypes and shardings of what the step carries: caches are sharded by rows and KV heads."""
        params = self.abstract_params
        with jax.set_mesh(self.mesh):
            shapes, _ = jax.eval_shape(self._prefill, params, self.abstract_prompt)
        return jax.tree.map(self._shard, shapes)

    def lower_prefill(self) -> jax.stages.Lowered:
        """Prefill lowered for the devices of the program, without allocating arrays."""
        params, shardings = self.abstract_params, jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        with jax.set_mesh(self.mesh):
            return jax.jit(self._prefill, out_shardings=(shardings, None)).lower(params, self.abstract_prompt)

    def lower_step(self) -> jax.stages.Lowered:
        """The step for one token per row, lowered likewise; its caches are donated."""
        params, state = self.abstract_params, self.abstract_state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        with jax.set_mesh(self.mesh):
            step = partial(_greedy_step, model=self.model)
            program = jax.jit(step, donate_argnums=1, out_shardings=(shardings, batch_sharding(self.mesh)))
            return program.lower(params, state, self._array())

    def _prefill(self, params: Params, prompt: Prompt) -> tuple[ModelState, Float[Array, "B V"]]:
        return prefill(self.model, params, prompt, capacity=self.shape.max_length)

    def _array(self, *dims: int) -> jax.ShapeDtypeStruct:
        """Integers with one entry per row."""
        return self._shard(jax.ShapeDtypeStruct((self.shape.batch_size, *dims), jnp.int32))

    def _shard(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shard rows, and heads of arrays with more than two dimensions, which are keys and values."""
        axes = cache_axes(leaf.ndim) if leaf.ndim > 2 else ("batch", None)[: leaf.ndim]
        sharding = NamedSharding(self.mesh, partition_spec(axes, leaf.shape, self.mesh, "KV cache"))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def decode_program(
    config: RunConfig, devices: Sequence[Any], shape: DecodeShape, cache: str = "dtype"
) -> DecodeProgram:
    """The program of a config on these devices, which may come from a topology description.

    Args:
      cache: storage of the KV cache, "dtype" or "int8".
    """
    _check_shape(config, shape)
    mesh = make_mesh(config.mesh, devices)
    ways = batch_ways(mesh.shape)
    if shape.batch_size % ways:
        raise UserError(
            f"a batch of {shape.batch_size} rows does not divide evenly into {ways} shards (mesh "
            f"data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}): make it a multiple of {ways}, or use mesh.tensor"
        )
    runtime = replace(make_runtime(config.train, devices[0].platform), cache=cache)
    return DecodeProgram(Transformer(config.model, runtime), mesh, shape)


def _greedy_step(
    params: Params, state: ModelState, token_B: Int[Array, " B"], model: Transformer
) -> tuple[ModelState, Int[Array, " B"]]:
    """Append one token to each row; returns the most likely next ones."""
    state, logits_BV = token_step(model, params, state, token_B)
    return state, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def _check_shape(config: RunConfig, shape: DecodeShape) -> None:
    model = config.model
    if model.decoder is None or model.head is None:
        raise UserError(f"model: {model.shape} without a decoder and a head over the vocabulary has nothing to decode")
    if model.max_length is not None and shape.max_length > model.max_length:
        raise UserError(
            f"{shape.max_length} tokens of prompt and output are more than the {model.max_length} that the model has "
            "positions for: shorten them"
        )
    if model.encoder is None and shape.prompt_length > shape.max_length:
        raise UserError(
            f"a prompt of {shape.prompt_length} tokens does not fit into caches for {shape.max_length} tokens of "
            "prompt and output: raise the latter"
        )
