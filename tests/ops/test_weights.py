"""Weight formats: which parameters are matrices, int8 quantization, and products against float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops import cpu, weights
from jaxformer.ops.axes import MatrixDims, matrix_dims, weight_dims
from jaxformer.ops.cpu import OutputMajor, int8_product
from jaxformer.ops.weights import Dense, DenseTable, Int8Matrix, Table, Weight

PRODUCTS = {"integer": int8_product, "float": weights._float_product}


def dims_of(num_in: int, num_out: int, num_lead: int = 0) -> MatrixDims:
    """The dimensions of a kernel in the order lead, inputs, outputs."""
    bounds = (0, num_lead, num_lead + num_in, num_lead + num_in + num_out)
    return MatrixDims(*(tuple(range(a, b)) for a, b in itertools.pairwise(bounds)))


def quantize(kernel, num_in: int = 1, num_lead: int = 0) -> Int8Matrix:
    return weights.quantize(kernel, dims_of(num_in, kernel.ndim - num_in - num_lead, num_lead))


# ---------------------------------------------------------------- logical axes
@pytest.mark.parametrize(
    ("axes", "dims"),
    [
        (("embed", "heads", "head_dim"), ((), (0,), (1, 2))),
        (("layers", "heads", "head_dim", "embed"), ((0,), (1, 2), (3,))),
        (("layers", "expert", "mlp", "embed"), ((0, 1), (2,), (3,))),
        (("vocab", "embed"), ((), (1,), (0,))),  # the kernel of a tied head
        (("embed", "vocab"), ((), (0,), (1,))),
        (("embed", None, "mlp"), ((), (0,), (1, 2))),
        (("layers", "embed", "router"), ((0,), (1,), (2,))),
        (("layers", "heads", "head_dim"), None),
        (("layers", "embed"), None),
        (("position", "embed"), None),
        ((None, "embed"), None),
        ((None, "heads"), None),
        (("state", None, "mlp"), None),
        (("norm",), None),
    ],
)
def test_logical_axes_determine_the_contracted_dimensions(axes, dims):
    assert matrix_dims(axes) == dims
    assert weight_dims(axes) == (None if "router" in axes else dims)


def kernel_of(*shape: int) -> np.ndarray:
    """A random kernel with channels of very different magnitudes."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, shape[-1])).astype(np.float32)


# ---------------------------------------------------------------- quantization
def test_every_output_channel_has_its_own_scale():
    kernel_IO = kernel_of(12, 7)
    matrix = quantize(jnp.asarray(kernel_IO), num_in=1)
    assert (matrix.values.shape, matrix.values.dtype) == ((7, 12), jnp.int8)
    assert matrix.scales.shape == (7,)
    np.testing.assert_allclose(matrix.scales, np.abs(kernel_IO).max(axis=0) / 127, rtol=1e-6)
    assert np.abs(matrix.values).max(axis=1).tolist() == [127] * 7, "the largest weight uses the full range"
    off_IO = np.asarray(matrix.to_array(1, jnp.float32)) - kernel_IO
    assert (np.abs(off_IO) <= 0.5001 * np.asarray(matrix.scales)).all(), "the error is at most half a step"


def test_weights_that_are_multiples_of_the_scale_are_exact():
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
    assert not np.asarray(matrix.to_array(1, jnp.float32))[:, 2].any()
    x_MI = jnp.ones((3, 6))
    for product in PRODUCTS.values():
        actual_MO = product(x_MI, matrix.values) * matrix.scales
        assert np.isfinite(actual_MO).all()
        assert not np.asarray(actual_MO)[:, 2].any()


def test_all_contracted_dimensions_share_a_scale():
    kernel_NHD = kernel_of(3, 4, 5)
    matrix = quantize(jnp.asarray(kernel_NHD), num_in=2)
    assert (matrix.values.shape, matrix.scales.shape) == ((5, 3, 4), (5,))
    np.testing.assert_allclose(matrix.scales, np.abs(kernel_NHD).max(axis=(0, 1)) / 127, rtol=1e-6)


