"""FLOPs that a traced program executes, with the bodies of scans multiplied by their length.

Matrix products are counted as two FLOPs per multiply-add and everything else as none, as in MFU. Fused attention
kernels are opaque: their products are counted from the shapes of their arguments, for the keys that a query can see.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from jaxformer.config import ModelConfig, StackConfig
from jaxformer.train.metrics import mean_visible_keys

# Products of queries with keys, or of shapes like theirs, in one call of each fused kernel. The backward pass of splash
# attention is two kernels that both recompute the logits; that of cuDNN is one.
KERNEL_PRODUCTS: Mapping[str, int] = {
    "splash_mha_fwd": 2,
    "splash_mha_dq": 3,
    "splash_mha_dkv": 4,
    "dot_product_attention_fwd": 2,
    "dot_product_attention_bwd": 5,
}


class Products(NamedTuple):
    """The matrix products of a program over all devices."""

    dots: float
    """FLOPs of products that JAX traced."""
    attention: float
    """FLOPs of fused attention kernels if every query saw every key."""


def count_flops(jaxpr: core.Jaxpr, visible: float, num_devices: int) -> float:
    """FLOPs of one execution on one device.

    Args:
      visible: the mean fraction of keys that a query sees, for fused attention kernels.
    """
    products = _count(jaxpr, 1.0)
    return (products.dots + visible * products.attention) / num_devices


def visible_keys(model: ModelConfig, length: int) -> float:
    """The fraction of keys that a query of a row with this length sees, as the mean over layers."""
    stacks = [stack for stack in (model.encoder, model.decoder) if isinstance(stack, StackConfig)]
    blocks = [stack.block(layer) for stack in stacks for layer in range(stack.num_layers)]
    fractions = [mean_visible_keys(block.attention, length) / length for block in blocks]
    fractions += [1.0 for block in blocks if block.cross_attention is not None]
    return sum(fractions) / len(fractions) if fractions else 1.0


def _count(jaxpr: core.Jaxpr, repeats: float) -> Products:
    total = Products(0.0, 0.0)
    for equation in jaxpr.eqns:
        name = _kernel(equation)
        if name is not None:
            added = Products(0.0, repeats * KERNEL_PRODUCTS[name] * _kernel_product(equation, name))
        elif equation.primitive.name in ("dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"):
            added = Products(repeats * _dot_flops(equation), 0.0)
        else:
            added = _nested(equation, repeats)
        total = Products(total.dots + added.dots, total.attention + added.attention)
    return total


def _nested(equation: core.JaxprEqn, repeats: float) -> Products:
    """The products in the programs that an equation calls."""
    counts = [_count(inner, repeats * _num_repeats(equation)) for inner in sub_jaxprs(equation)]
    if equation.primitive.name == "cond":  # one branch is executed
        return max(counts, key=sum)
    return Products(sum(each.dots for each in counts), sum(each.attention for each in counts))


def _num_repeats(equation: core.JaxprEqn) -> float:
    params = equation.params
    if equation.primitive.name == "scan":
        return params["length"]
    if equation.primitive.name == "shard_map":  # inside, shapes are those of one device along these axes
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def sub_jaxprs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs among the parameters of an equation; of a custom derivative, only the function itself."""
    names = ("call_jaxpr", "fun_jaxpr") if equation.primitive.name.startswith("custom_") else tuple(equation.params)
    for name in names:
        value = equation.params.get(name)
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


# ---------------------------------------------------------------- one equation
def _dot_flops(equation: core.JaxprEqn) -> float:
    left, right = (var.aval.shape for var in equation.invars[:2])
    if equation.primitive.name == "conv_general_dilated":
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(right[1:])
    if equation.primitive.name != "dot_general":  # ragged: every row is multiplied with the matrix of one group
        return 2.0 * math.prod(left) * right[-1]
    (contracting, _), _ = equation.params["dimension_numbers"]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracting)


def _kernel(equation: core.JaxprEqn) -> str | None:
    """The fused attention kernel that an equation calls."""
    name = equation.primitive.name
    if name == "pallas_call":
        name = str(equation.params.get("name") or equation.params.get("name_and_src_info"))
    return next((known for known in KERNEL_PRODUCTS if known in name), None)


def _kernel_product(equation: core.JaxprEqn, name: str) -> float:
    """FLOPs of the product of all queries with all keys; the mask and the segments of a kernel are integers."""
    arrays = [var.aval for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
    queries, keys = [array.shape for array in arrays if array.ndim >= 3][:2]
    # Splash attention takes [..., N, T, H] and [..., K, S, H], cuDNN [B, T, N, H] and [B, S, K, H].
    return 2.0 * math.prod(queries) * (keys[-2] if name.startswith("splash") else keys[1])
