"""A minimal run config, whose `data` section the tests vary."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    ByteTokenizer,
    DataConfig,
    MemorySource,
    MlpConfig,
    ModelConfig,
    RunConfig,
    Seq2Seq,
    StackConfig,
)


def _model(vocab_size: int, with_encoder: bool) -> ModelConfig:
    attention, mlp = AttentionConfig(num_heads=1, head_dim=4), MlpConfig(dim=4)
    decoder = BlockConfig(
        attention=attention.model_copy(update={"causal": True}),
        cross_attention=attention if with_encoder else None,
        mlp=mlp,
    )
    encoder = StackConfig(num_layers=1, pattern=(BlockConfig(attention=attention, mlp=mlp),))
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=4,
        encoder=encoder if with_encoder else None,
        decoder=StackConfig(num_layers=1, pattern=(decoder,)),
    )


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """Builds a run config from a seed, a vocabulary size and the fields of its `data` section."""

    def make(seed: int = 0, vocab_size: int = 259, **data: Any) -> RunConfig:
        data = {"train": MemorySource(documents=("abc",)), "tokenizer": ByteTokenizer(), "length": 8} | data
        with_encoder = isinstance(data.get("objective"), Seq2Seq)
        return RunConfig(seed=seed, model=_model(vocab_size, with_encoder), data=DataConfig(**data))

    return make
