"""Combining two drafts of a round: graft one onto the other, or choose one for each row."""

import jax.numpy as jnp
import numpy as np

from jspec.core import trees
from jspec.core.types import Array, Draft


def graft(stock: Draft, scion: Draft) -> Draft:
    """Return ``stock`` with the nodes of ``scion`` that it lacks, [B, N + N' - 1].

    A node of ``scion`` whose path is in ``stock`` is that node, and its children hang there. All
    other nodes follow those of ``stock``. So if ``stock`` was drawn without replacement, the
    proposal of the result is "deterministic_last".

    Args:
      stock: a deterministic draft, a drawn chain, or a tree drawn without replacement.
      scion: a deterministic draft. The validity of its nodes must not depend on draws of ``stock``.

    Returns:
      The draft; ``logits`` has rows for the nodes of ``stock`` alone, as only they have drawn
      children.
    """
    batch, size = stock.tokens.shape
    above, scion_above = _parents(stock, batch), _parents(scion, batch)
    same = _same_paths(stock, scion, above, scion_above)
    shared = same.any(-1)
    appended = size - 1 + jnp.arange(scion.tokens.shape[1], dtype=jnp.int32)
    index = jnp.where(shared, jnp.argmax(same, -1).astype(jnp.int32), appended)
    added = (scion.valid & ~shared)[:, 1:]
    parents = jnp.take_along_axis(index, scion_above, 1)[:, 1:]
    join = lambda a, b, fill: jnp.concatenate([a, jnp.where(added, b, fill)], 1)
    root = jnp.full((batch, 1), -1)
    sampled = None
    if stock.logits is not None:
        sampled = join(stock.drawn & stock.valid, False, False)
    return stock.replace(
        tokens=join(stock.tokens, scion.tokens[:, 1:], 0),
        parents=join(jnp.concatenate([root, above[:, 1:]], 1), parents, 0),
        valid=join(stock.valid, True, False),
        sampled=sampled,
        max_depth=max(stock.max_depth, scion.max_depth),
    )


def _parents(draft: Draft, batch: int) -> Array:
    """Return the parent of every node, the root being its own: [B, N]."""
    above = jnp.maximum(draft.parents, 0)
    return jnp.broadcast_to(above, (batch, above.shape[-1]))


def _same_paths(stock: Draft, scion: Draft, above: Array, scion_above: Array) -> Array:
    """Return a mask [B, N', N] of the nodes i of ``scion`` and j of ``stock`` with the same path.

    Two nodes have the same path if their tokens are equal and so are their parents' paths. Each
    step doubles the number of compared edges.
    """
    index = jnp.arange(scion.tokens.shape[1])[:, None], jnp.arange(stock.tokens.shape[1])
    same = scion.tokens[:, :, None] == stock.tokens[:, None, :]
    same &= scion.valid[:, :, None] & stock.valid[:, None, :]
    same = jnp.where((index[0] == 0) | (index[1] == 0), (index[0] == 0) & (index[1] == 0), same)
    edges = 1
    while edges < min(stock.max_depth, scion.max_depth) + 1:
        same_above = jnp.take_along_axis(same, scion_above[:, :, None], 1)
        same &= jnp.take_along_axis(same_above, above[:, None, :], 2)
        above = jnp.take_along_axis(above, above, 1)
        scion_above = jnp.take_along_axis(scion_above, scion_above, 1)
        edges *= 2
    return same


def choose(first: Draft, second: Draft, is_first: Array) -> Draft:
    """Return the deterministic draft ``first`` in rows ``is_first`` [B], ``second`` in the others.

    Two chains give a chain. ``sampled`` marks the drawn nodes.
    """
    size = max(first.tokens.shape[1], second.tokens.shape[1])
    widen = lambda x, fill: jnp.pad(x, ((0, 0), (0, size - x.shape[1])), constant_values=fill)
    pick = lambda a, b, fill: jnp.where(is_first[:, None], widen(a, fill), widen(b, fill))
    if trees.is_chain(first.parents) and trees.is_chain(second.parents):
        parents: Array | np.ndarray = trees.chain(size - 1)
    else:
        parents = pick(
            jnp.broadcast_to(first.parents, first.tokens.shape),
            jnp.broadcast_to(second.parents, second.tokens.shape),
            0,
        )
    logits = sampled = None
    if second.logits is not None:
        sampled = widen(second.drawn & second.valid & ~is_first[:, None], False)
        logits = jnp.pad(second.logits, ((0, 0), (0, size - second.logits.shape[1]), (0, 0)))
    return second.replace(
        tokens=pick(first.tokens, second.tokens, 0),
        parents=parents,
        valid=pick(first.valid, second.valid, False),
        logits=logits,
        sampled=sampled,
        max_depth=max(first.max_depth, second.max_depth),
    )
