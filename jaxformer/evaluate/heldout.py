"""The held-out set that metrics are computed on: the loss of its batches, and its examples before tokenisation."""

from collections.abc import Iterator
from functools import partial

import jax
from jax.sharding import Mesh

from jaxformer.config import RunConfig
from jaxformer.data import Documents, Loader, PackedSet, open_split
from jaxformer.layers import Transformer
from jaxformer.objectives import OBJECTIVES
from jaxformer.ops.losses import LossOptions, LossSums, auto_chunks
from jaxformer.run import Run
from jaxformer.sharding import batch_ways, global_batch
from jaxformer.typing import Batch, Params


class HeldOut:
    """The held-out set of a run."""

    def __init__(self, config: RunConfig, loader: Loader, mesh: Mesh) -> None:
        self.config, self.loader, self.mesh = config, loader, mesh
        loss = OBJECTIVES[config.data.objective.kind].loss
        rows = loader.num_rows * loader.num_hosts // batch_ways(mesh.shape)
        # The loss without label smoothing and z-loss, computed in chunks as in training.
        options = LossOptions(num_chunks=auto_chunks(rows, config.batch_layout.loss_length, config.model.vocab_size))
        self._step = jax.jit(partial(_loss_sums, loss=loss, options=options), static_argnames="model")

    @property
    def packed_set(self) -> PackedSet:
        return self.loader.packed_set

    def documents(self) -> Documents:
        """The examples before tokenisation."""
        return open_split(self.config.data, "heldout")

    def losses(self, run: Run, max_batches: int | None = None) -> Iterator[LossSums]:
        """Yield the loss sums of each batch as device arrays: fetching each one right away would stall the devices."""
        num_batches = min(self.loader.num_batches, max_batches or self.loader.num_batches)
        with jax.set_mesh(self.mesh):
            for batch in self.loader.iterate(0, num_batches):
                yield self._step(run.params, global_batch(batch, self.mesh), model=run.model)


def _loss_sums(params: Params, batch: Batch, *, model: Transformer, loss, options: LossOptions) -> LossSums:
    return loss(model, params, batch, options)[0]
