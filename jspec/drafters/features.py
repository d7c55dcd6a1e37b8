"""What drafters remember of the target's features, and how it grows by those that are true."""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import branching, kv
from jspec.drafters.trees import TreeDrafter
from jspec.types import Array


@struct.dataclass
class FeatureMemory:
    """The target's hidden state at the last committed position but the root's."""

    hidden: Array  # [B, D]
    known: Array  # [B] bool: False until there is one


@struct.dataclass
class CachedMemory:
    """What blocks of the head's own have taken in: rows 0 to r - 1 of true features."""

    cache: kv.KVCache
    hidden: Array  # [B, D], what row r - 1 gave out

    def take_in(self, out: Array, entries: tuple, count: Array) -> "CachedMemory":
        """Commits the first ``count`` [B] of n rows, which gave ``out`` [B, n, D]."""
        batch, size, _ = out.shape
        last = jnp.take_along_axis(out, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
        # The rows' keys are known before the rows have attended to the cache. The write waits for
        # what they give out (for this, a broken row commits nothing), or XLA copies the cache.
        count = jnp.where(jnp.isnan(last[:, 0]), 0, count)
        rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
        return CachedMemory(
            cache=kv.append(self.cache, entries, rows, count),
            hidden=jnp.where((count > 0)[:, None], last, self.hidden),
        )


Taken = tuple[Array, tuple[kv.AttentionKV, ...]]  # [B, n, D], [B, Hkv, n, head_dim] a layer

# Rows: of so few a choice is not worth compiling; so many are of a prompt, and full as a rule.
_FEW, _MANY = 6, 17
_LEAST = 3  # rows worth a program of their own


def by_need(run: Callable[..., Taken], count: Array, *rows: Array) -> Taken:
    """What ``run`` gives for rows of which a round keeps the first ``count``.

    Of more than a few, a CPU runs as many as hold all that are kept: n, a half or a quarter. An
    accelerator runs all n: it reads the weights as long for one row as for nine, and a choice makes
    it wait.

    Args:
      run: maps rows to what they give out and their entries. It may read caches.
      count: int32 [B].
      rows: [B, n, ...] each.

    Returns:
      The result for n rows, zeros for those that were not run.
    """
    size = rows[0].shape[1]
    if not _FEW < size <= _MANY:
        return run(*rows)
    halves = (1 + ((size - 1) >> step) for step in itertools.count())
    sizes = sorted(itertools.takewhile(lambda few: few >= _LEAST, halves))

    def first(few: int) -> Callable[..., Taken]:
        def part(*rows: Array) -> Taken:
            out, entries = run(*(x[:, :few] for x in rows))
            fill = lambda x: branching.widen(x, 2, size)
            return branching.widen(out, 1, size), jax.tree.map(fill, entries)

        return part

    def needed(*rows: Array) -> Taken:
        fits = jnp.array(sizes) >= jnp.minimum(count.max(), size)
        return lax.switch(jnp.argmax(fits), [first(few) for few in sizes], *rows)

    return lax.platform_dependent(*rows, cpu=needed, default=run)


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TreeDrafter):
    """A head that starts from the target's last hidden state, of its config's size and dtype."""

    def init(self, params, request, capacity):
        """No hidden state yet."""
        batch = request.max_length.shape[0]
        hidden = jnp.zeros((batch, self.config.hidden_size), self.config.activation_dtype)
        return FeatureMemory(hidden, jnp.zeros((batch,), bool))

    def absorb(self, params, memory, tokens, features, start, valid):
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
    return FeatureMemory(
        jnp.where(there[:, None], hidden, memory.hidden), memory.known | there
    )  # fmt: skip
