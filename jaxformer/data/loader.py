"""Batches by step: the global batch of a step is a pure function of (set, seed, step).

It does not depend on the number of hosts, on worker processes or on restarts, so the step is the only state a
checkpoint needs. Host i of n holds rows [i * B / n, (i + 1) * B / n) of each batch of B. Corruption keeps this: the
random numbers of a row are seeded by (seed, step, global row).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import grain
import numpy as np
from absl import flags

from jaxformer.config import RunConfig
from jaxformer.data.packing import Objective
from jaxformer.data.sets import PackedSet
from jaxformer.errors import UserError
from jaxformer.typing import Batch


@dataclass(frozen=True)
class Loader:
    """One host's share of every batch."""

    packed_set: PackedSet
    objective: Objective
    batch_size: int
    host: int
    num_hosts: int
    seed: int
    shuffle: bool
    """Shuffle anew every epoch, to train; else read every row once in order, to evaluate."""
    workers: int
    prefetch: int
    row_multiple: int = 1
    """Add empty rows up to a multiple of this: a batch of any size may then be split over devices."""

    @property
    def num_rows(self) -> int:
        """Rows of this host's share of a batch, empty ones included."""
        return -(-(self.batch_size // self.num_hosts) // self.row_multiple) * self.row_multiple

    @property
    def num_batches(self) -> int:
        """Batches that show every row once; the last may be short of rows."""
        return -(-len(self.packed_set) // self.batch_size)

    def batch(self, step: int) -> Batch:
        """This host's rows of the step's global batch."""
        share = self.batch_size // self.num_hosts
        first = self.host * share
        start = step * self.batch_size + first
        rows = self.packed_set.rows(self._indices(np.arange(start, start + share)), size=self.num_rows)
        if self.shuffle:
            return self.objective.batch(rows, lambda row: row_generator(self.seed, step, first + row))
        # Held-out rows are corrupted alike at every evaluation: always step 0, by their index in the set.
        return self.objective.batch(rows, lambda row: row_generator(self.seed, 0, start + row))

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of steps `start` to `stop - 1`, made ahead of their use."""
        if stop <= start:
            return
        steps = grain.MapDataset.range(start, stop).map(self.batch)
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self.prefetch)
        batches = steps.to_iter_dataset(ahead)
        iterator = iter(_in_workers(batches, self.workers, self.prefetch) if self.workers else batches)
        try:
            yield from iterator
        finally:
            iterator.close()

    def _indices(self, places: np.ndarray) -> np.ndarray:
        """Rows at these places of the endless, or for evaluation the single, pass over the set."""
        num_rows = len(self.packed_set)
        if not self.shuffle:
            return places[places < num_rows]
        epochs, places = np.divmod(places, num_rows)
        indices = np.empty_like(places)
        # A batch that crosses the end of an epoch takes the rest of its rows from the next one's order.
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = _order(num_rows, self.seed, epoch)[places[here]]
        return indices


def make_loader(
    cfg: RunConfig,
    packed_set: PackedSet,
    objective: Objective,
    *,
    host: int = 0,
    num_hosts: int = 1,
    train: bool = True,
    row_multiple: int = 1,
) -> Loader:
    """Batches of a set for one host: shuffled anew every epoch to train, every row once in order to evaluate."""
    if cfg.data.batch_size % num_hosts:
        raise UserError(
            f"data.batch_size={cfg.data.batch_size} is not a multiple of the {num_hosts} hosts: "
            "every host holds the same number of rows"
        )
    return Loader(
        packed_set=packed_set,
        objective=objective,
        batch_size=cfg.data.batch_size,
        host=host,
        num_hosts=num_hosts,
        seed=cfg.seed,
        shuffle=train,
        workers=cfg.data.workers,
        prefetch=cfg.data.prefetch,
        row_multiple=row_multiple,
    )


def row_generator(seed: int, step: int, row: int) -> np.random.RandomState:
    """The random numbers that corrupt one row of a global batch."""
    # A counter-based generator is ready at once for any (step, row). NumPy froze the stream of RandomState, so an
    # upgrade in the middle of a run changes no batch.
    return np.random.RandomState(np.random.Philox(key=seed, counter=[0, 0, step, row]))


def _in_workers(batches: grain.IterDataset, workers: int, prefetch: int) -> grain.IterDataset:
    """The same batches made in processes; a set in memory is copied to each, a prepared one only opened there."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which only absl programs parse
    per_worker = max(1, prefetch // workers)
    return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=per_worker))


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in one epoch."""
    # NumPy froze the stream of RandomState, so an upgrade in the middle of a run changes no batch. Grain's own
    # shuffle needs milliseconds per index when a set has only a few rows.
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_rows)
