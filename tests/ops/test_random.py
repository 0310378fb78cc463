"""Random numbers of rows, JAX's own on one device and the same ones on several, and stochastic rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxformer.config import MeshConfig
from jaxformer.ops.random import _wide_product, round_to_bfloat16, uniform
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


def test_stochastic_rounding_is_right_on_average():
    """Half-way between two bfloat16 numbers and near one of them, positive and negative."""
    x = jnp.array([1.0 + 2**-8, 1.0 + 2**-10, -3.0 - 2**-8, 1e-30])
    rounded = round_to_bfloat16(jax.random.key(0), jnp.tile(x, (100_000, 1))).astype(jnp.float32)
    np.testing.assert_allclose(rounded.mean(0), x, rtol=5e-5)
    for column, value in zip(rounded.T, x, strict=True):
        assert len(jnp.unique(column)) == 2
        assert jnp.abs(column / value - 1).max() < 2**-7


def test_rounding_keeps_what_bfloat16_can_represent():
    x = jnp.array([0.0, -0.0, 1.0, -2.5, 3.0e38, 1e-38, jnp.inf, -jnp.inf, jnp.nan]).astype(jnp.bfloat16)
    rounded = round_to_bfloat16(jax.random.key(1), x.astype(jnp.float32))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded.astype(jnp.float32), x.astype(jnp.float32))