def test_stacked_matrices_are_quantized_independently():
    """Stacked layers and experts give the same result as quantizing each matrix alone."""
    kernel_LEDF = kernel_of(2, 3, 6, 4)
    actual = quantize(jnp.asarray(kernel_LEDF), num_in=1, num_lead=2)
    assert (actual.values.shape, actual.scales.shape) == ((2, 3, 4, 6), (2, 3, 4))
    for layer in range(2):
        for expert in range(3):
            expected = quantize(jnp.asarray(kernel_LEDF[layer, expert]), num_in=1)
            np.testing.assert_array_equal(actual.values[layer, expert], expected.values)
            np.testing.assert_array_equal(actual.scales[layer, expert], expected.scales)


# ---------------------------------------------------------------- products
def exact(x: np.ndarray, matrix: Int8Matrix) -> np.ndarray:
    """The product in float64 with the quantized weights."""
    scales = np.asarray(matrix.scales, np.float64)
    num_in = matrix.values.ndim - scales.ndim
    kernel = np.asarray(matrix.values, np.float64) * scales.reshape(*scales.shape, *[1] * num_in)
    return np.tensordot(x.astype(np.float64), kernel, [range(-num_in, 0)] * 2)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_products_match_float64(product, size):
    """The error is relative to the largest output of a row, which the other outputs are added to or compared with."""
    matrix = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)), num_in=1)
    x_MI = (size * np.random.default_rng(1).normal(size=(9, 256))).astype(np.float32)
    expected_MO = exact(x_MI, matrix)
    actual_MO = np.asarray(PRODUCTS[product](jnp.asarray(x_MI), matrix.values) * matrix.scales)
    largest_M1 = np.abs(expected_MO).max(axis=1, keepdims=True)
    assert (np.abs(actual_MO - expected_MO) / largest_M1).max() < {"integer": 1e-4, "float": 1e-6}[product]


def test_the_error_of_integer_products_is_bounded():
    """Each input is off by at most half a step of its low part, 1 / (127 * 508) of the row's largest input."""
    matrix = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)), num_in=1)
    x_MI = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    actual_MO = np.asarray(cpu.int8_product(jnp.asarray(x_MI), matrix.values))
    expected_MO = x_MI.astype(np.float64) @ np.asarray(matrix.values, np.float64).T
    bound_MO = (
        np.abs(x_MI).max(axis=1)[:, None] / (127 * 508) * np.abs(np.asarray(matrix.values, np.float64)).sum(axis=1)
    )
    assert (np.abs(actual_MO - expected_MO) <= 1.01 * bound_MO + 1e-3).all()


@pytest.mark.parametrize("product", PRODUCTS)
def test_zeros_and_outliers_do_not_affect_other_rows(product):
    """Every row of activations has its own scale."""
    matrix = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)), num_in=1)
    x_MI = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
    x_MI[0] = 0.0
    x_MI[1, 5] = 1e6
    actual_MO = np.asarray(PRODUCTS[product](jnp.asarray(x_MI), matrix.values) * matrix.scales)
    expected_MO = exact(x_MI, matrix)
    assert not actual_MO[0].any()
    np.testing.assert_allclose(actual_MO[2], expected_MO[2], rtol=0, atol=1e-4 * np.abs(expected_MO[2]).max())


