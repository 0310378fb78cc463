"""Activation functions by name.

Each keeps only its input for the backward pass and computes the rest again: differentiating GELU term by term
would keep four arrays of the MLP's width alive, and moving them costs more than a second tanh.
"""

from collections.abc import Callable
from functools import partial

import jax

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.checkpoint(partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": jax.checkpoint(partial(jax.nn.gelu, approximate=True)),
    "silu": jax.checkpoint(jax.nn.silu),
    "tanh": jax.nn.tanh,
}
