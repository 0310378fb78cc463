"""Matrices of whole numbers: how they are rounded, and products with them against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops import quantized
from jaxformer.ops.quantized import Int8Matrix, dequantized, matmul, quantize

PRODUCTS = {"whole": quantized._whole_product, "float": quantized._float_product}


def kernel_of(*shape: int) -> np.ndarray:
    """Channels of very different sizes."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, shape[-1])).astype(np.float32)


# ---------------------------------------------------------------- rounding
def test_every_channel_has_a_scale_of_its_own():
    kernel_IO = kernel_of(12, 7)
    matrix = quantize(jnp.asarray(kernel_IO), num_in=1)
    assert (matrix.values.shape, matrix.values.dtype) == ((7, 12), jnp.int8)
    assert (matrix.scales.shape, matrix.num_in) == ((7,), 1)
    np.testing.assert_allclose(matrix.scales, np.abs(kernel_IO).max(axis=0) / 127, rtol=1e-6)
    assert np.abs(matrix.values).max(axis=1).tolist() == [127] * 7, "the largest weight uses all there is"
    off_IO = np.asarray(dequantized(matrix, jnp.float32)).T - kernel_IO
    assert (np.abs(off_IO) <= 0.5001 * np.asarray(matrix.scales)).all(), "half a step at most"


def test_weights_that_are_whole_steps_come_back_exactly():
    steps_OI = np.random.default_rng(0).integers(-126, 127, (5, 9)).astype(np.float32)
    steps_OI[:, 0] = -127
    scales_O = 2.0 ** np.arange(-2, 3, dtype=np.float32)
    matrix = quantize(jnp.asarray((steps_OI * scales_O[:, None]).T), num_in=1)
    np.testing.assert_array_equal(matrix.values, steps_OI)
    np.testing.assert_array_equal(matrix.scales, scales_O)


def test_a_channel_of_zeros_stays_zero():
    kernel_IO = kernel_of(6, 4)
    kernel_IO[:, 2] = 0.0
    matrix = quantize(jnp.asarray(kernel_IO), num_in=1)
    assert not np.asarray(matrix.values)[2].any()
    assert not np.asarray(dequantized(matrix, jnp.float32))[2].any()
    x_MI = jnp.ones((3, 6))
    for product in PRODUCTS.values():
        found_MO = product(x_MI, matrix.values) * matrix.scales
        assert np.isfinite(found_MO).all()
        assert not np.asarray(found_MO)[:, 2].any()


def test_two_contracted_dimensions_share_a_scale():
    kernel_NHD = kernel_of(3, 4, 5)
    matrix = quantize(jnp.asarray(kernel_NHD), num_in=2)
    assert (matrix.values.shape, matrix.scales.shape, matrix.num_in) == ((5, 3, 4), (5,), 2)
    np.testing.assert_allclose(matrix.scales, np.abs(kernel_NHD).max(axis=(0, 1)) / 127, rtol=1e-6)


def test_leading_dimensions_are_so_many_matrices():
    """Layers and experts: the same as one by one."""
    kernel_LEDF = kernel_of(2, 3, 6, 4)
    found = quantize(jnp.asarray(kernel_LEDF), num_in=1, num_lead=2)
    assert (found.values.shape, found.scales.shape) == ((2, 3, 4, 6), (2, 3, 4))
    for layer in range(2):
        for expert in range(3):
            wanted = quantize(jnp.asarray(kernel_LEDF[layer, expert]), num_in=1)
            np.testing.assert_array_equal(found.values[layer, expert], wanted.values)
            np.testing.assert_array_equal(found.scales[layer, expert], wanted.scales)


# ---------------------------------------------------------------- products
def exact(x: np.ndarray, matrix: Int8Matrix) -> np.ndarray:
    """In float64, with the weights as they are stored."""
    scales = np.asarray(matrix.scales, np.float64)
    weights = np.asarray(matrix.values, np.float64) * scales.reshape(*scales.shape, *[1] * matrix.num_in)
    return np.tensordot(x.astype(np.float64), weights, [range(-matrix.num_in, 0)] * 2)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_products_equal_those_of_float64(product, size):
    """Of the largest output of a row, which is what its other outputs are added to or compared with."""
    matrix = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)), num_in=1)
    x_MI = (size * np.random.default_rng(1).normal(size=(9, 256))).astype(np.float32)
    wanted_MO = exact(x_MI, matrix)
    found_MO = np.asarray(PRODUCTS[product](jnp.asarray(x_MI), matrix.values) * matrix.scales)
    largest_M1 = np.abs(wanted_MO).max(axis=1, keepdims=True)
    assert (np.abs(found_MO - wanted_MO) / largest_M1).max() < {"whole": 1e-4, "float": 1e-6}[product]


def test_a_row_of_whole_products_is_off_by_what_is_promised():
    """At most half a fine step for every input: 1 / (127 * 508) of the row's largest, times the weights' sizes."""
    matrix = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)), num_in=1)
    x_MI = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    found_MO = np.asarray(quantized._whole_product(jnp.asarray(x_MI), matrix.values))
    wanted_MO = x_MI.astype(np.float64) @ np.asarray(matrix.values, np.float64).T
    bound_MO = (
        np.abs(x_MI).max(axis=1)[:, None] / (127 * 508) * np.abs(np.asarray(matrix.values, np.float64)).sum(axis=1)
    )
    assert (np.abs(found_MO - wanted_MO) <= 1.01 * bound_MO + 1e-3).all()


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_row_of_zeros_and_one_outlier(product):
    """A row's digits are its own: neither spoils its neighbours."""
    matrix = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)), num_in=1)
    x_MI = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
    x_MI[0] = 0.0
    x_MI[1, 5] = 1e6
    found_MO = np.asarray(PRODUCTS[product](jnp.asarray(x_MI), matrix.values) * matrix.scales)
    wanted_MO = exact(x_MI, matrix)
    assert not found_MO[0].any()
    np.testing.assert_allclose(found_MO[2], wanted_MO[2], rtol=0, atol=1e-4 * np.abs(wanted_MO[2]).max())


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("lead", "kernel", "num_in"), [((), (6, 5), 1), ((2, 3), (6, 4, 5), 1), ((2, 3), (3, 4, 7), 2)]
)
def test_matmul_contracts_the_trailing_dimensions(backend, lead, kernel, num_in, monkeypatch):
    monkeypatch.setattr(quantized.jax, "default_backend", lambda: backend)
    weights = np.random.default_rng(0).normal(size=kernel).astype(np.float32)
    matrix = quantize(jnp.asarray(weights), num_in)
    x = np.random.default_rng(1).normal(size=(*lead, *kernel[:num_in])).astype(np.float32)
    found = matmul(jnp.asarray(x), matrix, jnp.float32)
    wanted = exact(x, matrix)
    assert found.shape == (*lead, *kernel[num_in:])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    near = np.tensordot(x.astype(np.float64), weights.astype(np.float64), num_in)
    np.testing.assert_allclose(found, near, rtol=0, atol=0.02 * np.abs(near).max())
    assert matmul(jnp.asarray(x), matrix, jnp.bfloat16).dtype == jnp.bfloat16
