"""Norms and activations against torch, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config.model import Activation
from jaxformer.ops.elementwise import ACTIVATIONS
from jaxformer.ops.norms import layer_norm, rms_norm

RNG = np.random.default_rng(0)
X = (5 + 3 * RNG.normal(size=(2, 3, 16))).astype(np.float32)
SCALE, BIAS = RNG.normal(size=(2, 16)).astype(np.float32)
COTANGENT = RNG.normal(size=X.shape).astype(np.float32)
EPS = 1e-3  # large, so that adding it in the wrong place changes the result


@pytest.mark.parametrize("bias", [BIAS, None], ids=["bias", "no bias"])
def test_layer_norm_matches_torch(bias):
    from torch.nn import functional

    operands = (X, SCALE) if bias is None else (X, SCALE, bias)
    _assert_same_values_and_gradients(
        lambda x, scale, bias=None: layer_norm(x, scale, bias, EPS),
        lambda x, scale, bias=None: functional.layer_norm(x, (16,), scale, bias, EPS),
        *operands,
    )


def test_rms_norm_matches_torch():
    from torch.nn import functional

    _assert_same_values_and_gradients(
        lambda x, scale: rms_norm(x, scale, EPS),
        lambda x, scale: functional.rms_norm(x, (16,), scale, EPS),
        X,
        SCALE,
    )


@pytest.mark.parametrize(
    "norm",
    [lambda x: layer_norm(x, SCALE, BIAS, 1e-6), lambda x: rms_norm(x, SCALE, 1e-6)],
    ids=["layer_norm", "rms_norm"],
)
def test_bfloat16_is_normalised_in_float32(norm):
    """Only the input and the result are rounded to bfloat16."""
    half = jnp.asarray(X + 100, jnp.bfloat16)
    result = norm(half)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result, norm(half.astype(jnp.float32)).astype(jnp.bfloat16))


TORCH_ACTIVATIONS = {
    "relu": lambda functional, x: functional.relu(x),
    "gelu": lambda functional, x: functional.gelu(x),
    "gelu_tanh": lambda functional, x: functional.gelu(x, approximate="tanh"),
    "silu": lambda functional, x: functional.silu(x),
    "tanh": lambda functional, x: x.tanh(),
}


@pytest.mark.parametrize("name", sorted(TORCH_ACTIVATIONS))
def test_activations_match_torch(name):
    from torch.nn import functional

    # Without zero, where the derivative of relu is not defined.
    x = np.concatenate([np.linspace(-12, 12, 400), [-1e4, 1e4, 1e-8, -1e-8]]).astype(np.float32)
    _assert_same_values_and_gradients(
        ACTIVATIONS[name], lambda x: TORCH_ACTIVATIONS[name](functional, x), x, cotangent=np.ones_like(x)
    )


@pytest.mark.parametrize("name", sorted(TORCH_ACTIVATIONS))
def test_activations_keep_bfloat16(name):
    x = jnp.linspace(-3, 3, 13, dtype=jnp.bfloat16)
    result = ACTIVATIONS[name](x)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        result.astype(np.float32), ACTIVATIONS[name](x.astype(jnp.float32)), atol=0.02, rtol=0.01
    )


def test_every_activation_of_the_config_exists_and_is_tested():
    assert set(Activation.__args__) == set(ACTIVATIONS) == set(TORCH_ACTIVATIONS)


def _assert_same_values_and_gradients(ours, theirs, *operands, cotangent=COTANGENT):
    """Compare values, and gradients with respect to every operand."""
    import torch

    value, pullback = jax.vjp(jax.jit(ours), *operands)
    tensors = [torch.tensor(x, requires_grad=True) for x in operands]
    expected = theirs(*tensors)
    expected.backward(torch.tensor(cotangent))
    np.testing.assert_allclose(value, expected.detach().numpy(), atol=1e-5, rtol=1e-5)
    for gradient, tensor in zip(pullback(cotangent), tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=1e-5, rtol=1e-5)
