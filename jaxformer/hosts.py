"""Process index and count of a multi-host job, and agreement between its processes; no other module queries them.

`any_process` and `wait_for_all` are collective: in a job of several processes, all must call them in the same order.
In a job of one process they return at once.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def process_index() -> int:
    return jax.process_index()


def process_count() -> int:
    return jax.process_count()


def is_main() -> bool:
    """Whether this is the main process, which writes the files of a run and prints."""
    return process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; all processes get the same result."""
    if process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def wait_for_all(name: str) -> None:
    """Wait until every process has called this function with the same name."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(name)
