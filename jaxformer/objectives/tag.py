"""Token classification: one label per word, predicted at its first token (arXiv:1810.04805, section 5.3)."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.data.labels import encode_tags
from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.layers import Transformer
from jaxformer.objectives.base import Objective, add_router_loss
from jaxformer.ops.losses import LossOptions, LossSums, TokenLosses, cross_entropy
from jaxformer.typing import Array, Batch, Float, Params


class Tag(Objective):
    """`text` is a list of words, `tags` has a label for each of them."""

    kind = "tag"
    fields = {"text": "", "tags": ""}  # noqa: RUF012

    @property
    def layout(self) -> Layout:
        return Layout((Side(self.config.length, ("tokens", "tags")),))

    def encode(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        sentences = self.tokenizer.encode_words([example["text"] for example in examples])
        encoded = []
        for words, example in zip(sentences, examples, strict=True):
            row = {"words": words, "tags": encode_tags(example["tags"], example["text"], self.model.pooler)}
            if self.config.too_long == "truncate" and _num_tokens(words) > self.config.length:
                row |= {"words": _first_words(words, self.config.length), "truncated": True}
            encoded.append(row)
        return encoded

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        words = ids["words"]
        # A sentence whose first word alone is too long is not left with any word by truncation.
        if not words or _num_tokens(words) > self.config.length:
            return []
        # A stored tag is the id plus 1, because 0 marks tokens without a tag; a word without tokens loses its tag.
        tags = [
            mark
            for word, tag in zip(words, ids["tags"], strict=False)
            for mark in [tag + 1, *[0] * len(word)][: len(word)]
        ]
        tokens = [self.special.bos, *(id for word in words for id in word), self.special.first_eos]
        return [{"tokens": np.array(tokens, np.int32), "tags": np.array([0, *tags, 0], np.int32)}]

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        tags, tokens = rows["tags"], packed_tokens(rows["tokens"], rows["segments"])
        return Batch(tokens, np.maximum(tags - 1, 0), (tags > 0).astype(np.float32))

    @staticmethod
    def loss(
        model: Transformer, params: Params, batch: Batch, options: LossOptions, key: jax.Array | None = None
    ) -> tuple[LossSums, TokenLosses]:
        logits_BTC, router_loss = model.apply(
            {"params": params}, batch.tokens, batch.source, key, method="pool_and_router_loss"
        )
        smoothing, z_loss = options.label_smoothing, options.z_loss
        sums, tokens = cross_entropy(logits_BTC, batch.targets, batch.weights, label_smoothing=smoothing, z_loss=z_loss)
        return add_router_loss(sums, router_loss), tokens

    @staticmethod
    def step_metrics(sums: LossSums, model: ModelConfig) -> dict[str, Float[Array, ""]]:
        return {"accuracy": sums.correct / jnp.maximum(sums.weight, 1.0)}


def _num_tokens(words: Sequence[Sequence[int]]) -> int:
    return sum(map(len, words)) + 2  # bos and eos


def _first_words(words: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """The first words that fit into a row together with bos and eos."""
    ends = np.cumsum([len(word) for word in words]) + 2
    return list(words[: int(np.searchsorted(ends, length, side="right"))])
