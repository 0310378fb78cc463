"""Which process this is, how many there are, and agreement between them: the only module that knows.

A job of one process answers everything locally. In a job of many, the functions that agree on something are
collective: every process must call them, in the same order.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def process_index() -> int:
    return jax.process_index()


def process_count() -> int:
    return jax.process_count()


def is_main() -> bool:
    """Whether this process writes the files of a run and prints."""
    return process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; the same answer on all of them."""
    if process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def wait_for_all(name: str) -> None:
    """Return once every process has come to the point of this name."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(name)
