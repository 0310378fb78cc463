"""The train program: model, optimizer, shardings and jitted functions of a config for a list of devices.

The devices may be attached, simulated, or exist only as a topology description: they are passed in, and building a
program never asks JAX for local devices. The training loop, `show`, `bench` and ahead-of-time compilation all use it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxformer.checkpoint import abstract_like
from jaxformer.config import RunConfig
from jaxformer.layers import Transformer, abstract_params, init_params
from jaxformer.layers.partition import Partition, whole_leaf
from jaxformer.objectives import OBJECTIVES
from jaxformer.ops.losses import LossOptions, auto_chunks, auto_vocab_chunks
from jaxformer.ops.sharded import fsdp_of
from jaxformer.ops.vocab_loss import VOCAB_AXIS
from jaxformer.run import make_runtime
from jaxformer.sharding import batch_sharding, batch_ways, check_batch, make_mesh, param_shardings, param_specs
from jaxformer.train.optim import make_optimizer
from jaxformer.train.state import TrainState, init_state, state_shardings
from jaxformer.train.step import StepParts, train_step
from jaxformer.typing import Batch, Params, PyTree, abstract_batch


@dataclass(frozen=True)
class TrainProgram:
    """The train step of a config on a mesh of devices; `init`, `start` and `step` are jitted."""

    config: RunConfig
    mesh: Mesh | AbstractMesh
    parts: StepParts
    abstract_state: TrainState
    """Shapes, dtypes and shardings of the state."""
    init: Callable[[], TrainState]
    """Creates the state with random parameters; depends only on the seed."""
    start: Callable[[Params], TrainState]
    """Creates the state with given parameters, which are donated."""
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    """One update; the state passed in is donated."""

    @property
    def model(self) -> Transformer:
        return self.parts.model

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return self.parts.optimizer

    @property
    def shardings(self) -> TrainState:
        """A NamedSharding for every leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def abstract_params(self) -> PyTree:
        """Shapes, dtypes and shardings of all parameters, trainable and frozen."""
        shapes, axes = abstract_params(self.config.model)
        return abstract_like(shapes, param_shardings(axes, shapes, self.mesh))

    @property
    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a global batch."""
        sharding = batch_sharding(self.mesh)
        batch = abstract_batch(self.config.batch_layout, self.config.data.batch_size)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), batch)

    def trace(self, batch: Batch | None = None) -> jax.stages.Traced:
        """The step traced for the devices of the program, without allocating arrays."""
        with jax.set_mesh(self.mesh):
            return self.step.trace(self.abstract_state, self.abstract_batch if batch is None else batch)

    def lower(self, batch: Batch | None = None) -> jax.stages.Lowered:
        """The step lowered for the devices of the program, without allocating arrays."""
        with jax.set_mesh(self.mesh):
            return self.trace(batch).lower()

    def inference_params(self, state: TrainState) -> Params:
        """All parameters for evaluation and decoding: the moving average if the run keeps one."""
        return self.parts.partition.merge(state.params if state.ema is None else state.ema, state.frozen)


def train_program(config: RunConfig, devices: Sequence[Any]) -> TrainProgram:
    """The program of a config on these devices, which may come from a topology description."""
    check_batch(config, len(devices))
    return program_on_mesh(config, make_mesh(config.mesh, devices), devices[0].platform)


def program_on_mesh(config: RunConfig, mesh: Mesh | AbstractMesh, platform: str) -> TrainProgram:
    """The program on a given mesh; on an abstract mesh, only its shapes and shardings are usable."""
    partition = Partition(config.model, config.train.freeze)
    shapes, axes = abstract_params(config.model)
    optimizer = make_optimizer(config.optim, config.train.steps, partition.split(axes, take=whole_leaf)[0])
    parts = StepParts(
        config=config,
        model=Transformer(config.model, make_runtime(config.train, platform)),
        objective=OBJECTIVES[config.data.objective.kind],
        options=loss_options(config, mesh),
        optimizer=optimizer,
        partition=partition,
        mesh=mesh,
        axes=axes,
        specs=partition.split(param_specs(axes, shapes, mesh), take=whole_leaf),
        fsdp=fsdp_of(mesh, platform, config.train.remat),
    )

    def start(params: Params) -> TrainState:
        return init_state(config, params, optimizer, partition)

    def init() -> TrainState:
        return start(init_params(config.model, jax.random.split(jax.random.key(config.seed))[0]))

    abstract = jax.eval_shape(init)
    shardings = state_shardings(config, abstract, partition, mesh)
    return TrainProgram(
        config=config,
        mesh=mesh,
        parts=parts,
        abstract_state=abstract_like(abstract, shardings),
        init=jax.jit(init, out_shardings=shardings),
        start=jax.jit(start, out_shardings=shardings, donate_argnums=0),
        step=jax.jit(partial(train_step, parts=parts), donate_argnums=0, out_shardings=(shardings, None)),
    )


def loss_options(config: RunConfig, mesh: Mesh | AbstractMesh) -> LossOptions:
    """Options of the training loss; `train.loss_chunks=auto` is resolved by the number of rows on one device."""
    chunks = vocab_chunks = config.train.loss_chunks
    if chunks == "auto":
        rows = config.data.batch_size // config.train.accumulate // batch_ways(mesh.shape)
        length, vocab_size = config.batch_layout.loss_length, config.model.vocab_size
        chunks = auto_chunks(rows, length, vocab_size)
        vocab_chunks = auto_vocab_chunks(rows * length, vocab_size // mesh.shape[VOCAB_AXIS])
    return LossOptions(config.train.label_smoothing, config.train.z_loss, chunks, vocab_chunks)
