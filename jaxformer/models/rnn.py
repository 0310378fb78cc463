"""Recurrent baselines for language modelling: Elman (Cognitive Science 14, 1990) and LSTM as in arXiv:1409.2329."""

from typing import Literal

from jaxformer.config import (
    EmbeddingConfig,
    FanInInit,
    HeadConfig,
    InitConfig,
    ModelConfig,
    NormalInit,
    RecurrentConfig,
    SpecialIds,
)
from jaxformer.models.builders import builder
from jaxformer.models.presets import Preset, ZooRow

_SPECIAL = SpecialIds()


@builder()
def rnn(
    *,
    cell: Literal["elman", "lstm"],
    num_layers: int,
    embed_dim: int,
    dim: int,
    vocab_size: int,
    context_length: int | None = None,
    tied: bool = True,
    special: SpecialIds = _SPECIAL,
    dropout: float = 0.0,
) -> ModelConfig:
    """Recurrent layers with dropout on all but the recurrent connections, and a bias on the logits."""
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        embedding=EmbeddingConfig(dropout=dropout),
        decoder=RecurrentConfig(cell=cell, num_layers=num_layers, dim=dim, dropout=dropout),
        head=HeadConfig(tied=tied, bias=True),
        context_length=context_length,
        special=special,
        # Same variance as PyTorch's initial recurrent layers, which are uniform within +-fan_in ** -0.5.
        init=InitConfig(kernel=FanInInit(scale=1 / 3), embedding=NormalInit(stddev=embed_dim**-0.5)),
    )


def _zaremba(cell: Literal["elman", "lstm"], dim: int, bound: float, dropout: float) -> ModelConfig:
    """A model of arXiv:1409.2329, section 4.1: two layers as wide as the embeddings, 10,000 words, untied output."""
    model = rnn(cell=cell, num_layers=2, embed_dim=dim, dim=dim, vocab_size=10_000, dropout=dropout, tied=False)
    # Deviation: normal instead of uniform within +-bound, with the same variance.
    init = NormalInit(stddev=bound / 3**0.5)
    return model.model_copy(update={"init": InitConfig(kernel=init, embedding=init)})


def _count(dim: int, num_gates: int, vocab_size: int = 10_000) -> int:
    """The parameter count that follows from section 3.1: two layers as wide as the embeddings, untied output."""
    layer = num_gates * (2 * dim * dim + dim)  # an affine map of the previous state and of the input
    return vocab_size * dim + 2 * layer + dim * vocab_size + vocab_size


_PRESETS = {
    # The paper has no Elman network: this is its small LSTM with an Elman cell.
    "rnn-elman-small": Preset(_count(200, num_gates=1), lambda: _zaremba("elman", 200, 0.1, 0.0)),
    "rnn-lstm-small": Preset(_count(200, num_gates=4), lambda: _zaremba("lstm", 200, 0.1, 0.0)),
    "rnn-lstm-medium": Preset(_count(650, num_gates=4), lambda: _zaremba("lstm", 650, 0.05, 0.5)),
    "rnn-lstm-large": Preset(_count(1500, num_gates=4), lambda: _zaremba("lstm", 1500, 0.04, 0.65)),
}

ZOO_ROWS = (ZooRow("Elman RNN, LSTM", _PRESETS),)
