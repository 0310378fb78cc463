"""What JAX must be told before it starts: which platform to use, and where compiled programs are kept.

The command line and the Python API call `prepare_jax` first. Nothing here imports JAX, so `jaxformer --help` does not
wait for it.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def prepare_jax() -> None:
    """Set what the user has not set; harmless when called again."""
    _choose_platform()
    _keep_compiled_programs()


def _choose_platform() -> None:
    """With the TPU library installed but no TPU attached, JAX would search for one for minutes."""
    has_tpu = Path("/dev/accel0").exists() or Path("/dev/vfio").exists()
    if "JAX_PLATFORMS" not in os.environ and find_spec("libtpu") is not None and not has_tpu:
        _set_option("JAX_PLATFORMS", "cpu")


def _keep_compiled_programs() -> None:
    """Keep compiled programs for the next start; `JAXFORMER_COMPILE_CACHE` names a directory, or is `off`."""
    place = os.environ.get("JAXFORMER_COMPILE_CACHE", "")
    if place.lower() == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_compilation_cache_dir is not None:
        return  # the program that imports us has chosen one
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    _set_option("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0)
    _set_option("JAX_COMPILATION_CACHE_MAX_SIZE", 2 * 2**30)
    _set_option("JAX_COMPILATION_CACHE_DIR", place or str(home / "jaxformer" / "compiled"))


def _set_option(name: str, value: str | int) -> None:
    """An option of JAX that the environment does not set: in the environment, and in JAX if it is imported already."""
    if name in os.environ:
        return
    os.environ[name] = str(value)
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.config.update(name.lower(), value)
