"""Batches by step: the global batch of a step is a pure function of (set, seed, step).

It does not depend on the number of hosts, on worker processes or on restarts, so a checkpoint needs only the step to
resume. With batch size B, host i of n loads rows [i * B / n, (i + 1) * B / n) of every batch. Corruption, for example
masking, is deterministic too: its random numbers are seeded by (seed, step, global row).
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
    """Loads one host's rows of every global batch."""

    packed_set: PackedSet
    objective: Objective
    batch_size: int
    host: int
    num_hosts: int
    seed: int
    shuffle: bool
    """True for training: reshuffle the rows in every epoch. False for evaluation: read every row once, in order."""
    workers: int
    prefetch: int
    row_multiple: int = 1
    """Pad with empty rows to a multiple of this, so that a batch of any size can be sharded over the devices."""

    @property
    def num_rows(self) -> int:
        """Number of rows that this host loads per batch, including empty rows."""
        return -(-(self.batch_size // self.num_hosts) // self.row_multiple) * self.row_multiple

    @property
    def num_batches(self) -> int:
        """Number of batches in one pass over the set; the last batch may have empty rows."""
        return -(-len(self.packed_set) // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Return this host's rows of the global batch of a step."""
        share = self.batch_size // self.num_hosts
        first = self.host * share
        start = step * self.batch_size + first
        rows = self.packed_set.rows(self._indices(np.arange(start, start + share)), size=self.num_rows)
        if self.shuffle:
            return self.objective.batch(rows, lambda row: row_generator(self.seed, step, first + row))
        # Evaluation seeds a row by its index in the set, not by the step: every evaluation corrupts it identically.
        return self.objective.batch(rows, lambda row: row_generator(self.seed, 0, start + row))

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps `start` to `stop - 1`, with prefetching."""
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

    def _indices(self, positions: np.ndarray) -> np.ndarray:
        """Return the row index at each position of the data stream: endless in training, one pass in evaluation."""
        num_rows = len(self.packed_set)
        if not self.shuffle:
            return positions[positions < num_rows]
        epochs, positions = np.divmod(positions, num_rows)
        indices = np.empty_like(positions)
        # A batch may span two epochs, or more if the set is smaller than the batch; each epoch has its own order.
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            indices[in_epoch] = _order(num_rows, self.seed, epoch)[positions[in_epoch]]
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
    """Make the loader of one host: shuffled in every epoch for training, one pass in order for evaluation."""
    if cfg.data.batch_size % num_hosts:
        raise UserError(
            f"data.batch_size={cfg.data.batch_size} is not a multiple of the {num_hosts} hosts: "
            "every host loads the same number of rows; change data.batch_size or the number of hosts"
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
    """Return the random generator for the corruption of one row of a global batch."""
    # A counter-based generator can start at any (step, row) without drawing the numbers before it. NumPy guarantees
    # the stream of RandomState across versions, so upgrading NumPy during a run changes no batch.
    return np.random.RandomState(np.random.Philox(key=seed, counter=[0, 0, step, row]))


def _in_workers(batches: grain.IterDataset, workers: int, prefetch: int) -> grain.IterDataset:
    """Make the batches in worker processes. Each worker gets a copy of a set in memory, or opens the prepared files."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which are parsed only in absl programs
    per_worker = max(1, prefetch // workers)
    return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=per_worker))


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled order of the rows in one epoch."""
    # NumPy guarantees the stream of RandomState across versions, so upgrading NumPy during a run changes no batch.
    # Grain's own shuffle takes milliseconds per index if a set has only a few rows.
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_rows)
