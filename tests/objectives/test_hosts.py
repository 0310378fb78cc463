"""Batches do not depend on the number of hosts, with corruption and packing on."""

import jax
import numpy as np
import pytest

from jaxformer.data import build_set, make_loader

STEPS = (0, 1, 7)  # the last one is in a later epoch


@pytest.mark.parametrize("num_hosts", [2, 4, 8])
def test_the_global_batch_of_a_step_is_the_same_on_any_number_of_hosts(config, objective, num_hosts):
    """A batch depends only on its step, so a run may also resume with another number of hosts."""
    packed = build_set(config.data, objective, "train")
    alone = make_loader(config, packed, objective)
    loaders = [make_loader(config, packed, objective, host=host, num_hosts=num_hosts) for host in range(num_hosts)]
    for step in STEPS:
        parts = [loader.batch(step) for loader in loaders]
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        jax.tree.map(np.testing.assert_array_equal, whole, alone.batch(step))


def test_another_step_has_another_batch(config, objective):
    packed = build_set(config.data, objective, "train")
    first, second = (make_loader(config, packed, objective).batch(step) for step in (0, 1))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
