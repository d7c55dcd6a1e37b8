"""What a run trains: the one thing that training scripts differ in."""

from typing import Any, Protocol

import jax
from flax import struct

from jspec.core.types import Array
from jspec.models.decoder import DecoderParams
from training.batches import Batch


@struct.dataclass
class Ratio:
    """A metric over those rows that count, which the parts of a batch hold unlike numbers of.

    Both numbers are means over all rows, so that they can be averaged over parts, batches and
    steps like any metric; they are divided once, at the end.

    Attributes:
      total: float32 [], what the rows that count add up to, for each of all rows.
      count: float32 [], how many count, for each of all rows.
    """

    total: Array
    count: Array

    @property
    def mean(self) -> Array:
        """The metric itself; nan where no row counts."""
        return self.total / self.count


Metrics = dict[str, Array | Ratio]


class Task(Protocol):
    """A network and its loss. A frozen dataclass of settings, which holds no weights."""

    def init(self, key: Array, frozen: Any) -> Any:
        """Float32 weights to be trained, a pytree; ``frozen`` may lend some of their values."""

    def loss(
        self, params: Any, frozen: Any, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """The objective [] and metrics, a dict of float32 [] or ``Ratio``; pure and jittable.

        All are means over all rows of the batch, those of weight 0 included: so the mean over
        parts of a batch is that of the whole. A metric over the rows that count is a ``Ratio``.

        Args:
          params: weights, differentiated.
          frozen: weights that are not, of a target or teacher.
          batch: windows.
          key: of this step's noise; the same step of a resumed run gets the same key. None on
            held-out text: then the text stays as it is and nothing is added to what the network
            reads, as when it serves.
        """


def drawing_key(key: Array | None) -> Array:
    """The key of what must be drawn on held-out text, too: the same ones at every evaluation."""
    return jax.random.key(0) if key is None else key


@struct.dataclass
class Frozen:
    """What is not trained, for tasks that need no more.

    Attributes:
      target: the target's weights.
      start: what training starts from, or None for fresh weights.
    """

    target: DecoderParams
    start: Any = None
