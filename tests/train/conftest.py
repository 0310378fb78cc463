"""Configs and batches of tiny runs for the training tests."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    BucketBias,
    ByteTokenizer,
    DataConfig,
    MemorySource,
    ModelConfig,
    MoeConfig,
    NormConfig,
    Rope,
    RunConfig,
    Seq2Seq,
    StackConfig,
)
from jaxformer.data.packing import packed_tokens
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani
from jaxformer.sharding import global_batch
from jaxformer.train.program import train_program
from jaxformer.train.state import TrainState
from jaxformer.typing import Batch

DOCUMENTS = tuple(f"document {i}: " + "abc " * (i % 7) for i in range(40))


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """A decoder-only run on a few short documents, or an encoder-decoder run on pairs; `fields` override defaults."""

    def make(shape: str = "decoder-only", dropout: float = 0.0, **fields: Any) -> RunConfig:
        data = {"tokenizer": ByteTokenizer(), "length": 32, "batch_size": 8} | fields.pop("data", {})
        if shape == "decoder-only":
            model = gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=264, context_length=64, dropout=dropout)
            source = MemorySource(documents=DOCUMENTS)
        else:
            model = vaswani(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=264, dropout=dropout)
            source = MemorySource(pairs=tuple((text, text[:5]) for text in DOCUMENTS))
            data["objective"] = Seq2Seq(input_length=64)
        model = fields.pop("model", model)
        data = {"train": source, "heldout": source} | data
        return RunConfig(model=model, data=DataConfig(**data), **fields)

    return make


@pytest.fixture
def experts() -> ModelConfig:
    """A decoder with experts and a relative bias that all layers share."""
    attention = AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=4, causal=True, position=Rope(), qk_norm=NormConfig(kind="rms")
    )
    moe = MoeConfig(num_experts=4, top_k=2, dim=24, load_balance=0.2, router_z=0.05)
    block = BlockConfig(attention=attention, mlp=moe, norm=NormConfig(kind="rms"))
    bias = BucketBias(num_buckets=8, max_distance=20)
    stack = StackConfig(num_layers=2, pattern=(block,), relative_bias=bias)
    return ModelConfig(vocab_size=264, embed_dim=16, decoder=stack)


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """Random packed rows, with a second segment and padding at the end."""

    def make(config: RunConfig, seed: int = 0) -> Batch:
        rng = np.random.default_rng(seed)
        rows, length = config.data.batch_size, config.data.length
        cut, end = rng.integers(3, length // 2, (rows, 1)), rng.integers(length // 2, length + 1, (rows, 1))
        index = np.broadcast_to(np.arange(length), (rows, length))
        segments = np.where(index < cut, 1, np.where(index < end, 2, 0)).astype(np.int32)
        ids, targets = (rng.integers(0, config.model.vocab_size, (rows, length)).astype(np.int32) for _ in range(2))
        source = packed_tokens(targets, segments) if config.model.shape == "encoder-decoder" else None
        return Batch(packed_tokens(ids, segments), targets, (segments > 0).astype(np.float32), source)

    return make


RESULTS: dict[tuple[RunConfig, int, int], tuple[TrainState, list[dict[str, float]]]] = {}


@pytest.fixture
def run_steps(make_batch) -> Callable[..., tuple[TrainState, list[dict[str, float]]]]:
    """Train from scratch on the mesh of the config; return the final state and the metrics of each step.

    Results are cached; `again=True` repeats the run.
    """

    def run(
        config: RunConfig, num_steps: int = 2, num_devices: int = 1, again: bool = False
    ) -> tuple[TrainState, list[dict[str, float]]]:
        name = (config, num_steps, num_devices)
        if again or name not in RESULTS:
            RESULTS[name] = train_steps(*name)
        return RESULTS[name]

    def train_steps(config: RunConfig, num_steps: int, num_devices: int) -> tuple[TrainState, list[dict[str, float]]]:
        program = train_program(config, jax.devices()[:num_devices])
        state, history = program.init(), []
        with jax.set_mesh(program.mesh):
            for i in range(num_steps):
                state, metrics = program.step(state, global_batch(make_batch(config, seed=i), program.mesh))
                history.append({name: float(value) for name, value in metrics.items()})
        return state, history

    return run
