"""Compiled programs of the decode loop, with what each backend is told about them."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax

from jaxformer.layers.forms import is_quantized
from jaxformer.typing import Params

Options = frozenset[tuple[str, str]]
FEW_ROWS = 64


def program(
    static: tuple[str, ...] = (), donate: tuple[str, ...] = (), options: Callable[..., Options] | None = None
) -> Callable[[Callable], Callable]:
    """`jax.jit` with compiler options that may depend on the backend, which is not asked for before the first call.

    Args:
      options: from the arguments of a call to the options of its compilation.
    """

    def decorate(function: Callable) -> Callable:
        @cache
        def jitted(chosen: Options) -> Any:
            return jax.jit(
                function, static_argnames=static, donate_argnames=donate, compiler_options=dict(chosen) or None
            )

        def program_for(*args: Any, **kwargs: Any) -> Any:
            return jitted(frozenset() if options is None else options(*args, **kwargs))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return program_for(*args, **kwargs)(*args, **kwargs)

        call.lower = lambda *args, **kwargs: program_for(*args, **kwargs).lower(*args, **kwargs)
        return call

    return decorate


def for_rows(num_rows: int, params: Params) -> Options:
    """What a loop over single tokens of so many rows is compiled with."""
    # XLA's newer library for products on a CPU is slower than its older one where a matrix meets few rows, by a third
    # at 8 and 32 rows, and faster from about 128 on. Only the newer one multiplies whole numbers.
    if jax.default_backend() == "cpu" and num_rows <= FEW_ROWS and not is_quantized(params):
        return frozenset({("xla_cpu_experimental_ynn_fusion_type", "")})
    return frozenset()
