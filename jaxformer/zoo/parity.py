"""Measures the parity with transformers: the outputs of tiny models with the same weights."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.convert.heads import head_kind
from jaxformer.convert.sample import VOCAB, Sample
from jaxformer.decode.scoring import forward
from jaxformer.exchange import export_run, import_run
from jaxformer.run import Run, load
from jaxformer.typing import Tokens, tokens_from_ids

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
    """Outputs of jaxformer and of transformers, at every real position unless they are those of a whole text.

    They are token logits, class logits of texts or tokens, or the hidden states of a model without a head."""
    kind, real = head_kind(run.config.model), batch.mask.astype(bool)
    if kind == "classes":
        ids = classifier_ids(run.config.model, batch.ids, batch.mask)
        theirs = _call(model, input_ids=ids, attention_mask=batch.mask).logits
        return np.asarray(_apply(run, "pool", *classifier_tokens(run.config.model, ids, batch.mask))), theirs.numpy()
    if run.config.model.shape == "encoder-decoder":
        result = _call(model, input_ids=batch.ids, attention_mask=batch.mask, decoder_input_ids=batch.targets)
        ours = forward(run, batch.targets, batch.ids, inputs_mask=batch.mask)
        return np.asarray(ours).reshape(-1, VOCAB), result.logits.numpy().reshape(-1, VOCAB)
    result = _call(model, input_ids=batch.ids, attention_mask=batch.mask)
    theirs = result.last_hidden_state if kind == "none" else result.logits
    method = {"tags": "pool", "vocabulary": "__call__", "none": "hidden"}[kind]
    ours = _apply(run, method, tokens_from_ids(batch.ids, batch.mask))
    return np.asarray(ours)[real], theirs.numpy()[real]


def classifier_ids(model: ModelConfig, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The texts with pad as padding; those of an encoder-decoder also end with eos.

    transformers pools the last token that is not pad in a decoder, and the last eos in an encoder-decoder."""
    ids = ids.copy() if model.special.pad is None else np.where(mask, ids, model.special.pad)
    if model.shape == "encoder-decoder":
        last = ids.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
        ids[np.arange(len(ids)), last] = model.special.eos[0]
    return ids


def classifier_tokens(model: ModelConfig, ids: np.ndarray, mask: np.ndarray) -> tuple[Tokens, Tokens | None]:
    """The arguments of `Transformer.pool`; the decoder of an encoder-decoder reads the source shifted by one."""
    if model.shape != "encoder-decoder":
        return tokens_from_ids(ids, mask), None
    shifted = np.roll(ids, 1, axis=1)
    shifted[np.arange(len(ids)), mask.argmax(axis=1)] = model.special.decoder_start
    return tokens_from_ids(shifted, mask), tokens_from_ids(ids, mask)


def _call(model: Any, **arrays: np.ndarray) -> Any:
    import torch

    with torch.no_grad():
        return model(**{name: torch.tensor(array) for name, array in arrays.items()})


def _apply(run: Run, method: str, *arguments: Tokens | None) -> jax.Array:
    return jax.jit(lambda params: run.model.apply({"params": params}, *arguments, method=method))(run.params)


def _divergence(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    if theirs.shape[-1] != VOCAB:
        return None
    p, q = (_log_softmax(x.astype(np.float64)) for x in (theirs, ours))
    return max(0.0, float((np.exp(p) * (p - q)).sum(axis=-1).mean()))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    """In NumPy, because JAX would round float64 to float32."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
