"""The base class of objectives, and the losses that they share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import MASK_TOKEN, ModelConfig, RunConfig
from jaxformer.data.packing import Layout, Piece, RowGenerator, StoredRows
from jaxformer.data.tokenizer import Tokenizer, TokenizerPair, special_ids
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.ops.losses import LossOptions, LossSums, TokenLosses, head_loss
from jaxformer.ops.sharded import Sharded
from jaxformer.ops.vocab_loss import output_matrix, vocab_loss
from jaxformer.typing import Array, Batch, Float, Params

SHOWN = 8  # missing tokens that an error message lists


def token_loss(
    model: Transformer, params: Params, batch: Batch, options: LossOptions, key: jax.Array | None = None
) -> tuple[LossSums, TokenLosses]:
    """Cross-entropy of every target token, used by training, evaluation and scoring alike.

    Logits are computed for one chunk of the sequence or of the vocabulary at a time, and only at the positions in
    `batch.predicted` if the batch has them. There is no dropout if `key` is None.
    """
    hidden_BTD, router_loss = model.apply(
        {"params": params}, batch.tokens, batch.source, key, method="hidden_and_router_loss"
    )
    if batch.predicted is not None:
        hidden_BTD = jnp.take_along_axis(hidden_BTD, batch.predicted[..., None], axis=1)
    loss = _sharded_head_loss if isinstance(params["embedding"]["tokens"], Sharded) else _head_loss
    sums, tokens = loss(model, params, hidden_BTD, batch, options)
    return add_router_loss(sums, router_loss), tokens


def _head_loss(
    model: Transformer, params: Params, hidden_BTD: Array, batch: Batch, options: LossOptions
) -> tuple[LossSums, TokenLosses]:
    def head(params: Params, hidden_BTD: Array) -> Array:
        return model.apply({"params": params}, hidden_BTD, method="logits")

    head_params = {name: params[name] for name in ("embedding", "head") if name in params}
    return head_loss(head, options, head_params, hidden_BTD, batch.targets, batch.weights)


def _sharded_head_loss(
    model: Transformer, params: Params, hidden_BTD: Array, batch: Batch, options: LossOptions
) -> tuple[LossSums, TokenLosses]:
    cfg, head = model.config.head, params.get("head", {})
    features_BTD = model.apply({"params": params}, hidden_BTD, method="head_features")
    weight = params["embedding"]["tokens"] if cfg.tied else head["output"]["kernel"]
    output = output_matrix(weight, head.get("bias"), cfg.softcap)
    return vocab_loss(output, features_BTD, batch.targets, batch.weights, options)


def add_router_loss(sums: LossSums, router_loss: Float[Array, ""] | None) -> LossSums:
    """Add the router loss of a mixture of experts, which is a mean over tokens, whereas `LossSums` holds sums."""
    return sums if router_loss is None else sums._replace(loss=sums.loss + router_loss * sums.weight)


class Objective(ABC):
    """How examples become batches, and what training minimises.

    `encode`, `pieces` and `batch` run on the host, `loss` is traced by JAX. `data.packing.Objective` documents the
    methods that the input pipeline calls.
    """

    kind: ClassVar[str]
    fields: ClassVar[Mapping[str, str]]
    """The source fields that an example must have, and the tokenizer method that encodes each of them."""
    predicted: ClassVar[str | None] = None
    can_pack: ClassVar[bool] = True
    has_pairs: ClassVar[bool] = False
    """Whether inputs and targets are different texts, which may have a tokenizer each."""
    splits_texts: ClassVar[bool] = False

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config, self.model, self.tokenizer = config.data, config.model, tokenizer
        if isinstance(tokenizer, TokenizerPair) and not self.has_pairs:
            raise UserError(
                f"data.objective.kind={self.kind} reads the same text on both sides, but source and target have a "
                "tokenizer each: use data.objective.kind=seq2seq, or set data.source_tokenizer=none and one tokenizer"
            )
        self.special = special_ids(config.model, tokenizer)

    @property
    @abstractmethod
    def layout(self) -> Layout: ...

    def encode(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        ids = {
            field: getattr(self.tokenizer, method)([example[field] for example in examples])
            for field, method in self.fields.items()
        }
        return [{field: ids[field][i] for field in self.fields} for i in range(len(examples))]

    @abstractmethod
    def pieces(self, ids: Mapping[str, Any]) -> list[Piece]: ...

    def sizes(self, piece: Piece) -> tuple[int, ...]:
        return tuple(len(piece[side.columns[0]]) for side in self.layout.sides)

    @property
    def capacities(self) -> tuple[int, ...]:
        return self.layout.capacities

    @property
    def model_settings(self) -> dict[str, Any]:
        pooler = self.model.pooler
        if self.config.objective.head == "vocabulary":
            return {}
        return {"model.pooler.problem": pooler.problem, "model.pooler.labels": list(pooler.labels)}

    @abstractmethod
    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch: ...

    loss = staticmethod(token_loss)

    @staticmethod
    def step_metrics(sums: LossSums, model: ModelConfig) -> dict[str, Float[Array, ""]]:
        """Metrics of a training step besides the loss."""
        weight = jnp.maximum(sums.weight, 1.0)
        return {"perplexity": jnp.exp(sums.nll / weight), "accuracy": sums.correct / weight}


def require_token(tokenizer: Tokenizer, token: str, kind: str) -> int:
    """The id of a special token that an objective needs; raise if the tokenizer does not have it."""
    return require_tokens(tokenizer, [token], kind)[0]


def require_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kind: str) -> list[int]:
    """The ids of special tokens that an objective needs; raise if the tokenizer does not have all of them."""
    ids = [tokenizer.mask_id if token == MASK_TOKEN else tokenizer.token_id(token) for token in tokens]
    missing = list(dict.fromkeys(token for token, id in zip(tokens, ids, strict=True) if id is None))
    if not missing:
        return ids
    them = "it" if len(missing) == 1 else "them"
    if len(missing) <= SHOWN:
        names = ", ".join(map(repr, missing))
        remedy = f"data.tokenizer.extra_tokens='{json.dumps(missing)}'"
    else:
        names = f"{missing[0]!r}, {missing[1]!r}, ..., {missing[-1]!r} ({len(missing)} in total)"
        remedy = "extra_tokens=objective.tokens of the tokenizer in the config file, where objective is data.objective,"
    raise UserError(
        f"data.objective.kind={kind} needs the token{'s' * (len(missing) > 1)} {names}, which the tokenizer does not "
        f"have: add {them} with {remedy} (and raise model.vocab_size if needed), or use a tokenizer that has {them}"
    )


def split_text(ids: Sequence[int], length: int) -> list[np.ndarray]:
    """Cut the ids of a text into pieces of at most `length`."""
    array = np.asarray(ids, np.int32)
    return [array[start : start + length] for start in range(0, len(array), length)]
