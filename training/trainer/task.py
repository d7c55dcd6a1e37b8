"""The interface between the trainer and the networks that it trains."""

from typing import Any, Protocol

import jax
from flax import struct

from jspec.core.types import Array
from training.data.batch import Batch


@struct.dataclass
class Ratio:
    """A weighted mean kept as (sum, weight), because micro-batches have different total weights."""

    total: Array  # float32 [], sum over the rows that count, divided by the number of all rows
    count: Array  # float32 [], number of rows that count, divided by the number of all rows

    @property
    def mean(self) -> Array:
        """The metric itself; NaN if no row counts."""
        return self.total / self.count


Metrics = dict[str, Array | Ratio]


class Task(Protocol):
    """A network and its loss: a frozen dataclass of settings without weights.

    Common fields are ``compute``, the dtype of the factors of every matmul (see ``linear``), and
    ``remat``, whether the backward pass computes blocks again to save memory.
    """

    def init(self, key: Array, frozen: Any) -> Any:
        """Return float32 weights to train, a pytree; ``frozen`` may provide some values."""

    def loss(
        self, params: Any, frozen: Any, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """Return the objective [] and metrics, each float32 [] or a ``Ratio``; jittable.

        All are means over all rows of the batch, including rows of weight 0, so that the mean over
        micro-batches equals the mean over the batch. A metric over the rows that count is a
        ``Ratio``.

        Args:
          params: weights, differentiated.
          frozen: weights that are not trained, of a target or teacher.
          batch: windows.
          key: of the noise of this step, the same in a resumed run. None on held-out text: no
            noise is added and the text is used as it is.
        """


def drawing_key(key: Array | None) -> Array:
    """Return ``key``, or a constant key so that every evaluation draws the same."""
    return jax.random.key(0) if key is None else key
