"""The target's hidden states of every window on disk, for runs of many epochs.

A window of T + 1 tokens takes (T + 1) * (captured layers + 1) * width * 2 bytes, in bfloat16. The
cache is one flat file, filled window by window; an interrupted run continues to fill it. A second
file has two numbers a token, with which a reduced vocabulary needs no other logits of the target.
"""

import dataclasses
import hashlib
import io
import json
import math
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

from jspec.core.types import Array
from jspec.util import atomic_files
from training.data.batch import Batch
from training.data.loader import Rows
from training.util.errors import adding_filename, bad_option
from training.util.locks import alone
from training.util.progress import progress

_TOGETHER = 8  # windows of one forward pass
_FLUSH = 64  # passes between flushes to disk
_TOTALS = np.dtype([("log_total", "<f4"), ("likeliest", "<i4")])


@struct.dataclass
class TaughtBatch(Batch):
    """A batch with the target's hidden states."""

    captured: Array  # bfloat16 [B, T + 1, C, D], the inputs of the head; C may be 0
    normed: Array  # bfloat16 [B, T + 1, D], the last hidden states after the norm
    # float32 [B, T + 1], log of the sum of the exponentials of the logits; None if not computed
    log_total: Array | None = None
    likeliest: Array | None = None  # int32 [B, T + 1], token with the largest logit


@dataclasses.dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows with features: ``Rows`` of ``TaughtBatch``, made by ``cached``."""

    rows: Rows
    features: np.memmap  # bfloat16 [rows, T + 1, C + 1, D], the normed ones last
    totals: np.ndarray | None  # _TOTALS [rows, T + 1], or None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TaughtBatch:
        row, features = self.rows[index], np.asarray(self.features[index])
        batch = TaughtBatch(
            row.tokens,
            row.segments,
            row.weights,
            captured=features[:, :-1],
            normed=features[:, -1],
        )
        if self.totals is None:
            return batch
        return batch.replace(**{name: np.array(self.totals[index][name]) for name in _TOTALS.names})


def cached(
    rows: Rows,
    states_of: Callable[[Batch], tuple[tuple[Array, ...], Array]],
    totals_of: Callable[[Array], tuple[Array, Array]] | None,
    folder: Path,
    *,
    width: int,
    captured: int,
    gigabytes: float,
    key: Any,
) -> CachedRows:
    """Return the rows with the target's features; those that are not cached are computed now.

    ``states_of`` is jitted; it maps a batch to hidden states [B, T + 1, D = width]: C = captured
    ones, and the normed ones. ``totals_of`` is too; it maps normed ones to ``log_total`` and
    ``likeliest`` of ``TaughtBatch``, or is None. ``key`` is everything that the features depend on,
    in JSON; another key is another file in ``folder``.

    Raises:
      ValueError: the features need more than ``gigabytes`` (10^9 bytes).
    """
    length = rows[0].tokens.shape[0]
    shape = (len(rows), length, captured + 1, width)
    needed = 2 * np.prod(shape, dtype=np.float64) / 1e9
    if needed > gigabytes:
        raise bad_option(
            "feature_cache_gigabytes",
            gigabytes,
            f"the features of {len(rows)} windows need {needed:.1f}; allow more, give less data, "
            "or leave --feature-cache out: then the target computes them in every step",
        )
    name = hashlib.sha256(json.dumps([key, shape]).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / f"{name}.features", folder / f"{name}.json"
    totals = folder / f"{name}.npy"
    read = lambda: np.memmap(path, ml_dtypes.bfloat16, "r", shape=shape)
    # Complete files are only read, by any number of processes.
    if jax.process_index() == 0:
        if _num_filled(path, mark) < len(rows):
            with alone(path):
                _fill(rows, states_of, path, shape, mark)
        if totals_of is not None and not totals.exists():
            with alone(totals):
                _write_totals(totals, read(), totals_of)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("features of the target")
    return CachedRows(rows, read(), None if totals_of is None else np.load(totals, "r"))


def _num_filled(path: Path, mark: Path) -> int:
    return json.loads(mark.read_text())["windows"] if path.exists() and mark.exists() else 0


def _fill(rows: Rows, states_of, path: Path, shape: tuple[int, ...], mark: Path) -> None:
    """Compute the windows after those that ``mark`` counts."""
    done = _num_filled(path, mark)
    if not done:
        # A mapped file with holes would end the process by a signal once the disk is full.
        with adding_filename(path), path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * math.prod(shape))
    features = np.memmap(path, ml_dtypes.bfloat16, "r+", shape=shape)
    with progress("features of the target", len(rows)) as update:
        for start in range(done, len(rows), _TOGETHER):
            end = min(start + _TOGETHER, len(rows))
            picked = [rows[min(start + n, len(rows) - 1)] for n in range(_TOGETHER)]
            captured, normed = states_of(jax.tree.map(lambda *parts: np.stack(parts), *picked))
            states = jnp.stack([*captured, normed], 2).astype(jnp.bfloat16)
            features[start:end] = np.asarray(states)[: end - start]
            if (start // _TOGETHER + 1) % _FLUSH == 0 or end == len(rows):
                features.flush()
                atomic_files.write(mark, json.dumps({"windows": end}).encode())
            update(end, "", False)


def _write_totals(path: Path, features: np.memmap, totals_of) -> None:
    """Compute the totals of all windows from the normed states in the cache."""
    totals = np.empty(features.shape[:2], _TOTALS)
    with progress("logits of the target", len(features)) as update:
        for start in range(0, len(features), _TOGETHER):
            normed = np.asarray(features[start : start + _TOGETHER, :, -1])
            padding = [(0, _TOGETHER - len(normed)), (0, 0), (0, 0)]
            for name, values in zip(_TOTALS.names, totals_of(np.pad(normed, padding)), strict=True):
                totals[name][start : start + _TOGETHER] = np.asarray(values)[: len(normed)]
            update(start + len(normed), "", False)
    file = io.BytesIO()
    np.save(file, totals)
    atomic_files.write(path, file.getvalue())
