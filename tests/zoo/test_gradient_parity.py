"""Loss and all gradients equal those of torch.

Torch's gradients are saved as if they were weights and then imported, which converts them to our parameter layout.
"""

import jax
import numpy as np
import pytest
import torch
from jax.tree_util import tree_leaves_with_path

from jaxformer.config import ModelConfig
from jaxformer.convert import SAMPLES
from jaxformer.convert.sample import VOCAB
from jaxformer.layers import Transformer
from jaxformer.objectives.base import token_loss
from jaxformer.ops.losses import LossOptions
from jaxformer.run import load
from jaxformer.sharding import path_name
from jaxformer.typing import Batch, Tokens

ROWS, LENGTH, SOURCE_LENGTH = 3, 12, 15
# Samples of every model shape, with parameters whose gradients are easily lost.
NAMED = {
    "llama": ("embedding/tokens", "decoder/blocks_0/attention/k/kernel", "decoder/final_norm/scale"),
    "mixtral": (
        "decoder/blocks_0/mlp/router/kernel",
        "decoder/blocks_0/mlp/gate",
        "decoder/blocks_0/attention/v/kernel",
    ),
    "gemma2": ("embedding/tokens", "decoder/blocks_1/attention/q/kernel", "decoder/blocks_0/mlp_post_norm/scale"),
    "t5": (
        "embedding/tokens",
        "encoder/relative_bias",
        "decoder/relative_bias",
        "decoder/blocks_0/cross_attention/k/kernel",
    ),
    "bart": (
        "embedding/source_positions",
        "decoder/blocks_0/cross_attention/q/bias",
        "head/bias",
        "encoder/blocks_0/attention/v/kernel",
    ),
    "bert": ("embedding/types", "encoder/blocks_0/attention/out/kernel", "head/transform/norm/bias", "head/bias"),
}


def make_batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Padded rows with token weights of 0, 0.5 or 1; an encoder-only model predicts only a few tokens."""
    rng = np.random.default_rng(0)
    real = np.arange(LENGTH) < np.array([LENGTH, LENGTH - 5, 4])[:, None]
    weights = rng.choice([0.0, 0.5, 1.0], real.shape, p=[0.7, 0.1, 0.2] if model.decoder is None else [0.1, 0.3, 0.6])
    tokens, targets = rng.integers(3, VOCAB - 1, (2, ROWS, LENGTH))
    arrays = {"tokens": tokens, "targets": targets} | _side("", real)
    if model.shape == "encoder-decoder":
        real_source = np.arange(SOURCE_LENGTH) < np.array([7, SOURCE_LENGTH, 10])[:, None]
        arrays |= {"inputs": rng.integers(3, VOCAB - 1, (ROWS, SOURCE_LENGTH))} | _side("input_", real_source)
    return {name: a.astype(np.int32) for name, a in arrays.items()} | {"weights": (weights * real).astype(np.float32)}


def _side(prefix: str, real: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{prefix}positions": np.arange(real.shape[1]) * real, f"{prefix}segments": real}


def as_batch(arrays: dict[str, np.ndarray]) -> Batch:
    source = None
    if "inputs" in arrays:
        source = Tokens(arrays["inputs"], arrays["input_positions"], arrays["input_segments"])
    tokens = Tokens(arrays["tokens"], arrays["positions"], arrays["segments"])
    return Batch(tokens, arrays["targets"], arrays["weights"], source)


def torch_loss(model, batch: dict[str, np.ndarray]) -> torch.Tensor:
    part = {name: torch.tensor(array).long() for name, array in batch.items() if name != "weights"}
    if "inputs" in part:
        inputs = {"input_ids": part["inputs"], "attention_mask": part["input_segments"]}
        inputs |= {"decoder_input_ids": part["tokens"], "decoder_attention_mask": part["segments"]}
    else:
        inputs = {"input_ids": part["tokens"], "attention_mask": part["segments"]}
    for tensor in _tensors(model):
        tensor.requires_grad_()
    logits, weights = model(**inputs).logits, torch.tensor(batch["weights"])
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), part["targets"], reduction="none")
    return (losses * weights).sum() / weights.sum()


def without_router_losses(model: ModelConfig) -> ModelConfig:
    """transformers balances the experts of all layers together, jaxformer those of each layer: compare without."""
    if model.decoder is None or model.decoder.pattern[0].mlp.kind != "moe":
        return model
    off = {"load_balance": 0.0, "router_z": 0.0}
    pattern = tuple(b.model_copy(update={"mlp": b.mlp.model_copy(update=off)}) for b in model.decoder.pattern)
    return model.model_copy(update={"decoder": model.decoder.model_copy(update={"pattern": pattern})})


@pytest.mark.parametrize("name", NAMED)
def test_loss_and_gradients_equal_torch(name, pair_of, tmp_path):
    pair, theirs = pair_of(name), SAMPLES[name].make()
    model, batch = without_router_losses(pair.config), make_batch(pair.config)
    ours, options = as_batch(batch), LossOptions(num_chunks=2)

    def loss_of(params):
        sums, _ = token_loss(Transformer(model), params, ours, options)
        return sums.loss, sums

    summed, sums = jax.jit(jax.grad(loss_of, has_aux=True))(pair.run.params)

    loss = torch_loss(theirs, batch)
    expected = torch_gradients(theirs, loss, tmp_path)
    np.testing.assert_allclose(sums.loss / sums.weight, loss.item(), rtol=1e-5)
    actual = {path_name(path): np.asarray(leaf) / float(sums.weight) for path, leaf in tree_leaves_with_path(summed)}
    assert set(NAMED[name]) <= set(actual) == set(expected)
    for path, gradient in expected.items():
        largest = np.abs(gradient).max()
        assert largest > 1e-4 or path not in NAMED[name], f"{path} has no gradient to compare"
        # Some gradients are zero up to rounding: a bias on keys adds the same number to all logits of a query.
        np.testing.assert_allclose(actual[path], gradient, rtol=0, atol=1e-4 * largest + 1e-7, err_msg=path)


def torch_gradients(model, loss: torch.Tensor, directory) -> dict[str, np.ndarray]:
    """Gradients by our parameter names and in our layout: saved in place of the weights, then loaded."""
    loss.backward()
    with torch.no_grad():
        for tensor in _tensors(model):
            tensor.copy_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    model.save_pretrained(directory)
    return {path_name(path): np.asarray(leaf) for path, leaf in tree_leaves_with_path(load(directory).params)}


def _tensors(model) -> list[torch.Tensor]:
    """Parameters, and the buffers that are trained parameters in jaxformer."""
    return [*model.parameters(), *(b for name, b in model.named_buffers() if name == "final_logits_bias")]
