"""All tests run on eight CPU devices, offline, with a compilation cache that is kept between runs."""

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

assert "jax" not in sys.modules, "jax reads these variables when it is first imported"

FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Tests compile a lot and compute little: unoptimised code compiles ten times faster.
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_use_fusion_emitters": "false",
    # One object file per program instead of up to 32: compiles faster, and a process that loads thousands of
    # programs stays far below the 65,530 memory mappings that Linux allows.
    "--xla_cpu_parallel_codegen_split_count": "1",
}
CACHE = Path(tempfile.gettempdir()) / f"jaxformer-test-programs-{os.getuid()}"

os.environ["JAX_PLATFORMS"] = "cpu"
xla_flags = os.environ.get("XLA_FLAGS", "")
missing = (f"{name}={value}" for name, value in FLAGS.items() if name not in xla_flags)
os.environ["XLA_FLAGS"] = " ".join([xla_flags, *missing])
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread per test worker. torch reads this when a test first imports it; most tests do not need torch.
os.environ["OMP_NUM_THREADS"] = "1"

# The first example of a property test also compiles, which would exceed a deadline.
settings.register_profile("jaxformer", deadline=None)
settings.load_profile("jaxformer")

# Tracing allocates many short-lived objects next to the large heaps of torch and transformers, which every full
# collection would scan.
gc.set_threshold(100_000, 50, 1000)


@pytest.fixture
def tpu_compiler() -> Iterator[None]:
    """Skips a test if the TPU compiler is not installed, and lets only one worker of pytest use it at a time."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    with CACHE.with_suffix(".tpu-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
