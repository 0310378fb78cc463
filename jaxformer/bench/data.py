"""Throughput of the input pipeline of a config."""

import statistics
import time
from collections.abc import Sequence

from jaxformer.config import load_run_file
from jaxformer.data import build_set, make_loader, make_tokenizer, open_split
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective


def bench_data(config_file: str | None, overrides: Sequence[str], repeats: int) -> str:
    if config_file is None:
        raise UserError("bench data needs a config: add, for example, --config configs/quickstart.py")
    config = load_run_file(config_file, overrides)
    started = time.perf_counter()
    tokenizer = make_tokenizer(config, open_split(config.data, "train"))
    objective = make_objective(config, tokenizer)
    packed = build_set(config.data, objective, "train")
    built = time.perf_counter() - started
    loader, num_batches = make_loader(config, packed, objective), 200
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens = sum(float(batch.weights.sum()) for batch in loader.iterate(0, num_batches))
        rates.append(tokens / (time.perf_counter() - started))
    return (
        f"input: best {max(rates):,.0f} tokens/s, median {statistics.median(rates):,.0f} of {repeats} runs over "
        f"{num_batches} batches; building the tokenizer, tokenising and packing {packed.num_tokens:,} tokens took "
        f"{built:.1f} s"
    )
