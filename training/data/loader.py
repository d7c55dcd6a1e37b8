"""Rows to batches, by grain: shuffled every epoch, endless, resumed at the exact position."""

from typing import Protocol

import grain
import jax
import numpy as np

from training.data.batch import Batch

_READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)  # batches


class Rows(Protocol):
    """Rows of training data, addressed by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch:
        """Return one row without the batch axis: tokens, segments and weights [T + 1]."""


def batches(
    rows: Rows,
    *,
    batch: int,
    seed: int,
    process_index: int | None = None,
    process_count: int | None = None,
) -> grain.DatasetIterator[Batch]:
    """Return an endless iterator over ``rows``; each epoch has every row once, in its own order.

    ``get_state()`` of the iterator is a small dict for JSON; ``set_state`` continues exactly there.
    The order depends only on ``seed``, 0 or more, and the number of rows. A process gets its part
    of each batch, host arrays [batch / process_count, T + 1]; JAX numbers the processes by default.

    Raises:
      ValueError: there are no rows, or ``batch`` cannot be cut into ``process_count`` parts.
    """
    part, mine = _part(rows, batch, process_index, process_count)
    # grain adds the number of the epoch to the seed: hashed seeds keep 0 and 1 far apart.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    endless = grain.MapDataset.source(rows).shuffle(seed=hashed).repeat()
    # grain rounds the number of batches to a float, unless it drops the (never reached) remainder.
    parts = endless.batch(part, drop_remainder=True)[mine]
    return iter(parts.to_iter_dataset(_READ_AHEAD))


def held_out(
    rows: Rows,
    *,
    batch: int,
    limit: int | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> grain.IterDataset[Batch]:
    """Return whole batches of rows spread evenly over ``rows``; every iteration is the same.

    Rows fewer than ``batch`` are repeated. ``limit`` is the maximum number of rows, if more than a
    batch; None for all that fill a batch. Other arguments are those of ``batches``.

    Raises:
      ValueError: as ``batches``.
    """
    part, mine = _part(rows, batch, process_index, process_count)
    most = len(rows) if limit is None else min(limit, len(rows))
    count = max(most // batch, 1) * batch
    spread = grain.MapDataset.range(count).map(lambda i: rows[i * len(rows) // count])
    return spread.batch(part)[mine].to_iter_dataset(_READ_AHEAD)


def _part(rows: Rows, batch: int, index: int | None, count: int | None) -> tuple[int, slice]:
    """Return the size of a process's part of a batch, and the slice of its parts."""
    index = jax.process_index() if index is None else index
    count = jax.process_count() if count is None else count
    if not len(rows):
        raise ValueError("the training data holds no rows; give more data or shorter windows")
    if batch < 1 or batch % count:
        raise ValueError(
            f"batch {batch} cannot be cut into {count} equal parts, one a process; "
            f"take a multiple of {count}"
        )
    return batch // count, slice(index, None, count)
