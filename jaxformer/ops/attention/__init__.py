"""Scaled dot-product attention: one entry point, `attend`, and one file per kernel.

Each kernel can state why it does not support its inputs, or why another kernel is preferable. `choose_kernel` picks the
best kernel and reports why others were skipped. The platform is an argument, because a program may be compiled for
devices that are not attached.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxformer.errors import UserError
from jaxformer.ops.attention import blocked, cudnn, paged, reference, scanned, splash
from jaxformer.ops.attention.inputs import (
    SAVED_NAME as SAVED_NAME,
    AttentionInputs as AttentionInputs,
    AttentionParams as AttentionParams,
    CachedKeysValues as CachedKeysValues,
)

Reason = Callable[[AttentionInputs, str], str | None]


class Kernel(NamedTuple):
    attend: Callable[[AttentionInputs], Float[Array, "B T N H"]]
    unsupported: Reason
    """Why the kernel does not support these inputs on this platform; None if it does."""
    not_worthwhile: Reason
    """Why another kernel is preferable although this one is correct; None if there is no reason."""
    platform: str | None = None
    """The only platform that has the kernel. None: every platform."""

    def reason_against(self, inputs: AttentionInputs, platform: str) -> str | None:
        """Why the kernel cannot be used; None if it can."""
        if self.platform not in (None, platform):
            return f"it is a kernel for {self.platform}"
        return self.unsupported(inputs, platform)


KERNELS: dict[str, Kernel] = {
    # In order of preference: `auto` takes the first kernel that states no reason against itself.
    "splash": Kernel(splash.attend, splash.unsupported, splash.not_worthwhile, "tpu"),
    "paged": Kernel(paged.attend, paged.unsupported, paged.not_worthwhile, "tpu"),
    "cudnn": Kernel(cudnn.attend, cudnn.unsupported, cudnn.not_worthwhile, "gpu"),
    "scanned": Kernel(scanned.attend, scanned.unsupported, scanned.not_worthwhile),
    "blocked": Kernel(blocked.attend, blocked.unsupported, blocked.not_worthwhile),
    "reference": Kernel(reference.attend, reference.unsupported, reference.not_worthwhile),
}


@dataclass(frozen=True)
class KernelChoice:
    kernel: str
    skipped: dict[str, str] = field(default_factory=dict)
    """The preferred kernels that were not chosen, and why."""


Choices = dict[str, KernelChoice]
"""The kernel of each kind of attention, by `AttentionInputs.description`."""
_recorded: ContextVar[Choices | None] = ContextVar("recorded", default=None)


@contextmanager
def record_choices() -> Iterator[Choices]:
    """Collects the kernels of the programs that are traced inside the context, to report them."""
    choices: Choices = {}
    token = _recorded.set(choices)
    try:
        yield choices
    finally:
        _recorded.reset(token)


def attend(inputs: AttentionInputs, *, impl: str = "auto", platform: str) -> Float[Array, "B T N H"]:
    """softmax(cap(scale * q k^T) + bias + mask) v, computed by the kernel `impl`, or by the best one if `auto`."""
    choice = choose_kernel(inputs, platform) if impl == "auto" else _named_kernel(impl, inputs, platform)
    if (choices := _recorded.get()) is not None:
        choices[inputs.description] = choice
    with jax.named_scope(f"attend_{choice.kernel}"):
        return KERNELS[choice.kernel].attend(inputs)


def choose_kernel(inputs: AttentionInputs, platform: str) -> KernelChoice:
    """The best kernel for these inputs, and why preferred kernels of this platform were skipped."""
    skipped: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        if kernel.platform not in (None, platform):
            continue
        reason = kernel.unsupported(inputs, platform) or kernel.not_worthwhile(inputs, platform)
        if reason is None:
            return KernelChoice(name, skipped)
        skipped[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise UserError(f"attention: no kernel supports these inputs on {platform}: {reasons}")


def _named_kernel(name: str, inputs: AttentionInputs, platform: str) -> KernelChoice:
    """Raise if the kernel is unknown or does not support the inputs: a kernel chosen by name is never replaced."""
    if name not in KERNELS:
        raise UserError(f"attention={name!r}: unknown kernel; use one of: auto, {', '.join(sorted(KERNELS))}")
    reason = KERNELS[name].reason_against(inputs, platform)
    if reason is not None:
        raise UserError(f"attention={name!r} does not support these inputs on {platform}: {reason}; use 'auto'")
    return KernelChoice(name)
