"""Cross-entropy against torch: values, gradients, weights, smoothing, z-loss, accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.losses import (
    MAX_LOGITS,
    LossOptions,
    auto_chunks,
    auto_vocab_chunks,
    class_loss,
    cross_entropy,
    head_loss,
)

RNG = np.random.default_rng(0)
LOGITS = (3 * RNG.normal(size=(2, 5, 11))).astype(np.float32)
TARGETS = RNG.integers(0, 11, size=(2, 5))
WEIGHTS = np.array([[1, 1, 0, 0.5, 2], [0, 0, 1, 1, 0]], np.float32)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradient_match_torch(label_smoothing, z_loss):
    import torch
    from torch.nn import functional

    def ours(logits):
        return cross_entropy(logits, TARGETS, WEIGHTS, label_smoothing=label_smoothing, z_loss=z_loss)[0].loss

    logits = torch.tensor(LOGITS, requires_grad=True)
    per_token = functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(TARGETS).flatten(), reduction="none", label_smoothing=label_smoothing
    ).reshape(2, 5)
    # PaLM (arXiv:2204.02311, section 5): z_loss * log(Z)^2
    per_token = per_token + z_loss * torch.logsumexp(logits, -1) ** 2
    expected = (per_token * torch.tensor(WEIGHTS)).sum()
    expected.backward()

    value, gradient = jax.jit(jax.value_and_grad(ours))(LOGITS)
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, logits.grad.numpy(), atol=1e-5)


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression"])
def test_class_loss_and_gradient_match_torch(problem):
    """The losses that the classifiers of transformers compute for these problems."""
    import torch
    from torch.nn import functional

    logits, rng = LOGITS[0], np.random.default_rng(1)
    numbers = rng.normal(size=logits.shape).astype(np.float32)
    labels = {"single_label": TARGETS[0], "multi_label": np.float32(numbers > 0), "regression": numbers}[problem]
    theirs = {
        "single_label": functional.cross_entropy,
        "multi_label": functional.binary_cross_entropy_with_logits,
        "regression": functional.mse_loss,
    }[problem]
    real = torch.tensor([True, True, False, True, True])
    x = torch.tensor(logits, requires_grad=True)
    expected = theirs(x[real], torch.tensor(labels)[real])
    expected.backward()

    def ours(logits):
        sums = class_loss(logits, labels, np.float32(real), problem)
        return sums.loss / sums.weight

    value, gradient = jax.jit(jax.value_and_grad(ours))(logits)
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-6)


def test_nll_ignores_label_smoothing_and_z_loss():
    plain, _ = cross_entropy(LOGITS, TARGETS, WEIGHTS)
    regularized, _ = cross_entropy(LOGITS, TARGETS, WEIGHTS, label_smoothing=0.1, z_loss=0.01)
    assert float(plain.loss) == float(plain.nll) == float(regularized.nll) != float(regularized.loss)


def test_accuracy_matches_argmax():
    sums, tokens = cross_entropy(LOGITS, TARGETS, WEIGHTS)
    assert float(sums.correct) == ((LOGITS.argmax(-1) == TARGETS) * WEIGHTS).sum()
    np.testing.assert_array_equal(tokens.correct_BT, LOGITS.argmax(-1) == TARGETS)
    best, _ = cross_entropy(LOGITS, LOGITS.argmax(-1), WEIGHTS)
    assert float(best.correct) == float(best.weight) == WEIGHTS.sum()


def test_parts_of_a_batch_add_up_to_the_whole():
    whole, _ = cross_entropy(LOGITS, TARGETS, WEIGHTS, label_smoothing=0.1, z_loss=0.01)
    parts = [
        cross_entropy(LOGITS[i : i + 1], TARGETS[i : i + 1], WEIGHTS[i : i + 1], label_smoothing=0.1, z_loss=0.01)[0]
        for i in range(2)
    ]
    np.testing.assert_allclose(np.array(parts).sum(0), np.array(whole), rtol=1e-6)


def test_tokens_of_weight_zero_do_not_count():
    other = np.where(WEIGHTS == 0, (TARGETS + 1) % 11, TARGETS)
    np.testing.assert_array_equal(cross_entropy(LOGITS, other, WEIGHTS)[0], cross_entropy(LOGITS, TARGETS, WEIGHTS)[0])


def test_bfloat16_logits_are_summed_in_float32():
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    sums, _ = cross_entropy(half, TARGETS, WEIGHTS)
    assert sums.loss.dtype == jnp.float32
    np.testing.assert_array_equal(sums, cross_entropy(half.astype(jnp.float32), TARGETS, WEIGHTS)[0])


def test_huge_logits_do_not_overflow():
    sums, _ = cross_entropy(1e4 * LOGITS, TARGETS, WEIGHTS, z_loss=1e-8)
    assert np.isfinite(np.array(sums)).all()


# ---------------------------------------------------------------- chunks
@pytest.mark.parametrize("num_chunks", [1, 2, 4, 6])
def test_chunks_change_neither_sums_nor_gradients(num_chunks):
    rng = np.random.default_rng(1)
    hidden, kernel, bias = rng.normal(size=(2, 6, 4)), rng.normal(size=(4, 11)), rng.normal(size=11)
    targets, weights = rng.integers(0, 11, size=(2, 6)), rng.integers(0, 3, size=(2, 6)).astype(np.float32)
    options = {"label_smoothing": 0.1, "z_loss": 0.01}

    def head(params, hidden):
        return hidden @ params["kernel"] + params["bias"]

    def whole(params, hidden):
        results = cross_entropy(head(params, hidden), targets, weights, **options)
        return 3 * results[0].loss / results[0].weight, results

    def chunked(params, hidden):
        results = head_loss(head, LossOptions(num_chunks=num_chunks, **options), params, hidden, targets, weights)
        return 3 * results[0].loss / results[0].weight, results

    operands = jax.tree.map(lambda a: a.astype(np.float32), ({"kernel": kernel, "bias": bias}, hidden))
    expected, ours = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*operands) for loss in (whole, chunked)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected)
    (_, results), _ = expected
    without_gradient = jax.jit(chunked)(*operands)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), without_gradient, results)


@pytest.mark.parametrize("num_chunks", [1, 2, 6])
def test_token_losses_do_not_depend_on_chunks_or_weights(num_chunks):
    """Scoring reads them, also for tokens of weight 0; label smoothing and z-loss do not affect them."""
    logits = np.concatenate([LOGITS, LOGITS[:, :1]], axis=1)
    targets = np.concatenate([TARGETS, TARGETS[:, :1]], axis=1)
    weights = np.zeros(targets.shape, np.float32)
    options = LossOptions(label_smoothing=0.1, z_loss=0.01, num_chunks=num_chunks)
    sums, tokens = head_loss(lambda params, hidden: hidden, options, {}, logits, targets, weights)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(tokens.nll_BT, expected, rtol=1e-5)
    np.testing.assert_array_equal(tokens.correct_BT, logits.argmax(-1) == targets)
    assert float(sums.weight) == float(sums.nll) == 0.0


def test_unused_token_losses_are_not_computed():
    """The training step does not read them, so its loop must not produce a [B, T] array."""

    def loss(hidden, with_tokens):
        options = LossOptions(num_chunks=2)
        sums, tokens = head_loss(lambda params, hidden: hidden, options, {}, hidden, TARGETS[:, :4], WEIGHTS[:, :4])
        return (sums, tokens) if with_tokens else sums

    programs = [
        jax.jit(loss, static_argnums=1).lower(LOGITS[:, :4], each).compile().as_text() for each in (True, False)
    ]
    assert ["pred[2,2,2]" in text for text in programs] == [True, False]


@pytest.mark.parametrize(
    ("rows", "length", "vocab_size", "chunks"),
    [
        (8, 256, 8192, 2),
        (8, 256, 1000, 1),
        (32, 1024, 32_000, 32),
        (0, 64, 50_000, 1),
        (16, 255, 50_000, 2),
        (1, 8192, 128_256, 8),
        (1, 1024, 256_000, 2),
        (64, 2047, 256_000, 256),
        (8, 9, 256_000, 1),
    ],
)
def test_auto_chunks_depends_on_the_sizes(rows, length, vocab_size, chunks):
    """Chunks have at least 1024 positions and 2**22 logits each, but at most 2**27 logits, with little padding."""
    assert auto_chunks(rows, length, vocab_size) == chunks


@pytest.mark.parametrize(("tokens", "vocab_size", "chunks"), [(8192, 128_256, 8), (8192, 256_000, 16), (64, 1000, 1)])
def test_auto_vocab_chunks_bound_the_logits(tokens, vocab_size, chunks):
    assert auto_vocab_chunks(tokens, vocab_size) == chunks
    assert tokens * vocab_size / chunks <= MAX_LOGITS
