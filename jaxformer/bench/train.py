"""Speed and memory of one train step."""

import resource
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxformer.config import (
    ByteTokenizer,
    DataConfig,
    MemorySource,
    OptimConfig,
    RunConfig,
    TrainConfig,
    apply_overrides,
    load_run_file,
)
from jaxformer.data.packing import packed_tokens
from jaxformer.models.gpt2 import gpt2
from jaxformer.sharding import global_batch
from jaxformer.train.metrics import step_flops
from jaxformer.train.program import train_program
from jaxformer.typing import Batch, Tokens


def default_config() -> RunConfig:
    """A GPT-2-like model with 6 layers, width 384, 6 heads and vocabulary 8192, and batches of 8 x 256 tokens."""
    return RunConfig(
        model=gpt2(num_layers=6, embed_dim=384, num_heads=6, vocab_size=8192, context_length=256),
        data=DataConfig(train=MemorySource(documents=("unused",)), tokenizer=ByteTokenizer(), length=256, batch_size=8),
        optim=OptimConfig(learning_rate=1e-3, schedule={"kind": "constant"}, weight_decay=0.1, clip_norm=None),
        train=TrainConfig(dtype="float32"),
    )


class TrainBench:
    """A compiled train step and a random batch of the config's shape."""

    def __init__(self, config: RunConfig) -> None:
        self.config, program = config, train_program(config, jax.devices())
        self.state = program.init()
        self.batch = global_batch(random_batch(config), program.mesh)
        lowered = program.lower()
        started = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - started

    def step(self) -> float:
        """Run one step and wait for it; returns the seconds."""
        started = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - started


def random_batch(config: RunConfig) -> Batch:
    """Random tokens, with two packed documents per row and no padding; one document per row if rows have labels."""
    rng, model, layout = np.random.default_rng(0), config.model, config.batch_layout
    rows, predicts_tokens = config.data.batch_size, config.data.objective.head == "vocabulary"

    def tokens(length: int, vocab_size: int) -> Tokens:
        shape, first = (rows, length), length if layout.num_labels else length // 2
        segments = np.where(np.arange(length) < first, 1, 2).astype(np.int32)
        return packed_tokens(rng.integers(0, vocab_size, shape, dtype=np.int32), np.broadcast_to(segments, shape))

    def integers(limit: int, *shape: int) -> np.ndarray:
        return rng.integers(0, limit, (rows, *shape), dtype=np.int32)

    target = tokens(layout.length, model.vocab_size)
    source = tokens(layout.source_length, model.encoder_vocab_size) if layout.source_length else None
    if layout.has_types:
        target = target._replace(types=np.zeros_like(target.ids))
    if layout.has_prefix:
        target = target._replace(prefix=target.positions < layout.length // 4)
    if layout.num_contexts:
        contexts = integers(model.vocab_size, layout.length, layout.num_contexts)
        negatives = integers(model.vocab_size, layout.length, *layout.negatives)
        return Batch(target, contexts, np.ones(contexts.shape, np.float32), negatives=negatives)
    if layout.num_labels:
        labels = integers(2, layout.num_labels).astype(np.float32) if layout.float_labels else integers(2)
        return Batch(target, weights=np.ones(rows, np.float32), source=source, labels=labels)
    targets = integers(model.vocab_size if predicts_tokens else model.pooler.num_classes, layout.loss_length)
    predicted = integers(layout.length, layout.num_predictions) if layout.num_predictions else None
    return Batch(target, targets, np.ones(targets.shape, np.float32), source, predicted=predicted)


def bench_train(config_file: str | None, overrides: Sequence[str], repeats: int) -> str:
    config = load_run_file(config_file) if config_file else default_config()
    config = apply_overrides(config, overrides)
    config.check_data()
    bench = TrainBench(config)
    bench.step()
    seconds = [bench.step() for _ in range(repeats)]
    best, tokens = min(seconds), config.data.batch_size * config.data.length
    memory = bench.compiled.memory_analysis()
    return (
        f"train step: best {best * 1e3:.0f} ms, median {statistics.median(seconds) * 1e3:.0f} ms of {repeats}; "
        f"{tokens / best:,.0f} tokens/s; {step_flops(config) / best / 1e9:.0f} GFLOP/s; "
        f"compiled in {bench.compile_seconds:.1f} s; "
        f"arguments {memory.argument_size_in_bytes / 2**20:.0f} MiB, "
        f"temporary {memory.temp_size_in_bytes / 2**20:.0f} MiB; "
        f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB"
    )
