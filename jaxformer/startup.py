"""JAX options that must be set before JAX is used: the platform and the compilation cache.

The command line and the Python API call `prepare_jax` first. This module does not import JAX, so that
`jaxformer --help` is fast.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def prepare_jax() -> None:
    """Set the options that the user has not set; may be called repeatedly."""
    _choose_platform()
    _enable_compilation_cache()


def _choose_platform() -> None:
    """Use the CPU if libtpu is installed but no TPU is attached: JAX would search for a TPU for minutes."""
    has_tpu = Path("/dev/accel0").exists() or Path("/dev/vfio").exists()
    if "JAX_PLATFORMS" not in os.environ and find_spec("libtpu") is not None and not has_tpu:
        _set_option("JAX_PLATFORMS", "cpu")


def _enable_compilation_cache() -> None:
    """Cache compiled programs on disk; `JAXFORMER_COMPILE_CACHE` names the directory, or is `off`."""
    directory = os.environ.get("JAXFORMER_COMPILE_CACHE", "")
    if directory.lower() == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_compilation_cache_dir is not None:
        return  # the program that imports jaxformer has set one
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # By default, JAX only caches programs that take a second or more to compile.
    _set_option("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0)
    _set_option("JAX_COMPILATION_CACHE_MAX_SIZE", 2 * 2**30)
    _set_option("JAX_COMPILATION_CACHE_DIR", directory or str(home / "jaxformer" / "compiled"))


def _set_option(name: str, value: str | int) -> None:
    """Set a JAX option that the environment does not set, also in JAX itself if it is already imported."""
    if name in os.environ:
        return
    os.environ[name] = str(value)
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.config.update(name.lower(), value)
