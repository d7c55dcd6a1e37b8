"""What a run trains: the one thing that training scripts differ in."""

from typing import Any, Protocol

from flax import struct

from jspec.models.decoder import DecoderParams
from jspec.types import Array
from training.batches import Batch


class Task(Protocol):
    """A network and its loss. A frozen dataclass of settings, which holds no weights."""

    def init(self, key: Array, frozen: Any) -> Any:
        """Float32 weights to be trained, a pytree; ``frozen`` may lend some of their values."""

    def loss(self, params: Any, frozen: Any, batch: Batch, key: Array) -> tuple[Array, dict]:
        """The objective [] and metrics, a dict of float32 []; pure and jittable.

        Both are means over all rows of the batch, those of weight 0 included: so the mean over
        parts of a batch is that of the whole.

        Args:
          params: weights, differentiated.
          frozen: weights that are not, of a target or teacher.
          batch: windows.
          key: of this step's noise; the same step of a resumed run gets the same key.
        """


@struct.dataclass
class Frozen:
    """What is not trained, for tasks that need no more.

    Attributes:
      target: the target's weights.
      start: what training starts from, or None for fresh weights.
    """

    target: DecoderParams
    start: Any = None
