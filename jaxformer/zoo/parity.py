"""How far outputs are from those of transformers with the same tiny weights."""

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
    """Largest absolute difference of a logit, or of a hidden state where there are no logits."""
    kl: float | None
    """Mean KL divergence of the next-token distributions, in nats; none without logits of tokens."""
    round_trip: bool
    """Whether import followed by export gives back the bytes of every tensor."""


class ParityBatch(NamedTuple):
    """Rows of different lengths, and the targets of an encoder-decoder."""

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
    """Compare both sides on one batch, through the files that `save_pretrained` and `jaxformer export` write."""
    with tempfile.TemporaryDirectory() as scratch:
        theirs, run_dir, again = (Path(scratch) / name for name in ("theirs", "run", "again"))
        model = sample.save(theirs)
        import_run(theirs, run_dir)
        export_run(run_dir, again)
        same = (theirs / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
        ours, wanted = outputs(load(run_dir), model, make_batch())
    return Parity(float(np.abs(ours - wanted).max()), _divergence(ours, wanted), same)


def outputs(run: Run, model: Any, batch: ParityBatch) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of both sides at every real position: logits of tokens or classes, hidden states of a bare model."""
    import torch

    ids, mask, targets = (torch.tensor(part) for part in batch)
    with torch.no_grad():
        if run.config.model.shape == "encoder-decoder":
            wanted = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
            ours = forward(run, batch.targets, batch.ids, inputs_mask=batch.mask)
            return np.asarray(ours).reshape(-1, VOCAB), wanted.numpy().reshape(-1, VOCAB)
        answer = model(input_ids=ids, attention_mask=mask)
    tokens = tokens_from_ids(batch.ids, batch.mask)
    real = batch.mask.astype(bool)
    if run.config.model.pooler is not None and run.config.model.pooler.num_classes is not None:
        return np.asarray(_apply(run, tokens, "pool")), answer.logits.numpy()
    if run.config.model.head is None:
        return np.asarray(_apply(run, tokens, "hidden"))[real], answer.last_hidden_state.numpy()[real]
    return np.asarray(_apply(run, tokens, "__call__"))[real], answer.logits.numpy()[real]


def _apply(run: Run, tokens: Any, method: str) -> jax.Array:
    return jax.jit(lambda params: run.model.apply({"params": params}, tokens, method=method))(run.params)


def _divergence(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    if theirs.shape[-1] != VOCAB:
        return None
    p, q = (_log_softmax(x.astype(np.float64)) for x in (theirs, ours))
    return max(0.0, float((np.exp(p) * (p - q)).sum(axis=-1).mean()))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    """In float64, which jax would round to float32."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