# ---------------------------------------------------------------- the protocol
SHAPES = [((), (6, 5), 1), ((2, 3), (6, 4, 5), 1), ((2, 3), (3, 4, 7), 2)]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(("lead", "kernel", "num_in"), SHAPES)
def test_int8_matmul_contracts_the_trailing_dimensions(platform, lead, kernel, num_in):
    array = np.random.default_rng(0).normal(size=kernel).astype(np.float32)
    matrix = quantize(jnp.asarray(array), num_in)
    x = np.random.default_rng(1).normal(size=(*lead, *kernel[:num_in])).astype(np.float32)
    actual = matrix.matmul(jnp.asarray(x), num_in, jnp.float32, platform)
    expected = exact(x, matrix)
    assert actual.shape == (*lead, *kernel[num_in:])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    near = np.tensordot(x.astype(np.float64), array.astype(np.float64), num_in)
    np.testing.assert_allclose(actual, near, rtol=0, atol=0.02 * np.abs(near).max())
    assert matrix.matmul(jnp.asarray(x), num_in, jnp.bfloat16, platform).dtype == jnp.bfloat16


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("layout", ["inputs first", "outputs first"])
@pytest.mark.parametrize(("lead", "kernel", "num_in"), SHAPES)
def test_float_matmul_contracts_the_trailing_dimensions(platform, layout, lead, kernel, num_in):
    array = np.random.default_rng(0).normal(size=kernel).astype(np.float32)
    if layout == "inputs first":
        weight = Dense(jnp.asarray(array))
    else:
        weight = OutputMajor(jnp.moveaxis(array, range(num_in), range(-num_in, 0)))
    x = np.random.default_rng(1).normal(size=(*lead, *kernel[:num_in])).astype(np.float32)
    actual = weight.matmul(jnp.asarray(x), num_in, jnp.float32, platform)
    np.testing.assert_allclose(actual, np.tensordot(x, array, num_in), rtol=1e-5, atol=1e-5)
    assert weight.matmul(jnp.asarray(x), num_in, jnp.bfloat16, platform).dtype == jnp.bfloat16
    np.testing.assert_array_equal(weight.to_array(num_in, jnp.float32), array)


def test_only_a_cpu_merges_batch_and_length():
    """A merged dimension could not be sharded over two mesh axes."""
    weight, x = Dense(jnp.ones((6, 5))), jnp.ones((2, 3, 6))
    for platform, merged in (("cpu", True), ("tpu", False), ("gpu", False)):
        traced = str(jax.make_jaxpr(lambda x, p=platform: weight.matmul(x, 1, jnp.float32, p))(x))
        assert ("f32[6,5] = dot_general" in traced) == merged, platform


def test_to_array_keeps_the_expert_dimension():
    kernel_EDF = jnp.asarray(kernel_of(3, 6, 4))
    matrix = quantize(kernel_EDF, num_lead=1)
    array = matrix.to_array(1, jnp.float32, num_lead=1)
    assert array.shape == kernel_EDF.shape
    np.testing.assert_allclose(array, kernel_EDF, atol=0.6 * float(matrix.scales.max()))
    moved = OutputMajor(kernel_EDF.swapaxes(1, 2))
    np.testing.assert_array_equal(moved.to_array(1, jnp.float32, num_lead=1), kernel_EDF)


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_a_table_serves_lookups_and_tied_heads(kind):
    rows_VD = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    table = DenseTable(jnp.asarray(rows_VD))
    if kind == "int8":
        table = weights.quantize(jnp.asarray(rows_VD), matrix_dims(("vocab", "embed")))
        rows_VD = np.asarray(table.values, np.float32) * np.asarray(table.scales)[:, None]
    assert isinstance(table, Table)
    ids = np.array([[3, 8, 0]])
    np.testing.assert_allclose(table.take(ids, jnp.float32), rows_VD[ids], rtol=1e-6)
    np.testing.assert_allclose(table.to_array(1, jnp.float32), rows_VD.T, rtol=1e-6)
    x_BTD = np.random.default_rng(1).normal(size=(2, 3, 6)).astype(np.float32)
    actual = table.matmul(jnp.asarray(x_BTD), 1, jnp.float32, "cpu")
    np.testing.assert_allclose(actual, x_BTD @ rows_VD.T, atol=2e-3)


def test_a_plain_array_is_not_a_weight():
    """Layers recognise stored formats by the `Weight` protocol alone."""
    assert not isinstance(jnp.ones((2, 2)), Weight)
    assert not isinstance(np.ones((2, 2)), Weight)
    for weight in (Dense(jnp.ones((2, 2))), OutputMajor(jnp.ones((2, 2))), quantize(jnp.ones((2, 2)))):
        assert isinstance(weight, Weight)
