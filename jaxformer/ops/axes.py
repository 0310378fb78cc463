"""Stacked, input and output dimensions of a parameter, determined from its logical axes rather than its name."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxformer.typing import Array, Float

Axes = tuple[str | None, ...]

LEAD_AXES = ("layers", "expert")
"""Dimensions along which matrices are stacked."""


class MatrixDims(NamedTuple):
    """Indices of a parameter's stacked, contracted and output dimensions."""

    lead: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def matrix_dims(axes: Axes) -> MatrixDims | None:
    """The dimensions of a matrix; None for norms, biases, recurrent kernels, and tables that are only used for lookups.

    One side of every matrix is `embed`, the width of the model. The token embedding table counts as the kernel of a
    tied head.
    """
    lead = tuple(i for i, axis in enumerate(axes) if axis in LEAD_AXES)
    rest = tuple(i for i in range(len(axes)) if i not in lead)
    if len(rest) < 2 or "embed" not in axes or axes[rest[0]] in (None, "position"):
        return None
    embed = axes.index("embed")
    others = tuple(i for i in rest if i != embed)
    embed_is_input = rest[0] == embed or axes[rest[0]] == "vocab"
    return MatrixDims(lead, (embed,), others) if embed_is_input else MatrixDims(lead, others, (embed,))


def weight_dims(axes: Axes) -> MatrixDims | None:
    """`matrix_dims` of the matrices that may be quantized or stored in another layout.

    Routers are excluded: rounding their kernel would send tokens to other experts.
    """
    return None if "router" in axes else matrix_dims(axes)


def inputs_first(
    array: Float[Array, "*lead_and_out_and_in"], num_in: int, num_lead: int
) -> Float[Array, "*lead_and_in_and_out"]:
    """Move the input dimensions from the end to directly after the lead dimensions."""
    return jnp.moveaxis(array, range(-num_in, 0), range(num_lead, num_lead + num_in))
