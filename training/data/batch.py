"""The input of one training step."""

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array


@struct.dataclass
class Batch:
    """Windows of packed documents.

    The last axis is one longer than the T rows that are trained: row i predicts from token i.
    """

    tokens: Array  # int32 [B, T + 1]
    # int32 [B, T + 1]: number of the document within its window, from 1 on; 0 is padding. Attention
    # and positions do not cross segments.
    segments: Array
    # float32 [B, T + 1]: weight of a token as a label; 0 for padding and for the turns of the user
    # in a conversation.
    weights: Array

    @property
    def positions(self) -> Array:
        """int32 [B, T + 1]: position of each token in its segment, from 0 on."""
        index = jnp.arange(self.segments.shape[1], dtype=jnp.int32)
        starts = jnp.diff(self.segments, axis=1, prepend=-1) != 0
        return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)

    @property
    def label_weights(self) -> Array:
        """float32 [B, T]: weight of predicting token i + 1 at row i, 0 across segments."""
        here, after = self.segments[:, :-1], self.segments[:, 1:]
        return jnp.where((here == after) & (after > 0), self.weights[:, 1:], 0.0)
