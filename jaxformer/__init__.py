"""jaxformer: encoder-decoder, decoder-only and encoder-only transformers in JAX.

    import jaxformer as jf
    run = jf.load("runs/quickstart")
    jf.generate(run, ["def parse("])

Names are imported on first use, so that `jaxformer --help` does not import JAX.
"""

import importlib
from typing import Any

_MODULES = {
    "Request": "jaxformer.decode.api",
    "Run": "jaxformer.run",
    "RunConfig": "jaxformer.config",
    "Transformer": "jaxformer.layers",
    "UserError": "jaxformer.errors",
    "chat": "jaxformer.decode.api",
    "classify": "jaxformer.decode.predictions",
    "complete": "jaxformer.decode.api",
    "embed": "jaxformer.decode.scoring",
    "fill_mask": "jaxformer.decode.predictions",
    "forward": "jaxformer.decode.scoring",
    "generate": "jaxformer.decode.api",
    "load": "jaxformer.run",
    "preset": "jaxformer.models",
    "score": "jaxformer.decode.scoring",
    "search": "jaxformer.decode.api",
    "stream": "jaxformer.decode.api",
    "tag": "jaxformer.decode.predictions",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxformer' has no attribute '{name}'; there are: {', '.join(__all__)}")
    prepare_jax = importlib.import_module("jaxformer.startup").prepare_jax
    prepare_jax()
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
