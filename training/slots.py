"""Which guesses of a parallel drafter are trained, and what they see.

A drafter that guesses K tokens in one pass has a guess (a, k) for every row a and depth k < K: the
one made behind k masks after row a. A guess sees the true rows up to a, and those of its own masks:
(a, 1), ..., (a, k). With all of them a window of T rows would take K T of them. So only some rows
go on from a depth to the next (conditional drop of tokens, arXiv 2504.18583): depth k keeps
``max(retention^k, retention_least)`` of the rows, each of which all smaller depths keep too, for
else it would lack keys.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array
from jspec.models.decoder import Attend
from training.attention import anchored, causal
from training.task import drawing_key
from training.trainer.settings import bad_option


@dataclasses.dataclass(frozen=True)
class SlotRecipe:
    """How many tokens are guessed in one pass, and how many rows guess so far.

    Attributes:
      depths: tokens guessed in one pass
      retention: share of the rows that go on from a depth to the next
      retention_least: least share of rows that a depth keeps

    Raises:
      ValueError: a value is out of range.
    """

    depths: int = 8
    retention: float = 0.7
    retention_least: float = 0.2

    def __post_init__(self):
        if self.depths < 1:
            raise bad_option("depths", self.depths, "it must be at least 1")
        for name in ("retention", "retention_least"):
            if not 0 < getattr(self, name) <= 1:
                raise bad_option(name, getattr(self, name), "take more than 0, at most 1")

    def counts(self, length: int) -> tuple[int, ...]:
        """Rows that each depth keeps of ``length``."""
        shares = (max(self.retention**depth, self.retention_least) for depth in range(self.depths))
        return tuple(max(1, int(length * share)) for share in shares)

    def check_windows(self, windows: tuple[int | None, ...]) -> None:
        """Refuses sliding windows that masks would leave.

        Raises:
          ValueError: one is narrower than a draft is long.
        """
        narrow = min((window for window in windows if window), default=self.depths)
        if narrow < self.depths:
            remedy = f"the network has a sliding window of {narrow} tokens; take no more"
            raise bad_option("depths", self.depths, remedy)


class Slots(NamedTuple):
    """The guesses of a batch, those of depth 0 first, in order: all rows."""

    anchors: Array  # int32 [B, M]: the row behind which the masks stand
    depths: np.ndarray  # int32 [M]: how many masks
    judges: Array  # int32 [B, M]: the target's row that computed the law of the guessed token
    weights: Array  # float32 [B, M]: how much the guess counts, 0 where nothing judges it

    def of_anchors(self, x: Array) -> Array:
        """Rows [B, M, ...] of x [B, T, ...], those of the anchors."""
        return _take(x, self.anchors)

    def of_judges(self, x: Array) -> Array:
        """Rows [B, M, ...] of x [B, R, ...], those of the judges."""
        return _take(x, self.judges)


def choose(
    recipe: SlotRecipe,
    segments: Array,
    weights: Array,
    length: int,
    offset: int,
    key: Array | None,
) -> Slots:
    """Draws the rows that each depth keeps: those whose second guess counts, before all others.

    Args:
      recipe: how many.
      segments: int32 [B, R], the documents of the target's rows, 0 for padding.
      weights: float32 [B, R], of a guess that the target's row judges.
      length: T, rows that guess.
      offset: the target's row that judges the first guess of row 0.
      key: of the draws; None on held-out text.
    """
    batch, size = segments.shape

    def judged(anchors: Array, depth: Array | int) -> tuple[Array, Array]:
        rows = anchors + offset + depth
        there = rows < size
        rows = jnp.minimum(rows, size - 1)
        here = _take(segments, anchors)
        there &= (here == _take(segments, rows)) & (here > 0)
        return rows, jnp.where(there, _take(weights, rows), 0.0)

    every = jnp.broadcast_to(jnp.arange(length), (batch, length))
    idle = judged(every, 1)[1] <= 0
    order = jnp.argsort(jax.random.uniform(drawing_key(key), every.shape) + idle, -1)
    counts = recipe.counts(length)
    anchors = jnp.concatenate([every, *(order[:, :count] for count in counts[1:])], 1)
    depths = np.repeat(np.arange(recipe.depths, dtype=np.int32), counts)
    judges, weight = judged(anchors, depths)
    return Slots(anchors, depths, judges, weight)


def attend_to(slots: Slots, segments: Array, windows: tuple[int | None, ...] = ()) -> Attend:
    """Attention of all guesses [B, H, M, D] at once, for ``decoder.trunk`` and its like.

    Args:
      slots: the guesses.
      segments: int32 [B, T], the documents of the rows.
      windows: sliding window of each layer, none narrower than the deepest guess; () for none.
    """
    counts = np.bincount(slots.depths)
    cuts = np.cumsum(counts)[:-1]
    places = jnp.split(slots.anchors, cuts, axis=1)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        window = windows[layer] if windows else None
        queries, keys, values = (jnp.split(x, cuts, axis=2) for x in (q, k, v))
        true = keys[0], values[0]
        mixed = [causal(queries[0], *true, segments=segments, window=window)]
        for depth in range(1, counts.size):
            # The rows of a depth are the first ones of every smaller depth but 0.
            own = [
                (keys[above][..., : counts[depth], :], values[above][..., : counts[depth], :])
                for above in range(1, depth + 1)
            ]
            mixed.append(
                anchored(
                    queries[depth],
                    *true,
                    places[depth],
                    depth,
                    segments=segments,
                    window=window,
                    own=own,
                )
            )
        return jnp.concatenate(mixed, 2)

    return attend


def _take(x: Array, rows: Array) -> Array:
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), 1)
