"""A config for every objective, with tiny shapes."""

import pytest

from jaxformer.config import (
    ByteTokenizer,
    Causal,
    Classify,
    DataConfig,
    Infill,
    Masked,
    MemorySource,
    ModelConfig,
    ObjectiveConfig,
    PoolerConfig,
    Prefix,
    RunConfig,
    Seq2Seq,
    Span,
    Tag,
    Ul2,
    Word2Vec,
    WordsTokenizer,
)
from jaxformer.data import make_tokenizer, open_split
from jaxformer.models.bert import bert
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani
from jaxformer.models.word2vec import word2vec
from jaxformer.objectives import OBJECTIVES, make_objective

SHAPE = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "vocab_size": 400}
DOCUMENTS = tuple(f"text {i}. And more!" * (i % 5 + 1) for i in range(20))
PAIRS = tuple((f"in {i}", str(i)) for i in range(20))
LABELLED = tuple({"text": f"text {i}", "label": "ab"[i % 2]} for i in range(20))
TAGGED = tuple({"text": [f"w{i}"] * (i % 4 + 1), "tags": ["O", "B-x"] * (i % 4 + 1)} for i in range(20))
TAGGED = tuple({"text": each["text"], "tags": each["tags"][: len(each["text"])]} for each in TAGGED)


def encoder(**pooler) -> ModelConfig:
    model = bert(**SHAPE, mlp_dim=8)
    return model.replace(head=None, pooler=PoolerConfig(**pooler)) if pooler else model


def _text_case(model: ModelConfig, objective: type[ObjectiveConfig], **fixed):
    return lambda **options: (model, MemorySource(documents=DOCUMENTS), objective(**fixed, **options))


_SEQ2SEQ = vaswani(**SHAPE, mlp_dim=8)
CASES = {
    "causal": _text_case(gpt2(**SHAPE), Causal),
    "prefix": lambda fields="text", **options: (
        gpt2(**SHAPE).replace(prefix=True),
        MemorySource(documents=DOCUMENTS) if fields == "text" else MemorySource(pairs=PAIRS),
        Prefix(fields=fields, **options),
    ),
    "masked": _text_case(encoder(), Masked),
    "span": _text_case(_SEQ2SEQ, Span, input_length=32),
    "ul2": _text_case(_SEQ2SEQ, Ul2, input_length=32),
    "infill": _text_case(_SEQ2SEQ, Infill, input_length=32),
    "word2vec": _text_case(word2vec(vocab_size=60, embed_dim=8), Word2Vec, window=2, num_negatives=3, subsample=0.0),
    "seq2seq": lambda: (_SEQ2SEQ, MemorySource(pairs=PAIRS), Seq2Seq(input_length=16)),
    "classify": lambda: (
        encoder(num_classes=2, labels=("a", "b")),
        MemorySource(examples=LABELLED),
        Classify(),
    ),
    "tag": lambda: (
        encoder(num_classes=2, labels=("O", "B-x"), pooling="none"),
        MemorySource(examples=TAGGED),
        Tag(),
    ),
}


def make_config(kind: str, **options) -> RunConfig:
    """A run config of an objective; `options` are keys of the objective."""
    model, source, objective = CASES[kind](**options)
    tokenizer = WordsTokenizer(min_count=1) if kind == "word2vec" else ByteTokenizer()
    data = DataConfig(train=source, tokenizer=tokenizer, objective=objective, length=24, batch_size=8)
    return RunConfig(model=model, data=data)


@pytest.fixture(scope="session")
def config_for():
    return make_config


@pytest.fixture(scope="session")
def objective_for():
    """A function that makes an objective; `options` are keys of its config."""

    def make(kind: str, **options):
        config = make_config(kind, **options)
        return make_objective(config, make_tokenizer(config, open_split(config.data, "train")))

    return make


@pytest.fixture(params=sorted(OBJECTIVES))
def config(request) -> RunConfig:
    return make_config(request.param)


@pytest.fixture
def objective(config):
    return make_objective(config, make_tokenizer(config, open_split(config.data, "train")))
