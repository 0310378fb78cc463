"""Recurrent cells and the scan over time. Callers project the inputs of all tokens beforehand, in one product.

Letters used only here: G gates of a cell (1 for Elman, 4 for LSTM), P = F the width of the previous state. Gates are in
the order input, forget, candidate, output. Time is the leading dimension, so that a step reads contiguous memory.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class RecurrentState(NamedTuple):
    """The state of one layer after the tokens so far, in float32."""

    h_BF: Float[Array, "B F"]
    c_BF: Float[Array, "B F"] | None = None  # the cell state of an LSTM


Cell = Callable[[Float[Array, "B G F"], RecurrentState], RecurrentState]


def elman_cell(gates_BGF: Float[Array, "B G F"], state: RecurrentState) -> RecurrentState:
    """The cell of Elman 1990, with tanh."""
    return RecurrentState(jnp.tanh(gates_BGF[:, 0]))


def lstm_cell(gates_BGF: Float[Array, "B G F"], state: RecurrentState) -> RecurrentState:
    """The LSTM of Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000, without peepholes."""
    input_BF, forget_BF, candidate_BF, output_BF = (gates_BGF[:, i] for i in range(4))
    c_BF = jax.nn.sigmoid(forget_BF) * state.c_BF + jax.nn.sigmoid(input_BF) * jnp.tanh(candidate_BF)
    return RecurrentState(jax.nn.sigmoid(output_BF) * jnp.tanh(c_BF), c_BF)


CELLS: dict[str, Cell] = {"elman": elman_cell, "lstm": lstm_cell}
NUM_GATES = {"elman": 1, "lstm": 4}


def empty_state(cell: str, batch: int, dim: int) -> RecurrentState:
    """The state before any token."""
    zeros_BF = jnp.zeros((batch, dim), jnp.float32)
    return RecurrentState(zeros_BF, zeros_BF if cell == "lstm" else None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recur(
    cell: str,
    kernel_PGF: Float[Array, "P G F"],
    inputs_TBGF: Float[Array, "T B G F"],
    state: RecurrentState,
    starts_TB: Bool[Array, "T B"],
    real_TB: Bool[Array, "T B"],
) -> tuple[Float[Array, "T B F"], RecurrentState]:
    """The output at every token and the final state; `inputs` are the projected tokens, including the bias.

    A token that starts a document sees an empty state; padding leaves the state unchanged.
    """
    return _scan(cell, kernel_PGF, starts_TB, real_TB, inputs_TBGF, state)


def _recur_forward(cell, kernel_PGF, inputs_TBGF, state, starts_TB, real_TB):
    scan = partial(_scan, cell, kernel_PGF, starts_TB, real_TB)
    (h_TBF, last), pullback = jax.vjp(scan, inputs_TBGF, state)
    before_TBP = jnp.concatenate([state.h_BF[None], h_TBF[:-1]])
    before_TBP = jnp.where(starts_TB[..., None], 0.0, before_TBP).astype(kernel_PGF.dtype)
    return (h_TBF, last), (pullback, before_TBP)


def _recur_backward(cell, saved, gradients):
    # The kernel's gradient is one product over all tokens. Differentiating the scan instead would read and write the
    # accumulated gradient of the kernel at every token.
    pullback, before_TBP = saved
    d_inputs_TBGF, d_state = pullback(gradients)
    d_gates_TBGF = d_inputs_TBGF.astype(before_TBP.dtype)
    d_kernel_PGF = jnp.einsum("TBP,TBGF->PGF", before_TBP, d_gates_TBGF)
    return d_kernel_PGF, d_inputs_TBGF, d_state, None, None


recur.defvjp(_recur_forward, _recur_backward)


def _scan(cell, kernel_PGF, starts_TB, real_TB, inputs_TBGF, state):
    def one_token(state: RecurrentState, inputs: tuple[Array, Array, Array]) -> tuple[RecurrentState, Array]:
        input_BGF, start_B, real_B = inputs
        before = jax.tree.map(lambda a_BF: jnp.where(start_B[:, None], 0.0, a_BF), state)
        product_BGF = jnp.einsum(
            "BP,PGF->BGF", before.h_BF.astype(kernel_PGF.dtype), kernel_PGF, preferred_element_type=jnp.float32
        )
        after = CELLS[cell](input_BGF + product_BGF, before)
        after = jax.tree.map(lambda new_BF, old_BF: jnp.where(real_B[:, None], new_BF, old_BF), after, state)
        return after, after.h_BF

    last, h_TBF = jax.lax.scan(one_token, state, (inputs_TBGF, starts_TB, real_TB))
    return h_TBF, last
