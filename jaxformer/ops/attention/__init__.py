"""Scaled dot-product attention: one entry point, `attend`, and one file per kernel.

A kernel says in words why it cannot serve a request, or why it is not worth choosing for it; `choose_kernel` picks
the best one and keeps the reasons. The platform is an argument, because a program may be compiled for devices that
are not attached.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxformer.errors import UserError
from jaxformer.ops.attention import blocked, reference
from jaxformer.ops.attention.inputs import AttentionInputs as AttentionInputs, AttentionParams as AttentionParams

Reason = Callable[[AttentionInputs, str], str | None]


class Kernel(NamedTuple):
    attend: Callable[[AttentionInputs], Float[Array, "B T N H"]]
    unsupported: Reason
    """Why the kernel cannot serve these inputs on this platform; None if it can."""
    not_worthwhile: Reason
    """Why another kernel should be preferred, although this one would be correct; None if it may be the best."""


KERNELS: dict[str, Kernel] = {
    # Best first: `auto` takes the first one that has no reason against it.
    "blocked": Kernel(blocked.attend, blocked.unsupported, blocked.not_worthwhile),
    "reference": Kernel(reference.attend, reference.unsupported, reference.not_worthwhile),
}


@dataclass(frozen=True)
class KernelChoice:
    kernel: str
    skipped: dict[str, str] = field(default_factory=dict)
    """Why each kernel that would have been preferred was not chosen."""


def attend(inputs: AttentionInputs, *, impl: str = "auto", platform: str) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + bias + mask) v, computed by the named kernel or by the best one."""
    name = choose_kernel(inputs, platform).kernel if impl == "auto" else _check_kernel(impl, inputs, platform)
    with jax.named_scope(f"attend_{name}"):
        return KERNELS[name].attend(inputs)


def choose_kernel(inputs: AttentionInputs, platform: str) -> KernelChoice:
    """The best kernel for these inputs, and why those before it were skipped."""
    skipped: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        reason = kernel.unsupported(inputs, platform) or kernel.not_worthwhile(inputs, platform)
        if reason is None:
            return KernelChoice(name, skipped)
        skipped[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise UserError(f"attention: no kernel can serve this request on {platform}: {reasons}")


def _check_kernel(name: str, inputs: AttentionInputs, platform: str) -> str:
    """A kernel chosen by name is used or refused, never replaced."""
    if name not in KERNELS:
        raise UserError(f"attention={name!r}: unknown kernel; there are: auto, {', '.join(sorted(KERNELS))}")
    reason = KERNELS[name].unsupported(inputs, platform)
    if reason is not None:
        raise UserError(f"attention={name!r} cannot serve this request on {platform}: {reason}")
    return name
