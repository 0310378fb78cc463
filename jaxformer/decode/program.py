"""Compiled programs of the decode loop, with what each backend is told about them."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax

Options = frozenset[tuple[str, str]]


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
