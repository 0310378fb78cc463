"""Speed and memory of one train step."""

import resource
import statistics
import time
from collections.abc import Sequence
from functools import partial

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
from jaxformer.layers import Transformer, abstract_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.run import make_runtime
from jaxformer.sharding import global_batch, make_mesh
from jaxformer.train.metrics import step_flops
from jaxformer.train.optim import make_optimizer
from jaxformer.train.state import init_state, state_shardings
from jaxformer.train.step import train_step


def default_config() -> RunConfig:
    """GPT-2-like: 6 layers, width 384, 6 heads, vocabulary 8192, batches of 8 x 256."""
    return RunConfig(
        model=gpt2(num_layers=6, embed_dim=384, num_heads=6, vocab_size=8192, max_length=256),
        data=DataConfig(train=MemorySource(documents=("unused",)), tokenizer=ByteTokenizer(), length=256, batch_size=8),
        optim=OptimConfig(learning_rate=1e-3, schedule={"kind": "constant"}, weight_decay=0.1, clip_norm=None),
        train=TrainConfig(dtype="float32"),
    )


class TrainBench:
    """A compiled train step and a random batch of the config's shape."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.mesh = config, make_mesh(config.mesh)
        optimizer = make_optimizer(config.optim, config.train.steps, abstract_params(config.model)[1])
        model = Transformer(config.model, make_runtime(config.train, self.mesh.devices.flat[0].platform))
        abstract = jax.eval_shape(lambda: init_state(config, optimizer))
        shardings = state_shardings(config, abstract, self.mesh)
        self.state = jax.jit(lambda: init_state(config, optimizer), out_shardings=shardings)()
        self.batch = global_batch(random_batch(config), self.mesh)
        step = partial(train_step, model=model, optimizer=optimizer, config=config)
        step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        with jax.set_mesh(self.mesh):
            lowered = step.lower(self.state, self.batch)
            started = time.perf_counter()
            self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - started

    def step(self) -> float:
        """Seconds of one step, to the end of its work."""
        started = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - started


def random_batch(config: RunConfig) -> dict[str, np.ndarray]:
    """Two packed documents a row, no padding."""
    rng, shape = np.random.default_rng(0), (config.data.batch_size, config.data.length)
    ids = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    index = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    cut = shape[1] // 2
    batch = {
        "tokens": ids,
        "targets": np.roll(ids, -1, axis=1),
        "positions": np.where(index < cut, index, index - cut),
        "segments": np.where(index < cut, 1, 2).astype(np.int32),
        "weights": np.ones(shape, np.float32),
    }
    if config.model.shape != "encoder-decoder":
        return batch
    shape = (shape[0], config.data.objective.input_length)
    ones = np.ones(shape, np.int32)
    inputs = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
    return batch | {"inputs": inputs, "input_positions": np.cumsum(ones, axis=1) - 1, "input_segments": ones}


def bench_train(config_file: str | None, overrides: Sequence[str], repeats: int) -> str:
    config = load_run_file(config_file) if config_file else default_config()
    config = apply_overrides(config, overrides)
    config.check_data()
    peer = TrainBench(config)
    peer.step()
    seconds = [peer.step() for _ in range(repeats)]
    best, tokens = min(seconds), config.data.batch_size * config.data.length
    memory = peer.compiled.memory_analysis()
    return (
        f"train step: best {best * 1e3:.0f} ms, median {statistics.median(seconds) * 1e3:.0f} ms of {repeats}; "
        f"{tokens / best:,.0f} tokens/s; {step_flops(config) / best / 1e9:.0f} GFLOP/s; "
        f"compiled in {peer.compile_seconds:.1f} s; "
        f"arguments {memory.argument_size_in_bytes / 2**20:.0f} MiB, "
        f"temporary {memory.temp_size_in_bytes / 2**20:.0f} MiB; "
        f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB"
    )
