"""Throughput of the input pipeline of a config, compared with what its train step consumes."""

import itertools
import time
from collections.abc import Sequence

import numpy as np

from jaxformer.bench.train import TrainBench
from jaxformer.config import (
    OBJECTIVE_CONFIGS,
    DataConfig,
    MemorySource,
    ModelConfig,
    ObjectiveConfig,
    PoolerConfig,
    RunConfig,
    SentencePieceTokenizer,
    Source,
    StdlibSource,
    WordsTokenizer,
    apply_overrides,
    load_run_file,
)
from jaxformer.data import PackedSet, build_set, make_loader, make_tokenizer, open_source, open_split
from jaxformer.errors import UserError
from jaxformer.models.bert import bert
from jaxformer.models.llama import llama
from jaxformer.models.vaswani import vaswani
from jaxformer.models.word2vec import word2vec
from jaxformer.objectives import make_objective

NUM_BATCHES = 200
LENGTH, VOCAB_SIZE = 256, 2048
SHAPE = {"num_layers": 4, "embed_dim": 128, "num_heads": 4, "mlp_dim": 384, "vocab_size": VOCAB_SIZE}


def bench_data(
    config_file: str | None, overrides: Sequence[str], repeats: int, objective_kind: str | None = None
) -> str:
    """Measure batches per second of the loader and of the train step.

    Args:
      objective_kind: without a config, an objective to measure with a small model on Python's standard library.
    """
    config = apply_overrides(_find_config(config_file, objective_kind), overrides)
    started = time.perf_counter()
    tokenizer = make_tokenizer(config, open_split(config.data, "train"))
    objective = make_objective(config, tokenizer)
    packed = build_set(config.data, objective, "train")
    built = time.perf_counter() - started
    loader = make_loader(config, packed, objective)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens = sum(float((batch.tokens.segments > 0).sum()) for batch in loader.iterate(0, NUM_BATCHES))
        seconds.append(time.perf_counter() - started)
    batches = NUM_BATCHES / min(seconds)
    bench = TrainBench(config)
    bench.step()
    steps = 1 / min(bench.step() for _ in range(repeats))
    return (
        f"input ({objective.kind}): best {batches:,.0f} batches/s, {tokens / min(seconds):,.0f} tokens/s of {repeats} "
        f"runs over {NUM_BATCHES} batches; training takes {steps:.1f} batches/s, a ratio of {batches / steps:.0f}; "
        f"building the tokenizer, tokenising and packing {packed.num_tokens:,} tokens took {built:.1f} s; rows are "
        f"{filled_share(packed):.1%} full"
    )


def filled_share(packed: PackedSet) -> float:
    """The fraction of the positions of all rows, on all sides, that hold a token."""
    rows = packed.rows(range(len(packed)))
    segments = [rows[side.segments] for side in packed.layout.sides]
    return sum(np.count_nonzero(each) for each in segments) / sum(each.size for each in segments)


def _find_config(config_file: str | None, objective_kind: str | None) -> RunConfig:
    if (config_file is None) == (objective_kind is None):
        raise UserError(
            "bench data needs either a config, such as --config configs/quickstart.py, or --objective with one of "
            f"{', '.join(kinds())}"
        )
    return load_run_file(config_file) if config_file else objective_config(objective_kind)


def kinds() -> list[str]:
    return [config.model_fields["kind"].default for config in OBJECTIVE_CONFIGS]


# ---------------------------------------------------------------- a small config for every objective
def objective_config(kind: str) -> RunConfig:
    """A small model with batches of 8 x 256 tokens of Python's standard library."""
    if kind not in kinds():
        raise UserError(f"--objective {kind}: unknown; there are: {', '.join(kinds())}")
    config = next(each for each in OBJECTIVE_CONFIGS if each.model_fields["kind"].default == kind)
    needs_source = "input_length" in config.model_fields
    objective = config(input_length=LENGTH) if needs_source else config()
    data = DataConfig(
        train=_source(objective),
        tokenizer=WordsTokenizer() if kind == "word2vec" else SentencePieceTokenizer(train_bytes=500_000),
        objective=objective,
        length=LENGTH,
    )
    return RunConfig(model=_model(objective), data=data)


def _model(objective: ObjectiveConfig) -> ModelConfig:
    if "encoder-decoder" in objective.shapes and objective.head == "vocabulary":
        return vaswani(**SHAPE)
    if "embedding-only" in objective.shapes:
        return word2vec(vocab_size=VOCAB_SIZE, embed_dim=SHAPE["embed_dim"])
    if "encoder-only" not in objective.shapes:
        return llama(**SHAPE).replace(prefix=objective.has_prefix)
    model = bert(**SHAPE)
    if objective.head == "vocabulary":
        return model
    pooler = PoolerConfig(num_classes=2, labels=("no", "yes"), pooling="none" if objective.head == "tags" else "first")
    return model.replace(head=None, pooler=pooler)


def _source(objective: ObjectiveConfig) -> Source:
    """Files of the standard library, as pairs of lines or with made-up labels if the objective needs them."""
    if objective.head == "vocabulary" and objective.kind != "seq2seq":
        return StdlibSource()
    texts = (document["text"] for document in open_source(StdlibSource()))
    lines = [line for line in itertools.chain.from_iterable(text.split("\n") for text in texts) if line.strip()][
        :20_000
    ]
    if objective.kind == "seq2seq":
        return MemorySource(pairs=tuple(itertools.pairwise(lines)))
    if objective.head == "classes":
        return MemorySource(examples=tuple({"text": line, "label": _label(line)} for line in lines))
    words = (line.split() for line in lines)
    return MemorySource(examples=tuple({"text": each, "tags": [_label(word) for word in each]} for each in words))


def _label(text: str) -> str:
    return "yes" if "(" in text else "no"
