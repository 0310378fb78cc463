"""Golden values of one AdamW step from a fixed initialisation, for a small model of every family."""

from inspect import isfunction

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxformer.config import (
    AttentionConfig,
    BandScaling,
    BlockConfig,
    BucketBias,
    HeadConfig,
    InitConfig,
    Learned,
    ModelConfig,
    NormalInit,
    OptimConfig,
    RecurrentConfig,
    RunConfig,
    SpecialIds,
    StackConfig,
    TrainConfig,
)
from jaxformer.config.base import Config
from jaxformer.data.packing import packed_tokens
from jaxformer.layers import Transformer, abstract_params, init_params
from jaxformer.layers.partition import Partition
from jaxformer.models import FAMILIES, preset
from jaxformer.objectives import Causal
from jaxformer.ops.losses import LossOptions
from jaxformer.sharding import make_mesh
from jaxformer.train.optim import make_optimizer
from jaxformer.train.state import init_state
from jaxformer.train.step import StepParts, train_step
from jaxformer.typing import Batch, Tokens

# Loss and gradient norm before the step, parameter norm after it.
GOLDEN = {
    "bart-base": (4.526236, 1.838771, 25.30457),
    "bert-base": (4.383286, 4.164862, 17.34917),
    "distilbert-base": (4.453874, 3.879386, 17.32299),
    "gemma2-2b": (4.361953, 4.514957, 19.0635),
    "gpt2-124m": (4.567339, 2.793553, 15.61329),
    "llama3.1-8b": (4.092459, 2.805588, 16.40382),
    "marian-opus-en-de": (4.641335, 2.077438, 23.79324),
    "minilm-l6": (4.424617, 3.568566, 16.88715),
    "mistral-7b": (4.115557, 2.939199, 16.41606),
    "mixtral-8x7b": (4.291838, 2.560766, 21.85587),
    "modernbert-base": (3.988107, 3.201122, 23.50854),
    "mt5-small": (4.768886, 6.74381, 32.51263),
    "qwen3-30b-a3b": (4.217133, 2.806687, 23.63451),
    "rnn-lstm-small": (4.108244, 0.1971701, 21.67794),
    "roberta-base": (4.255653, 3.437237, 17.36467),
    "smollm2-135m": (4.442639, 2.492572, 15.20168),
    "t5-small": (4.170823, 0.5158972, 26.53197),
    "vaswani-base": (4.595199, 2.221924, 27.1026),
}
# A decoder, and the families that are not in transformers; the others are slow tests. test_gradient_parity.py compares
# the gradients of most others with torch.
ALWAYS = {"gpt2-124m", "rnn-lstm-small", "vaswani-base"}
MODULES = {module.__name__ for module in FAMILIES.values()}
ROWS, LENGTH, SOURCE_LENGTH = 4, 12, 10
OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1, clip_norm=1.0, schedule={"kind": "constant"})
# Optimised and unoptimised programs, and different processors, differ by about 1e-6.
TOLERANCE = 1e-5


# ---------------------------------------------------------------- small versions of presets
def shrink(model: ModelConfig) -> ModelConfig:
    """The same architecture with small sizes; a model without a head gets one, so that it has a loss."""
    sizes = {"vocab_size": 61, "embed_dim": 16, "context_length": 32, "special": SpecialIds()}
    position = model.embedding.position
    if isinstance(position, Learned):
        sizes["embedding"] = _with(model.embedding, position=_with(position, max_length=32))
    stacks = {side: _stack(getattr(model, side), model.embed_dim) for side in ("encoder", "decoder")}
    return _with(model, **sizes, **stacks, head=model.head or HeadConfig(), init=_init(model.init))


def _stack(stack: StackConfig | RecurrentConfig | None, embed_dim: int) -> StackConfig | RecurrentConfig | None:
    if stack is None:
        return None
    if isinstance(stack, RecurrentConfig):
        return _with(stack, num_layers=2, dim=24)
    first, pattern = (tuple(_block(b, embed_dim) for b in blocks) for blocks in (stack.first, stack.pattern))
    bias = stack.relative_bias and BucketBias(num_buckets=8, max_distance=10)
    # One layer more than the pattern, so that the pattern repeats.
    return _with(stack, num_layers=len((*first, *pattern)) + 1, first=first, pattern=pattern, relative_bias=bias)


def _block(block: BlockConfig, embed_dim: int) -> BlockConfig:
    mlp = {"dim": 24} | ({"num_experts": 4, "top_k": 2} if block.mlp.kind == "moe" else {})
    cross = block.cross_attention and _attention(block.cross_attention, embed_dim)
    attention = _attention(block.attention, embed_dim)
    return _with(block, attention=attention, cross_attention=cross, mlp=_with(block.mlp, **mlp))


