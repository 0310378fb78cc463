"""Speed of generation: tokens per second, the memory bandwidth limit, time to first token, compile time."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, RunConfig
from jaxformer.decode.api import generate, search
from jaxformer.errors import UserError
from jaxformer.layers import Transformer, init_params
from jaxformer.models import preset
from jaxformer.run import Run, make_runtime, quantized_run

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Case:
    """One benchmark. The weights are random, and there is no eos, so that every output has `new` tokens."""

    preset: str = "gpt2-124m"
    batch: int = 1
    prompt: int = 32
    new: int = 64
    beams: int = 1
    weights: str | None = None

    def __str__(self) -> str:
        how = "greedy" if self.beams == 1 else f"beam {self.beams}"
        size = f"batch {self.batch}, {self.prompt} + {self.new} tokens"
        return f"{self.preset}, {self.weights or 'float32'}, {how}, {size}"


DEFAULTS = (
    Case(),
    Case(batch=8),
    Case(weights="int8"),
    *(
        Case("marian-opus-en-de", batch, prompt=20, new=24, beams=beams)
        for beams, batch in ((1, 1), (1, 32), (4, 1), (4, 32))
    ),
)


class DecodeBench:
    """A model with random weights and the prompts of a case; the constructor compiles all programs."""

    def __init__(self, case: Case, run: Run | None = None) -> None:
        self.case = case
        self.run = random_run(case) if run is None else run
        rng, vocab_size = np.random.default_rng(0), self.run.config.model.encoder_vocab_size
        self.prompts = rng.integers(3, vocab_size - 1, (case.batch, case.prompt)).tolist()
        with _compilations() as compiled:
            self.first_token()
            self.generate()
        self.compile_seconds, self.num_programs = sum(compiled), len(compiled)

    def generate(self) -> float:
        """Seconds from the prompts to the last token."""
        return self._measure(self.case.new)

    def first_token(self) -> float:
        """Seconds from the prompts to the first token of each."""
        return self._measure(1)

    def _measure(self, new: int) -> float:
        started = time.perf_counter()
        if self.case.beams == 1:
            outputs = generate(self.run, self.prompts, new, batch_size=self.case.batch)
        else:
            rows = self.case.batch * self.case.beams
            results = search(self.run, self.prompts, new, num_beams=self.case.beams, batch_size=rows)
            outputs = [hypotheses[0].output for hypotheses in results]
        seconds = time.perf_counter() - started
        assert all(len(output) == new for output in outputs)
        return seconds

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a token step reads: the decoder's weights, and its KV caches after half of the new tokens."""
        model, params = self.run.decoding_alone if self.case.batch * self.case.beams == 1 else self.run.decoding
        table = params["embedding"]["tokens"] if model.config.head.tied else ()
        weights = _nbytes((params["decoder"], params.get("head"), table))
        attention, rows = model.config.decoder.block(0).attention, self.case.batch * self.case.beams
        vector = attention.kv_heads * attention.head_dim * jnp.dtype(model.runtime.dtype).itemsize * 2
        self_attention = rows * (self.case.new / 2 + (0 if model.config.encoder else self.case.prompt)) * vector
        cross_attention = self.case.batch * self.case.prompt * vector if model.config.encoder else 0
        return int(weights + model.config.decoder.num_layers * (self_attention + cross_attention))


def random_run(case: Case) -> Run:
    """A preset with random weights and without eos."""
    model = without_eos(preset(case.preset))
    params = jax.jit(lambda: init_params(model, jax.random.key(0)))()
    config = RunConfig(model=model)
    runtime = replace(make_runtime(config.train, jax.default_backend()), dtype=jnp.float32)
    run = Run(config, Transformer(model, runtime), params, None, 0)
    return run if case.weights is None else quantized_run(run, case.weights)


def without_eos(model: ModelConfig) -> ModelConfig:
    special = model.special.model_copy(update={"eos": (), "bos": 0, "decoder_start": 0})
    return model.model_copy(update={"special": special})


def copy_bandwidth(num_bytes: int = 2**28, repeats: int = 7) -> float:
    """Bytes read and written per second by a copy; on a CPU the faster of one thread and one thread per core."""
    if jax.default_backend() != "cpu":
        source = jnp.ones(num_bytes // 4)
        return 2 * num_bytes / min(_seconds(lambda: jnp.copy(source).block_until_ready()) for _ in range(repeats))
    source, target = np.ones(num_bytes // 4, np.float32), np.zeros(num_bytes // 4, np.float32)

    def copy(num_threads: int) -> None:
        parts = zip(np.array_split(target, num_threads), np.array_split(source, num_threads), strict=True)
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda part: np.copyto(*part), parts))

    return 2 * num_bytes / min(_seconds(lambda n=n: copy(n)) for n in (1, os.cpu_count() or 1) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bench_decode(case: Case | None, repeats: int) -> Iterator[str]:
    """Yield one line of results per case."""
    for each in DEFAULTS if case is None else (case,):
        if each.batch < 1 or each.prompt < 1 or each.new < 2:
            raise UserError(f"bench decode: {each}: needs --batch and --prompt of at least 1 and --new of at least 2")
        if getattr(preset(each.preset).decoder, "kind", None) in (None, "recurrent"):
            raise UserError(f"--preset {each.preset}: has no decoder with attention; use a transformer with a decoder")
        yield _line(DecodeBench(each), repeats)


def _line(bench: DecodeBench, repeats: int) -> str:
    case, bandwidth = bench.case, copy_bandwidth()
    whole, first = ([run() for _ in range(repeats)] for run in (bench.generate, bench.first_token))
    bandwidth = max(bandwidth, copy_bandwidth())
    step = (min(whole) - min(first)) / (case.new - 1)
    limit = bench.bytes_per_step / bandwidth
    best, median = (case.batch * case.new / seconds for seconds in (min(whole), statistics.median(whole)))
    return (
        f"{case}: {best:,.0f} tokens/s (median {median:,.0f} of {repeats}); {step * 1e3:.1f} ms per step, "
        f"memory bandwidth limit {limit * 1e3:.1f} ms ({bench.bytes_per_step / 1e6:.0f} MB at "
        f"{bandwidth / 1e9:.1f} GB/s), {limit / step:.0%} reached; time to first token {min(first) * 1e3:.0f} ms; "
        f"{bench.num_programs} programs compiled in {bench.compile_seconds:.1f} s"
    )


def _nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@contextmanager
def _compilations() -> Iterator[list[float]]:
    """Collect the seconds of every compilation in the block."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
