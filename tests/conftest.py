"""Every test runs on eight CPU devices, offline, with compiled programs kept between runs."""

import os
import sys
import tempfile
from pathlib import Path

from hypothesis import settings

assert "jax" not in sys.modules, "jax reads these when it is first imported"

DEVICES = "--xla_force_host_platform_device_count=8"
CACHE = Path(tempfile.gettempdir()) / f"jaxformer-test-programs-{os.getuid()}"

os.environ["JAX_PLATFORMS"] = "cpu"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["HF_HUB_OFFLINE"] = "1"
# torch reads this when a test first imports it: one thread a worker, and no import here for those that need none.
os.environ["OMP_NUM_THREADS"] = "1"

# The first example of a property also compiles, which no deadline should punish.
settings.register_profile("jaxformer", deadline=None)
settings.load_profile("jaxformer")