def _attention(attention: AttentionConfig, embed_dim: int) -> AttentionConfig:
    """Four heads and 1, 2 or 4 key-value heads, as multi-query, grouped-query or multi-head attention has."""
    kv_heads = {1: 1, attention.num_heads: 4}.get(attention.kv_heads, 2)
    wide = attention.num_heads * attention.head_dim != embed_dim
    position = attention.position
    if isinstance(getattr(position, "scaling", None), BandScaling):
        position = _with(position, scaling=_with(position.scaling, original_length=8))
    return _with(
        attention,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=8 if wide else 4,
        window=attention.window and 5,
        position=position,
    )


def _init(init: InitConfig) -> InitConfig:
    """Replace fixed standard deviations, which suit wide models and would leave outputs of a small one near zero."""
    inits = {name: getattr(init, name) for name in ("kernel", "embedding")}
    larger = {name: NormalInit(stddev=0.2) for name, each in inits.items() if isinstance(each, NormalInit)}
    return _with(init, **larger)


def _with(config: Config, **fields) -> Config:
    """A copy with these fields changed, validated unlike `model_copy`."""
    return type(config)(**{name: getattr(config, name) for name in type(config).model_fields} | fields)


# ---------------------------------------------------------------- one step
def make_batch(model: ModelConfig) -> Batch:
    """Rows of two packed texts and padding; an encoder predicts a fifth of its tokens, a decoder every next token."""
    rng = np.random.default_rng(0)
    tokens = _random_tokens(rng, model.vocab_size, LENGTH)
    real = tokens.segments > 0
    if model.decoder is None:
        targets, weights = tokens.ids.copy(), real & (rng.random(real.shape) < 0.2)
        tokens.ids[weights] = 3  # used as the mask id
    else:
        targets, weights = np.roll(tokens.ids, -1, axis=1), real
    source = None
    if model.shape == "encoder-decoder":
        source = _random_tokens(rng, model.vocab_size, SOURCE_LENGTH)
    return Batch(tokens, targets, weights.astype(np.float32), source)


def _random_tokens(rng: np.random.Generator, vocab_size: int, length: int) -> Tokens:
    cut, end = rng.integers(3, length // 2, (ROWS, 1)), rng.integers(length // 2 + 1, length + 1, (ROWS, 1))
    index = np.broadcast_to(np.arange(length), (ROWS, length))
    segments = np.where(index < cut, 1, np.where(index < end, 2, 0)).astype(np.int32)
    return packed_tokens(rng.integers(4, vocab_size, (ROWS, length)).astype(np.int32), segments)


def one_step(model: ModelConfig) -> tuple[float, float, float]:
    config = RunConfig(model=model, optim=OPTIM, train=TrainConfig(steps=10, loss_chunks=1))
    shapes, axes = abstract_params(model)
    optimizer = make_optimizer(config.optim, config.train.steps, axes)
    partition, batch = Partition(model, ()), make_batch(model)
    parts = StepParts(
        config=config,
        model=Transformer(model),
        objective=Causal,
        options=LossOptions(),
        optimizer=optimizer,
        partition=partition,
        mesh=make_mesh(config.mesh, jax.devices()[:1]),
        axes=axes,
        specs=(jax.tree.map(lambda _: PartitionSpec(), shapes), None),
        fsdp=None,
    )

    @jax.jit
    def run():
        params = init_params(model, jax.random.split(jax.random.key(config.seed))[0])
        return train_step(init_state(config, params, optimizer, partition), batch, parts=parts)[1]

    metrics = run()
    return tuple(float(metrics[name]) for name in ("loss", "grad_norm", "param_norm"))


def test_every_family_with_its_own_builder_has_golden_values():
    """A family that only passes options to the builder of another family needs none."""
    for module in FAMILIES.values():
        functions = (value for value in vars(module).values() if isfunction(value))
        builders = {function.__module__ for function in functions if function.__module__ in MODULES}
        shares_builder = bool(builders - {module.__name__})
        presets = {name for row in module.ZOO_ROWS for name in row.presets}
        assert shares_builder or presets & set(GOLDEN), module.__name__


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in GOLDEN]
)
def test_one_step_gives_the_golden_values(name):
    values = one_step(shrink(preset(name)))
    row = f'"{name}": ({", ".join(f"{value:.7g}" for value in values)}),'
    advice = (
        "Loss, gradient norm and parameter norm of one step have changed. If the computation, the initial values or "
        f"the preset changed on purpose, say so in the commit and put this row into GOLDEN:\n{row}\n"
        "For all new rows: pytest -n 0 tests/zoo/test_golden.py | sed -n 's/^E  *\\(\".*),\\)$/    \\1/p'"
    )
    np.testing.assert_allclose(values, GOLDEN[name], rtol=TOLERANCE, err_msg=advice)
