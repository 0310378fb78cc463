"""The held-out set that metrics are computed on: losses and predictions of its batches, and its examples."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config import RunConfig
from jaxformer.data import Documents, Loader, PackedSet, open_split
from jaxformer.layers import Transformer, abstract_params
from jaxformer.objectives import OBJECTIVES
from jaxformer.ops.losses import LossOptions, LossSums, auto_chunks, auto_vocab_chunks, class_loss, cross_entropy
from jaxformer.ops.sharded import fsdp_of, shard_weights
from jaxformer.ops.vocab_loss import VOCAB_AXIS
from jaxformer.ops.weights import is_quantized
from jaxformer.run import Run
from jaxformer.sharding import batch_spec, batch_ways, global_batch, on_devices, param_specs, sum_devices
from jaxformer.typing import Array, Batch, Float, Int, Params


class Predictions(NamedTuple):
    """What a model with a class head predicts for one batch, on every host for the whole batch."""

    logits: Float[Array, "B C"]  # [B, T, C] for tags
    labels: Array  # class ids [B], numbers [B, C], or tags [B, T]
    weights: Float[Array, " B"]  # [B, T] for tags; 0 where there is no label
    segments: Int[Array, "B T"]
    sums: LossSums


class HeldOut:
    """The held-out set of a run."""

    def __init__(self, config: RunConfig, loader: Loader, mesh: Mesh) -> None:
        self.config, self.loader, self.mesh = config, loader, mesh
        self._rows_per_device = loader.num_rows * loader.num_hosts // batch_ways(mesh.shape)
        loss = OBJECTIVES[config.data.objective.kind].loss
        self._loss_step = jax.jit(partial(_loss_sums, loss=loss, mesh=mesh), static_argnames=("model", "options"))
        # Predictions are replicated, because a host can only read arrays that it holds completely.
        replicated = NamedSharding(mesh, PartitionSpec())
        self._prediction_step = jax.jit(_predict, static_argnames="model", out_shardings=replicated)

    @property
    def packed_set(self) -> PackedSet:
        return self.loader.packed_set

    def documents(self) -> Documents:
        """The examples before tokenisation."""
        return open_split(self.config.data, "heldout")

    def losses(self, run: Run, max_batches: int | None = None) -> Iterator[LossSums]:
        """Yield the loss sums of each batch as device arrays: fetching each one right away would stall the devices."""
        return self.batch_losses(run, self._batches(max_batches), self.config.batch_layout.loss_length)

    def batch_losses(self, run: Run, batches: Iterable[Batch], length: int) -> Iterator[LossSums]:
        """Yield the loss sums of other batches, of which each host passes its own rows.

        Args:
          length: number of predicted positions per row.
        """
        # The loss without label smoothing and z-loss, computed in chunks as in training.
        rows, vocab_size = self._rows_per_device, self.config.model.vocab_size
        options = LossOptions(
            num_chunks=auto_chunks(rows, length, vocab_size),
            vocab_chunks=auto_vocab_chunks(rows * length, vocab_size // self.mesh.shape[VOCAB_AXIS]),
        )
        with jax.set_mesh(self.mesh):
            for batch in batches:
                yield self._loss_step(run.params, global_batch(batch, self.mesh), model=run.model, options=options)

    def predictions(self, run: Run, max_batches: int | None = None) -> Iterator[Predictions]:
        """Yield the class logits and the labels of each batch as NumPy arrays."""
        with jax.set_mesh(self.mesh):
            for batch in self._batches(max_batches):
                step = self._prediction_step(run.params, global_batch(batch, self.mesh), model=run.model)
                yield jax.tree.map(np.asarray, step)

    def _batches(self, max_batches: int | None) -> Iterator[Batch]:
        return self.loader.iterate(0, min(self.loader.num_batches, max_batches or self.loader.num_batches))


def mean_losses(sums: Iterable[LossSums]) -> tuple[float, float]:
    """The mean loss in nats and the accuracy over all batches."""
    _, nll, correct, weight = np.sum(jax.device_get(list(sums)), axis=0, dtype=np.float64)
    return float(nll / weight), float(correct / weight)


def _loss_sums(params: Params, batch: Batch, *, model: Transformer, loss, options: LossOptions, mesh: Mesh) -> LossSums:
    if is_quantized(params):  # XLA partitions the products of matrices that are stored in another format
        return loss(model, params, batch, options)[0]
    shapes, axes = abstract_params(model.config)
    fsdp = fsdp_of(mesh, model.runtime.platform, model.runtime.remat)

    def local(params: Params, batch: Batch) -> LossSums:
        return sum_devices(loss(model, shard_weights(params, axes, fsdp), batch, options)[0])

    specs = param_specs(axes, shapes, mesh)
    return on_devices(local, mesh, in_specs=(specs, batch_spec(mesh)), out_specs=PartitionSpec())(params, batch)


def _predict(params: Params, batch: Batch, *, model: Transformer) -> Predictions:
    logits = model.apply({"params": params}, batch.tokens, batch.source, method="pool")
    if batch.labels is None:
        labels, sums = batch.targets, cross_entropy(logits, batch.targets, batch.weights)[0]
    else:
        problem = model.config.pooler.problem
        labels, sums = batch.labels, class_loss(logits, batch.labels, batch.weights, problem)
    return Predictions(logits, labels, batch.weights, batch.tokens.segments, sums)
