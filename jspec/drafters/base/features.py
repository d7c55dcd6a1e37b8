"""What drafters remember of the target's features, and how it grows by those that are true."""

import dataclasses

import jax.numpy as jnp
from flax import struct

from jspec.core import kv_cache
from jspec.core.types import Array
from jspec.drafters.base.tree_drafter import TreeDrafter


@struct.dataclass
class FeatureMemory:
    """The target's hidden state at the last committed position but the root's."""

    hidden: Array  # [B, D]
    known: Array  # [B] bool: False until there is one


@struct.dataclass
class CachedMemory:
    """What blocks of the head's own have taken in: rows 0 to r - 1 of true features."""

    cache: kv_cache.KVCache
    hidden: Array  # [B, m, D], what row r - 1 gave out, and rows behind it if a round needs any

    def take_in(self, out: Array, entries: tuple, count: Array, size: int) -> "CachedMemory":
        """Commits the first ``count`` [B] of ``size`` rows.

        ``out`` [B, m, D] is what the last of them gave out, and whoever stands behind it.
        """
        # The rows' keys are known before the rows have attended to the cache. The write waits for
        # what they give out (for this, a broken row commits nothing), or XLA copies the cache.
        count = jnp.where(jnp.isnan(out[:, 0, 0]), 0, count)
        rows = jnp.broadcast_to(jnp.arange(size), (len(count), size))
        return CachedMemory(
            cache=kv_cache.append(self.cache, entries, rows, count),
            hidden=jnp.where((count > 0)[:, None, None], out, self.hidden),
        )


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TreeDrafter):
    """A head that starts from the target's last hidden state, of its config's size and dtype."""

    def init(self, params, request, capacity):
        """No hidden state yet."""
        batch = request.max_length.shape[0]
        hidden = jnp.zeros((batch, self.config.hidden_size), self.config.activation_dtype)
        return FeatureMemory(hidden, jnp.zeros((batch,), bool))

    def prefill(self, params, memory, tokens, features, start, valid):
        """Keeps the last hidden state of a chunk of the prompt."""
        return _keep(memory, features[0], valid - 1, valid > 0)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Keeps the hidden state at the end of the accepted path."""
        last = jnp.maximum(verdict.num_emitted - 1, 0)
        node = jnp.take_along_axis(verdict.path, last[:, None], 1)[:, 0]
        return _keep(memory, out.features[0], node, verdict.num_emitted > 0), shared


def _keep(memory: FeatureMemory, features: Array, row: Array, there: Array) -> FeatureMemory:
    row = jnp.maximum(row, 0)[:, None, None]
    hidden = jnp.take_along_axis(features, row, 1)[:, 0].astype(memory.hidden.dtype)
    return FeatureMemory(jnp.where(there[:, None], hidden, memory.hidden), memory.known | there)
