"""Classification of texts and pairs of texts: single-label, multi-label and regression."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, RunConfig
from jaxformer.data.labels import encode_label
from jaxformer.data.packing import Layout, Piece, RowGenerator, Side, StoredRows, packed_tokens
from jaxformer.data.tokenizer import Tokenizer, TypedIds
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.objectives.base import Objective, add_router_loss
from jaxformer.ops.losses import LossOptions, LossSums, class_loss
from jaxformer.typing import Array, Batch, Float, Params


class Classify(Objective):
    """A text, or `text` and `text_pair`, with a `label`. Rows are not packed, because a row has one prediction."""

    kind = "classify"
    fields = {"text": "", "label": ""}  # noqa: RUF012
    can_pack = False

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        needed = len(tokenizer.encode_sequence([""])[0].ids) + 1
        if self.config.length < needed:
            raise UserError(
                f"data.length={self.config.length}: classify needs the special tokens and a token of the text, set "
                f"{needed} or more"
            )

    @property
    def layout(self) -> Layout:
        num_labels = self.model.pooler.num_classes if self._has_numbers else 1
        labels = Side(num_labels, ("labels",), "label_segments", limit="")
        return Layout((Side(self.config.length, ("tokens", "types")), labels))

    @property
    def _has_numbers(self) -> bool:
        """Whether labels are numbers: targets of a regression, or 1 and 0 for every class."""
        return self.model.pooler.problem != "single_label"

    def encode(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        texts = [example["text"] for example in examples]
        pairs = [example["text_pair"] for example in examples] if "text_pair" in examples[0] else None
        encoded = [
            {"typed": typed, "label": encode_label(example["label"], self.model.pooler)}
            for typed, example in zip(self.tokenizer.encode_sequence(texts, pairs), examples, strict=True)
        ]
        for i, row in enumerate(encoded):
            if self.config.too_long == "truncate" and len(row["typed"].ids) > self.config.length:
                pair = None if pairs is None else [pairs[i]]
                row["typed"] = self.tokenizer.encode_sequence([texts[i]], pair, self.config.length)[0]
                row["truncated"] = True
        return encoded

    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]:
        typed: TypedIds = ids["typed"]
        if len(typed.ids) > self.config.length:
            return []
        labels = np.atleast_1d(ids["label"])
        # Records hold integers: numbers are stored as their bit patterns.
        stored = labels.astype(np.float32).view(np.int32) if self._has_numbers else labels.astype(np.int32)
        return [{"tokens": np.array(typed.ids, np.int32), "types": np.array(typed.types, np.int32), "labels": stored}]

    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch:
        tokens = source = packed_tokens(rows["tokens"], rows["segments"])
        if self.model.shape == "encoder-decoder":
            # The decoder reads the same text, shifted by the start token (arXiv:1910.13461, section 3.1).
            shifted = np.roll(tokens.ids, 1, axis=1)
            shifted[:, 0] = self.special.start
            tokens = tokens._replace(ids=np.where(rows["segments"] > 0, shifted, 0))
        elif self.model.embedding.num_types > 1:
            tokens = tokens._replace(types=rows["types"])
        labels = rows["labels"].view(np.float32) if self._has_numbers else rows["labels"][:, 0]
        weights = (rows["segments"] > 0).any(axis=1).astype(np.float32)
        source = source if self.model.shape == "encoder-decoder" else None
        return Batch(tokens, weights=weights, source=source, labels=labels)

    @staticmethod
    def loss(
        model: Transformer, params: Params, batch: Batch, options: LossOptions, key: jax.Array | None = None
    ) -> tuple[LossSums, None]:
        logits_BC, router_loss = model.apply(
            {"params": params}, batch.tokens, batch.source, key, method="pool_and_router_loss"
        )
        problem = model.config.pooler.problem
        smoothing, z_loss = options.label_smoothing, options.z_loss
        sums = class_loss(logits_BC, batch.labels, batch.weights, problem, label_smoothing=smoothing, z_loss=z_loss)
        return add_router_loss(sums, router_loss), None

    @staticmethod
    def step_metrics(sums: LossSums, model: ModelConfig) -> dict[str, Float[Array, ""]]:
        if model.pooler.problem == "regression":
            return {}
        return {"accuracy": sums.correct / jnp.maximum(sums.weight, 1.0)}
