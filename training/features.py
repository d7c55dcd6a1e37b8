"""What the target computes of every window, kept on disk: for runs of many epochs.

A window of T + 1 tokens takes (T + 1) * (captured layers + 1) * width * 2 bytes, in bfloat16. The
cache is one flat file, filled window by window: an interrupted run fills it on from where it was.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import track

from jspec.core.types import Array
from training.batches import Batch
from training.data.loader import Rows
from training.locks import alone
from training.trainer import bad_option

_TOGETHER = 8  # windows that the target sees at once
_FLUSH = 64  # such groups between marks of what is on disk


@struct.dataclass
class TaughtBatch(Batch):
    """A batch with what the target computed of it.

    Attributes:
      captured: bfloat16 [B, T + 1, C, D], the hidden states that the head reads; C may be 0.
      normed: bfloat16 [B, T + 1, D], the last ones after the norm.
    """

    captured: Array
    normed: Array


@dataclasses.dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows with features: a ``Rows`` of ``TaughtBatch``. Made by ``cached``."""

    rows: Rows
    features: np.memmap  # bfloat16 [rows, T + 1, C + 1, D], the normed ones last

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TaughtBatch:
        row, features = self.rows[index], np.asarray(self.features[index])
        return TaughtBatch(
            tokens=row.tokens,
            segments=row.segments,
            weights=row.weights,
            captured=features[:, :-1],
            normed=features[:, -1],
        )


def cached(
    rows: Rows,
    teach: Callable[[Batch], tuple[tuple[Array, ...], Array]],
    folder: Path,
    *,
    width: int,
    captured: int,
    gigabytes: float,
    key: Any,
) -> CachedRows:
    """The rows with the target's features, computed now but for those that an earlier run kept.

    Args:
      rows: windows.
      teach: jitted; maps a batch to captured hidden states [B, T + 1, D] and normed ones.
      folder: of all caches.
      width: D.
      captured: C, how many hidden states ``teach`` gives beside the normed ones.
      gigabytes: most that the file may take (10^9 bytes).
      key: of all that the features depend on, in JSON; another key is another file.

    Raises:
      ValueError: the features need more room.
    """
    length = rows[0].tokens.shape[0]
    shape = (len(rows), length, captured + 1, width)
    needed = 2 * np.prod(shape, dtype=np.float64) / 1e9
    if needed > gigabytes:
        raise bad_option(
            "feature_cache_gigabytes",
            gigabytes,
            f"the features of {len(rows)} windows need {needed:.1f}; allow more, give less data, "
            "or leave --feature-cache out: then the target computes them anew in every step",
        )
    name = hashlib.sha256(json.dumps([key, shape]).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / f"{name}.features", folder / f"{name}.json"
    if jax.process_index() == 0:
        _fill(rows, teach, path, shape, mark)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("features of the target")
    return CachedRows(rows, np.memmap(path, ml_dtypes.bfloat16, "r", shape=shape))


def _fill(rows: Rows, teach, path: Path, shape: tuple[int, ...], mark: Path) -> None:
    """Computes the windows that are missing; those that ``mark`` counts are on disk.

    Raises:
      ValueError: another process computes them.
    """
    if _num_filled(path, mark) < len(rows):  # whole ones are only read, by as many as will
        with alone(path):
            _fill_alone(rows, teach, path, shape, mark)


def _num_filled(path: Path, mark: Path) -> int:
    return json.loads(mark.read_text())["windows"] if path.exists() and mark.exists() else 0


def _fill_alone(rows: Rows, teach, path: Path, shape: tuple[int, ...], mark: Path) -> None:
    done = _num_filled(path, mark)
    features = np.memmap(path, ml_dtypes.bfloat16, "r+" if done else "w+", shape=shape)
    starts = range(done, len(rows), _TOGETHER)
    console = Console(stderr=True)
    shown = {"console": console, "disable": not console.is_terminal}
    for start in track(starts, "features of the target", **shown):
        numbers = range(start, min(start + _TOGETHER, len(rows)))
        picked = [rows[min(start + n, len(rows) - 1)] for n in range(_TOGETHER)]
        captured, normed = teach(jax.tree.map(lambda *parts: np.stack(parts), *picked))
        found = jnp.stack([*captured, normed], 2).astype(jnp.bfloat16)
        features[start : numbers[-1] + 1] = np.asarray(found)[: len(numbers)]
        if (start // _TOGETHER + 1) % _FLUSH == 0 or numbers[-1] + 1 == len(rows):
            features.flush()
            aside = mark.with_suffix(".new")
            aside.write_text(json.dumps({"windows": numbers[-1] + 1}))
            os.replace(aside, mark)
