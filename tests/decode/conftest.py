"""Tiny untrained decoder-only and encoder-decoder runs for the tests of decoding."""

from collections.abc import Callable
from functools import cache

import jax
import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    ByteTokenizer,
    DataConfig,
    HeadConfig,
    MemorySource,
    MlpConfig,
    ModelConfig,
    NormalInit,
    NormConfig,
    Rope,
    RunConfig,
    Seq2Seq,
    StackConfig,
)
from jaxformer.data import Bytes
from jaxformer.layers import Transformer, init_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani
from jaxformer.run import Run

VOCAB = 264


def windowed_rope() -> ModelConfig:
    """Grouped-query attention, rotary positions, and three layers that alternate between local and global attention."""
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, causal=True, position=Rope())
    local = attention.model_copy(update={"window": 4})
    mlp, norm = MlpConfig(dim=48, activation="silu", gated=True), NormConfig(kind="rms")
    blocks = tuple(BlockConfig(attention=a, mlp=mlp, norm=norm) for a in (local, attention))
    return ModelConfig(
        vocab_size=VOCAB,
        embed_dim=32,
        decoder=StackConfig(num_layers=3, pattern=blocks, final_norm=norm),
        head=HeadConfig(tied=False, bias=True),
    )


MODELS = {
    "learned": lambda: gpt2(num_layers=1, embed_dim=32, num_heads=4, vocab_size=VOCAB, context_length=64),
    "rope": windowed_rope,
    "encoder-decoder": lambda: vaswani(num_layers=1, embed_dim=32, num_heads=4, mlp_dim=64, vocab_size=VOCAB),
}


def untrained(model: ModelConfig) -> Run:
    # Larger weights than usual keep logits far apart, so that rounding does not decide which token is most likely.
    init = model.init.model_copy(update={"kernel": NormalInit(stddev=0.3), "embedding": NormalInit(stddev=0.5)})
    model = model.model_copy(update={"init": init})
    data = {"train": MemorySource(documents=("x",)), "tokenizer": ByteTokenizer(), "length": 32}
    if model.encoder is not None:
        data |= {"objective": Seq2Seq(input_length=32)}
    config = RunConfig(model=model, data=DataConfig(**data))
    return Run(config, Transformer(model), init_params(model, jax.random.key(7)), Bytes(), step=0)


@pytest.fixture(
    scope="session",
    # Learned positions are the simplest case, so they run only with the slow tests.
    params=[pytest.param(name, marks=pytest.mark.slow if name == "learned" else ()) for name in sorted(MODELS)],
)
def run(request, run_of) -> Run:
    return run_of(request.param)


@pytest.fixture(scope="session")
def make_run() -> Callable[[ModelConfig], Run]:
    return untrained


@pytest.fixture(scope="session")
def run_of() -> Callable[[str], Run]:
    """Looks up a run by the name of its model; each is made once."""
    return cache(lambda name: untrained(MODELS[name]()))


@pytest.fixture(scope="session")
def decoder_run(run_of) -> Run:
    return run_of("learned")


@pytest.fixture(scope="session")
def ring_run(run_of) -> Run:
    return run_of("rope")


@pytest.fixture(scope="session")
def translator(run_of) -> Run:
    return run_of("encoder-decoder")


@pytest.fixture(scope="session", params=["decoder_run", "translator"])
def either_run(request) -> Run:
    """A decoder-only and an encoder-decoder run, for tests that do not depend on positions or windows."""
    return request.getfixturevalue(request.param)
