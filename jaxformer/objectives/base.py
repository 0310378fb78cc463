"""The base class of objectives, and the loss that token objectives share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import jax

from jaxformer.config import DataConfig
from jaxformer.data.packing import Layout, Piece, RowGenerator, StoredRows
from jaxformer.data.tokenizer import SpecialTokens
from jaxformer.layers import Transformer
from jaxformer.ops.losses import LossOptions, LossSums, TokenLosses, head_loss
from jaxformer.typing import Array, Batch, Params


def token_loss(
    model: Transformer, params: Params, batch: Batch, options: LossOptions, key: jax.Array | None = None
) -> tuple[LossSums, TokenLosses]:
    """Cross-entropy of every target token, used by training, evaluation and scoring alike.

    Logits are computed for one chunk of the sequence at a time. There is no dropout if `key` is None.
    """

    def head(params: Params, hidden_BTD: Array) -> Array:
        return model.apply({"params": params}, hidden_BTD, method="logits")

    hidden_BTD, router_loss = model.apply(
        {"params": params}, batch.tokens, batch.source, key, method="hidden_and_router_loss"
    )
    head_params = {name: params[name] for name in ("embedding", "head") if name in params}
    sums, tokens = head_loss(head, options, head_params, hidden_BTD, batch.targets, batch.weights)
    if router_loss is not None:
        # The router loss is a mean over tokens, `LossSums` holds sums.
        sums = sums._replace(loss=sums.loss + router_loss * sums.weight)
    return sums, tokens


class Objective(ABC):
    """How examples become batches, and what training minimises.

    `pieces` and `batch` run on the host, `loss` is traced by JAX. `data.packing.Objective` documents the methods.
    """

    kind: ClassVar[str]
    fields: ClassVar[Mapping[str, str]]
    predicted: ClassVar[str | None] = None

    def __init__(self, config: DataConfig, special: SpecialTokens) -> None:
        self.config, self.special = config, special

    @property
    @abstractmethod
    def layout(self) -> Layout: ...

    @abstractmethod
    def pieces(self, ids: Mapping[str, list[int]]) -> list[Piece]: ...

    @abstractmethod
    def batch(self, rows: StoredRows, generator: RowGenerator) -> Batch: ...

    loss = staticmethod(token_loss)
