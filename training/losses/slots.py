"""Selection of the guesses of a parallel drafter that are trained, and their attention.

A drafter that guesses K tokens in one pass has a guess (a, k) for every row a and depth k < K: the
guess at the k-th mask behind row a. It sees the true rows up to a, and its own masks
(a, 1), ..., (a, k). All guesses of a window of T rows would be K T rows. So each depth keeps only
some rows of the depth before (conditional drop of tokens, arXiv 2504.18583): depth k keeps
``max(retention^k, retention_least)`` of the rows. Every smaller depth keeps those rows too, because
they provide the keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array
from jspec.models.blocks.attend import Attend
from training.losses.guesses import Rows
from training.networks.attention import causal
from training.trainer.task import drawing_key
from training.util.errors import bad_option, check_each, check_least


@dataclasses.dataclass(frozen=True)
class SlotRecipe:
    """Number of tokens guessed in one pass, and the rows that each depth trains."""

    depths: int = 8  # tokens guessed in one pass
    retention: float = 0.7  # share of its rows that each depth passes on to the next
    retention_least: float = 0.2  # smallest share of all rows that a depth keeps

    def __post_init__(self):
        check_least(self, 1, "depths")
        shares = ("retention", "retention_least")
        check_each(self, shares, lambda x: 0 < x <= 1, "take more than 0, at most 1")

    def counts(self, length: int) -> tuple[int, ...]:
        """Return the number of rows that each depth keeps of ``length``."""
        shares = (max(self.retention**depth, self.retention_least) for depth in range(self.depths))
        return tuple(max(1, int(length * share)) for share in shares)

    def check_windows(self, windows: tuple[int | None, ...]) -> None:
        """Raise OptionError if a sliding window is narrower than a draft is long."""
        narrow = min((window for window in windows if window), default=self.depths)
        if narrow < self.depths:
            remedy = f"the network has a sliding window of {narrow} tokens; take no more"
            raise bad_option("depths", self.depths, remedy)


class Slots(NamedTuple):
    """The guesses of a batch; those of depth 0 come first, for all rows in order."""

    anchors: Array  # int32 [B, M]: the row before the masks
    depths: np.ndarray  # int32 [M]: number of masks
    judges: Array  # int32 [B, M]: the target's row with the distribution of the guessed token
    weights: Array  # float32 [B, M]: weight of the guess, 0 without a judge

    def of_anchors(self, x: Array) -> Array:
        """Return rows [B, M, ...] of x [B, T, ...] at the anchors."""
        return _take(x, self.anchors)

    def rows_of(self, states: Array, labels: Array, totals: Sequence[Array] = ()) -> Rows:
        """Return the judges, given the target's states [B, R, D] and the labels [B, R] behind.

        ``totals`` are ``log_total`` and ``likeliest`` [B, R] of ``Rows``, if they were computed.
        """
        states, labels, *totals = (_take(x, self.judges) for x in (states, labels, *totals))
        return Rows(states, labels, self.weights[..., None], self.depths[:, None], *totals)


def choose(
    recipe: SlotRecipe, segments: Array, weights: Array, length: int, offset: int, key: Array | None
) -> Slots:
    """Draw the rows that each depth keeps; rows whose second guess counts have priority.

    The target's R rows have ``segments`` int32 [B, R], 0 for padding, and float32 ``weights``
    [B, R] of the guesses that they judge. ``length`` T rows guess; the target's row ``offset``
    judges the first guess of row 0. ``key`` is None on held-out text.
    """
    batch, size = segments.shape

    def judged(anchors: Array, depth: Array | int) -> tuple[Array, Array]:
        rows = anchors + offset + depth
        valid = rows < size
        rows = jnp.minimum(rows, size - 1)
        here = _take(segments, anchors)
        valid &= (here == _take(segments, rows)) & (here > 0)
        return rows, jnp.where(valid, _take(weights, rows), 0.0)

    every = jnp.broadcast_to(jnp.arange(length), (batch, length))
    idle = judged(every, 1)[1] <= 0
    order = jnp.argsort(jax.random.uniform(drawing_key(key), every.shape) + idle, -1)
    counts = recipe.counts(length)
    anchors = jnp.concatenate([every, *(order[:, :count] for count in counts[1:])], 1)
    depths = np.repeat(np.arange(recipe.depths, dtype=np.int32), counts)
    judges, weight = judged(anchors, depths)
    return Slots(anchors, depths, judges, weight)


def attend_to(slots: Slots, segments: Array) -> Attend:
    """Return the attention of all guesses [B, H, M, D], for ``decoder.trunk``.

    ``segments`` int32 [B, T] are the documents of the rows. A layer's sliding window must be at
    least as wide as a draft is long.
    """
    counts = np.bincount(slots.depths)
    cuts = np.cumsum(counts)[:-1]
    anchors = jnp.split(slots.anchors, cuts, axis=1)

    def attend(layer: int, q: Array, k: Array, v: Array, window: int | None = None) -> Array:
        del layer
        queries, keys, values = (jnp.split(x, cuts, axis=2) for x in (q, k, v))
        mixed = [causal(queries[0], keys[0], values[0], segments=segments, window=window)]
        for depth, count in enumerate(counts[1:], 1):
            # The rows of a depth are the first ones of every smaller depth but 0.
            above = slice(1, depth + 1)
            later = [
                (key[..., :count, :], value[..., :count, :])
                for key, value in zip(keys[above], values[above], strict=True)
            ]
            mixed.append(
                causal(
                    queries[depth],
                    keys[0],
                    values[0],
                    anchors=anchors[depth],
                    ahead=depth,
                    segments=segments,
                    window=window,
                    later=later,
                )
            )
        return jnp.concatenate(mixed, 2)

    return attend


def _take(x: Array, rows: Array) -> Array:
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), 1)
