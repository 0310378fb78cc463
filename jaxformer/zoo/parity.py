"""Measures the parity with transformers: the outputs of tiny models with the same weights."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.convert.sample import VOCAB, Sample
from jaxformer.decode.scoring import forward
from jaxformer.exchange import export_run, import_run
from jaxformer.run import Run, load
from jaxformer.typing import tokens_from_ids

ROWS, LENGTH, TARGETS = 3, 24, 14


class Parity(NamedTuple):
    max_delta: float
    """Largest absolute difference of a logit, or of a hidden state if the model has no logits."""
    kl: float | None
    """Mean KL divergence of the next-token distributions, in nats; None if the model has no token logits."""
    round_trip: bool
    """Whether import followed by export gives the same bytes for every tensor."""


class ParityBatch(NamedTuple):
    """Padded rows of different lengths, and the decoder inputs of an encoder-decoder."""

    ids: np.ndarray
    mask: np.ndarray
    targets: np.ndarray


def make_batch(seed: int = 0) -> ParityBatch:
    rng = np.random.default_rng(seed)
    mask = np.arange(LENGTH) < np.array([LENGTH, LENGTH - 7, 5])[:, None]
    return ParityBatch(
        rng.integers(3, VOCAB - 1, (ROWS, LENGTH)), mask.astype(int), rng.integers(3, VOCAB - 1, (ROWS, TARGETS))
    )


def measure(sample: Sample) -> Parity:
    """Import a sample, compare its outputs with transformers, and compare the exported weights with the original."""
    with tempfile.TemporaryDirectory() as scratch:
        original, run_dir, exported = (Path(scratch) / name for name in ("original", "run", "exported"))
        model = sample.save(original)
        import_run(original, run_dir)
        export_run(run_dir, exported)
        same = (original / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
        ours, theirs = outputs(load(run_dir), model, make_batch())
    return Parity(float(np.abs(ours - theirs).max()), _divergence(ours, theirs), same)


def outputs(run: Run, model: Any, batch: ParityBatch) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of jaxformer and of transformers at every real position.

    They are token logits, class logits, or the hidden states of a model without a head."""
    import torch

    ids, mask, targets = (torch.tensor(part) for part in batch)
    with torch.no_grad():
        if run.config.model.shape == "encoder-decoder":
            theirs = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
            ours = forward(run, batch.targets, batch.ids, inputs_mask=batch.mask)
            return np.asarray(ours).reshape(-1, VOCAB), theirs.numpy().reshape(-1, VOCAB)
        result = model(input_ids=ids, attention_mask=mask)
    tokens = tokens_from_ids(batch.ids, batch.mask)
    real = batch.mask.astype(bool)
    if run.config.model.pooler is not None and run.config.model.pooler.num_classes is not None:
        return np.asarray(_apply(run, tokens, "pool")), result.logits.numpy()
    if run.config.model.head is None:
        return np.asarray(_apply(run, tokens, "hidden"))[real], result.last_hidden_state.numpy()[real]
    return np.asarray(_apply(run, tokens, "__call__"))[real], result.logits.numpy()[real]


def _apply(run: Run, tokens: Any, method: str) -> jax.Array:
    return jax.jit(lambda params: run.model.apply({"params": params}, tokens, method=method))(run.params)


def _divergence(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    if theirs.shape[-1] != VOCAB:
        return None
    p, q = (_log_softmax(x.astype(np.float64)) for x in (theirs, ours))
    return max(0.0, float((np.exp(p) * (p - q)).sum(axis=-1).mean()))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    """In NumPy, because JAX would round float64 to float32."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
