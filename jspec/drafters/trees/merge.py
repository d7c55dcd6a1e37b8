"""Two drafts of the same round made one: grafted onto each other, or one chosen for each row."""

import jax.numpy as jnp
import numpy as np

from jspec.core import trees
from jspec.core.types import Array, Draft


def graft(stock: Draft, scion: Draft) -> Draft:
    """``stock`` with the nodes of ``scion`` that it lacks: [B, N + N' - 1].

    A node of ``scion`` whose path ``stock`` has too is that node, and grows on from there; all
    others come after the nodes of ``stock``. So where ``stock`` was drawn without replacement the
    law of the whole is "deterministic_last".

    Args:
      stock: point masses, a drawn chain, or a tree drawn without replacement.
      scion: point masses. Whether its nodes are valid may not depend on what ``stock`` drew.

    Returns:
      The draft; ``logits`` has rows for the nodes of ``stock`` alone, no other has drawn children.
    """
    batch, size = stock.tokens.shape
    above = _above(stock, batch), _above(scion, batch)
    same = _same_paths(stock, scion, *above)
    known, place = same.any(-1), jnp.argmax(same, -1).astype(jnp.int32)
    own = size - 1 + jnp.arange(scion.tokens.shape[1], dtype=jnp.int32)
    place = jnp.where(known, place, own)
    added = (scion.valid & ~known)[:, 1:]
    parents = jnp.take_along_axis(place, above[1], 1)[:, 1:]
    join = lambda a, b, fill: jnp.concatenate([a, jnp.where(added, b, fill)], 1)
    root = jnp.full((batch, 1), -1)
    sampled = None
    if stock.logits is not None:
        sampled = join(stock.drawn & stock.valid, False, False)
    return stock.replace(
        tokens=join(stock.tokens, scion.tokens[:, 1:], 0),
        parents=join(jnp.concatenate([root, above[0][:, 1:]], 1), parents, 0),
        valid=join(stock.valid, True, False),
        sampled=sampled,
        max_depth=max(stock.max_depth, scion.max_depth),
    )


def _above(draft: Draft, batch: int) -> Array:
    """The parent of every node, the root being its own: [B, N]."""
    above = jnp.maximum(draft.parents, 0)
    return jnp.broadcast_to(above, (batch, above.shape[-1]))


def _same_paths(stock: Draft, scion: Draft, above: Array, scion_above: Array) -> Array:
    """Whether node i of ``scion`` and node j of ``stock`` have the same path: [B, N', N].

    Nodes are the same if their tokens are and their parents are: of ever longer paths, by doubling.
    """
    index = jnp.arange(scion.tokens.shape[1])[:, None], jnp.arange(stock.tokens.shape[1])
    same = scion.tokens[:, :, None] == stock.tokens[:, None, :]
    same &= scion.valid[:, :, None] & stock.valid[:, None, :]
    same = jnp.where((index[0] == 0) | (index[1] == 0), (index[0] == 0) & (index[1] == 0), same)
    edges = 1
    while edges < min(stock.max_depth, scion.max_depth) + 1:
        higher = jnp.take_along_axis(same, scion_above[:, :, None], 1)
        same &= jnp.take_along_axis(higher, above[:, None, :], 2)
        above = jnp.take_along_axis(above, above, 1)
        scion_above = jnp.take_along_axis(scion_above, scion_above, 1)
        edges *= 2
    return same


def choose(first: Draft, second: Draft, is_first: Array) -> Draft:
    """``first``, point masses, in the rows ``is_first`` [B], and ``second`` in the others.

    Of two chains a chain. ``sampled`` says in which rows there is a law.
    """
    size = max(first.tokens.shape[1], second.tokens.shape[1])
    widen = lambda x, fill: jnp.pad(x, ((0, 0), (0, size - x.shape[1])), constant_values=fill)
    pick = lambda a, b, fill: jnp.where(is_first[:, None], widen(a, fill), widen(b, fill))
    logits = sampled = None
    if second.logits is not None:
        sampled = widen(second.drawn & second.valid & ~is_first[:, None], False)
        logits = jnp.pad(second.logits, ((0, 0), (0, size - second.logits.shape[1]), (0, 0)))
    return second.replace(
        tokens=pick(first.tokens, second.tokens, 0),
        parents=_either(first, second, pick, size),
        valid=pick(first.valid, second.valid, False),
        logits=logits,
        sampled=sampled,
        max_depth=max(first.max_depth, second.max_depth),
    )


def _either(first: Draft, second: Draft, pick, size: int) -> Array | np.ndarray:
    if trees.is_chain(first.parents) and trees.is_chain(second.parents):
        return trees.chain(size - 1)
    batch = first.tokens.shape[0]
    parents = [
        jnp.broadcast_to(draft.parents, (batch, draft.tokens.shape[1])) for draft in (first, second)
    ]
    return pick(*parents, 0)
