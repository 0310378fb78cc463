"""Word vectors by negative sampling (arXiv:1310.4546): skip-gram and continuous bag of words.

A batch holds the words that are left after subsampling; every position has its own window, drawn anew in every
step. Deviation: a random word that equals the predicted one counts for nothing, where the paper draws another one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import RunConfig
from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.data.tokenizer import Tokenizer, Words
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.objectives.base import Objective, split_text
from jaxformer.ops.losses import LossOptions, LossSums, TokenLosses
from jaxformer.ops.sharded import gather_weights
from jaxformer.typing import Array, Batch, Float, Params


def negative_sampling_loss(
    model: Transformer, params: Params, batch: Batch, options: LossOptions, key: jax.Array | None = None
) -> tuple[LossSums, TokenLosses]:
    """Binary cross-entropy of predicted words against random words, summed over the predicted words.

    `correct` counts the predicted words that have a higher score than each of their random words.
    """
    params = gather_weights(params)
    inputs_VD = params["embedding"]["tokens"].astype(jnp.float32)
    # Gathering rows of a transposed copy is much faster than gathering columns.
    outputs_VD = params["head"]["output"]["kernel"].T.astype(jnp.float32)
    is_skip_gram = batch.negatives.shape[2] == batch.targets.shape[2]
    if is_skip_gram:
        x_BTD, predicted_BTP, weights_BTP = inputs_VD[batch.tokens.ids], batch.targets, batch.weights
    else:
        counts_BT = batch.weights.sum(axis=-1)
        sum_BTD = jnp.einsum("BTC,BTCD->BTD", batch.weights, inputs_VD[batch.targets])
        x_BTD = sum_BTD / jnp.maximum(counts_BT, 1.0)[..., None]
        predicted_BTP, weights_BTP = batch.tokens.ids[..., None], (counts_BT > 0).astype(jnp.float32)[..., None]
    positive_BTP = jnp.einsum("BTD,BTPD->BTP", x_BTD, outputs_VD[predicted_BTP])
    negative_BTPN = jnp.einsum("BTD,BTPND->BTPN", x_BTD, outputs_VD[batch.negatives])
    is_other_BTPN = batch.negatives != predicted_BTP[..., None]
    loss_BTP = jax.nn.softplus(-positive_BTP) + (jax.nn.softplus(negative_BTPN) * is_other_BTPN).sum(axis=-1)
    correct_BTP = ((positive_BTP[..., None] > negative_BTPN) | ~is_other_BTPN).all(axis=-1)
    loss = (loss_BTP * weights_BTP).sum()
    sums = LossSums(loss, loss, (correct_BTP * weights_BTP).sum(), weights_BTP.sum())
    return sums, TokenLosses(jax.lax.stop_gradient(loss_BTP), correct_BTP)


class Word2Vec(Objective):
    kind = "word2vec"
    fields = {"text": "encode_batch"}  # noqa: RUF012
    splits_texts = True
    loss = staticmethod(negative_sampling_loss)

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        if not isinstance(tokenizer, Words):
            raise UserError(
                "data.objective.kind=word2vec needs a vocabulary of words with their counts: set "
                "data.tokenizer.kind=words"
            )
        cfg, counts = self.config.objective, tokenizer.counts
        self._cumulative = np.cumsum(np.where(counts > 0, counts.astype(np.float64) ** cfg.negative_power, 0))
        self._kept_share = kept_shares(counts, cfg.subsample)

    @property
    def layout(self) -> Layout:
        return Layout((Side(self.config.length, ("tokens",)),))

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        """The known words of a text, cut into pieces of at most one row; a single word has no context."""
        known = [id for id in ids["text"] if id != self.tokenizer.unk_id]
        return [{"tokens": piece} for piece in split_text(known, self.config.length) if len(piece) > 1]

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        cfg, shape = self.config.objective, rows["tokens"].shape
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        reach = np.zeros(shape, np.int32)
        negatives = np.zeros((*shape, cfg.num_predictions, cfg.num_negatives), np.int32)
        for i in range(shape[0]):
            random = generator(i)
            is_kept = (rows["segments"][i] > 0) & (random.random_sample(shape[1]) < self._kept_share[rows["tokens"][i]])
            num_kept = int(is_kept.sum())
            tokens[i, :num_kept], segments[i, :num_kept] = rows["tokens"][i][is_kept], rows["segments"][i][is_kept]
            reach[i] = random.randint(1, cfg.window + 1, size=shape[1])
            if num_kept:
                drawn = random.random_sample((num_kept, *negatives.shape[2:])) * self._cumulative[-1]
                negatives[i, :num_kept] = np.searchsorted(self._cumulative, drawn, side="right")
        contexts, weights = find_contexts(tokens, segments, reach, cfg.window)
        return Batch(packed_tokens(tokens, segments), contexts, weights, negatives=negatives)

    @staticmethod
    def step_metrics(sums: LossSums, model: Any) -> dict[str, Float[Array, ""]]:
        """Metrics of a training step besides the loss, which is no likelihood and thus has no perplexity."""
        return {"accuracy": sums.correct / jnp.maximum(sums.weight, 1.0)}


def kept_shares(counts: np.ndarray, subsample: float) -> np.ndarray:
    """The probability to keep an occurrence of each word; formula of the original implementation."""
    shares = counts / max(counts.sum(), 1)
    if subsample == 0:
        return np.ones(len(counts))
    ratio = np.divide(subsample, shares, out=np.ones(len(counts)), where=shares > 0)
    return np.minimum(np.sqrt(ratio) + ratio, 1.0)


def find_contexts(
    tokens: np.ndarray, segments: np.ndarray, reach: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """The words around each position, [B, T, 2 * window], and 1.0 for those within its reach and segment."""
    length = tokens.shape[1]
    offsets = np.array([offset for offset in range(-window, window + 1) if offset])
    index = np.arange(length)[:, None] + offsets
    inside, index = (index >= 0) & (index < length), np.clip(index, 0, length - 1)
    is_context = inside & (segments[:, index] == segments[..., None]) & (segments[..., None] > 0)
    is_context &= np.abs(offsets) <= reach[..., None]
    return np.where(is_context, tokens[:, index], 0).astype(np.int32), is_context.astype(np.float32)
