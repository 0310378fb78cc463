"""What the memory of a train step or of decoding holds.

Parameters, optimizer state and gradients follow from shapes and shardings. Activations are what the forward passes of
scans over layers store for the backward pass, read from the traced program. The rest of the compiler's peak is
temporaries: gathered weights, logits, and what one layer needs while it runs.
"""

import math
from collections.abc import Iterator, Mapping

import jax
from jax.extend import core

from jaxformer.decode.program import DecodeProgram
from jaxformer.preflight.flops import sub_jaxprs
from jaxformer.sharding import path_name
from jaxformer.train.program import TrainProgram
from jaxformer.typing import PyTree

SMALL = 2**20
"""Replicated parameters with fewer bytes than this are not reported."""


def memory_of_training(program: TrainProgram, traced: jax.stages.Traced, peak_bytes: int) -> dict[str, int]:
    """The peak of one chip by what it holds; the values add up to it."""
    state = program.abstract_state
    kinds = {
        "parameters": shard_bytes((state.params, state.frozen, state.ema)),
        "optimizer": shard_bytes(state.opt_state),
        # Gradients have the dtype and the sharding of their parameters.
        "gradients": shard_bytes(state.params),
        "activations": saved_bytes(traced.jaxpr.jaxpr, program.config.model.embed_dim, program.mesh.shape["tensor"]),
    }
    return _with_rest(kinds, peak_bytes)


def memory_of_decoding(program: DecodeProgram, traced: jax.stages.Traced, peak_bytes: int) -> dict[str, int]:
    """The same for prefill or the token step."""
    kinds = {"parameters": shard_bytes(program.abstract_params), "caches": shard_bytes(program.abstract_state)}
    return _with_rest(kinds, peak_bytes)


def _with_rest(kinds: dict[str, int], peak_bytes: int) -> dict[str, int]:
    """Limit the values to the peak, because the compiler may free or fuse what comes last; the rest is temporary."""
    rest, limited = peak_bytes, {}
    for kind, size in kinds.items():
        limited[kind] = min(size, rest)
        rest -= limited[kind]
    return limited | {"temporaries": rest}


def shard_bytes(tree: PyTree) -> int:
    """Bytes of a tree of abstract arrays on each device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def undersharded(abstract_params: PyTree, mesh: Mapping[str, int]) -> dict[str, int]:
    """Parameters that are not split over all of `fsdp` and `tensor`, largest first, with their bytes on each chip."""
    ways, sizes = mesh["fsdp"] * mesh["tensor"], {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params):
        on_chip = shard_bytes(leaf)
        if on_chip >= SMALL and on_chip * ways > math.prod(leaf.shape) * leaf.dtype.itemsize:
            sizes[path_name(path)] = on_chip
    return dict(sorted(sizes.items(), key=lambda each: -each[1]))


def saved_bytes(jaxpr: core.Jaxpr, embed_dim: int, tensor_ways: int) -> int:
    """Bytes that scans store per iteration for a later scan of the same program, at most at any time.

    Shapes are those of one device, except for the mesh axis `tensor`, which XLA partitions: it splits heads and MLP
    channels, but not the embedding dimension.
    """
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    read = {id(var) for scan in scans for var in _stacked_inputs(scan)}
    saved = [var for scan in scans for var in _stacked_outputs(scan) if id(var) in read]
    stored = sum(_bytes(var) // (1 if var.aval.shape[-1] == embed_dim else tensor_ways) for var in saved)
    nested = [saved_bytes(inner, embed_dim, tensor_ways) for each in jaxpr.eqns for inner in sub_jaxprs(each)]
    return stored + max(nested, default=0)


def _stacked_inputs(scan: core.JaxprEqn) -> Iterator[core.Var]:
    yield from scan.invars[scan.params["num_consts"] + scan.params["num_carry"] :]


def _stacked_outputs(scan: core.JaxprEqn) -> Iterator[core.Var]:
    yield from scan.outvars[scan.params["num_carry"] :]


def _bytes(var: core.Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
