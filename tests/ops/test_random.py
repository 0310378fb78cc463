"""Random numbers of rows: JAX's own on one device, and the same ones on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxformer.config import MeshConfig
from jaxformer.ops.random import _wide_product, uniform
from jaxformer.sharding import batch_spec, make_mesh, on_devices


@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4, 5), (8, 1)])
def test_one_device_gives_the_numbers_of_jax(shape):
    key = jax.random.fold_in(jax.random.key(3), 7)
    np.testing.assert_array_equal(uniform(key, shape), jax.random.uniform(key, shape))


def test_devices_give_their_rows_of_the_whole_batch():
    mesh, key = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()), jax.random.key(1)
    local = on_devices(lambda key: uniform(key, (2, 5)), mesh, PartitionSpec(), batch_spec(mesh))
    np.testing.assert_array_equal(jax.jit(local)(key), jax.random.uniform(key, (8, 5)))


def test_products_of_64_bits():
    a, b = np.array([0, 1, 65_537, 2**31 + 5, 2**32 - 1], np.uint32), 3_000_000_019
    hi, lo = _wide_product(jnp.asarray(a), b)
    assert [(int(h) << 32) + int(low) for h, low in zip(hi, lo, strict=True)] == [int(x) * b for x in a]
