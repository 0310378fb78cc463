"""A small run config for each model shape that can be trained; configs are immutable, so all tests share them."""

import pytest

from jaxformer.config import ByteTokenizer, Causal, DataConfig, MemorySource, RunConfig, Seq2Seq
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani


@pytest.fixture(scope="session")
def run() -> RunConfig:
    """Decoder-only."""
    model = gpt2(num_layers=2, embed_dim=16, num_heads=4, vocab_size=300, context_length=32)
    source = MemorySource(documents=("abc", "def"))
    return RunConfig(model=model, data=_data(train=source, objective=Causal()))


@pytest.fixture(scope="session")
def pair_run() -> RunConfig:
    """Encoder-decoder."""
    model = vaswani(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=300)
    source = MemorySource(pairs=(("abc", "def"),))
    return RunConfig(model=model, data=_data(train=source, objective=Seq2Seq(input_length=16)))


def _data(**fields) -> DataConfig:
    return DataConfig(tokenizer=ByteTokenizer(), length=16, batch_size=8, **fields)
