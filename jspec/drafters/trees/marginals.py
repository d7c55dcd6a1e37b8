"""Drafts of heads that guess several tokens in one pass, none of them seeing another.

All nodes of a depth share a law, that of the token at their place given the committed text alone.
So the children of any node at depth d are chosen by row d of the logits: a chain is K independent
draws, a static tree needs no pass a level, and the likeliest paths are known without growing any
others: their probabilities are products of the rows'.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import sampling
from jspec.core.trees import StaticTree
from jspec.core.types import Array, Draft
from jspec.drafters.trees import expand
from jspec.drafters.trees.drawing import Drawing
from jspec.drafters.trees.expand import Candidates
from jspec.drafters.trees.tree_settings import BestFirst


def grow(drawing: Drawing, tree: StaticTree | BestFirst, logits: Array) -> Draft:
    """A draft of ``tree`` from logits [B, K, Vd]: row d for the children of nodes at depth d."""
    if isinstance(tree, BestFirst):
        return best_first(drawing, tree, logits)
    if max(tree.widths) == 1:
        return chain(drawing, logits[:, : tree.max_depth])
    return expand.ranked(drawing, tree, logits[:, :1], _next_row, logits)


def _next_row(logits: Array, drafted, parents, depth: int, slot) -> tuple[Array, Array]:
    """The row of the next depth, whatever was drafted."""
    del drafted, parents, slot
    return logits, logits[:, depth : depth + 1]


def chain(drawing: Drawing, logits: Array) -> Draft:
    """A chain of K nodes from logits [B, K, Vd], all drawn at once.

    But for requests that change logits by what was drafted before: then one after the other.
    """
    if drawing.shapes:
        only, count = logits[:, :1], logits.shape[1]
        return expand.chain(drawing, count, only, _next_row, logits, unrolled=True)
    nodes = jnp.arange(logits.shape[1])
    drawn = drawing.children(logits, np.ones(nodes.size, int), nodes, nodes)
    return expand.chained(drawing, drawing.target_ids(drawn.ids[..., 0]), drawn.distribution)


def best_first(drawing: Drawing, budget: BestFirst, logits: Array) -> Draft:
    """The N - 1 likeliest paths, all prefixes of which are among them.

    With n = N - 1: where the paths of a level are in order, the child of rank j of the i-th (both
    from 0) is no likelier than those of ranks up to j of paths up to the i-th, (i + 1)(j + 1) - 1
    others. So only pairs with (i + 1)(j + 1) <= n can be among the n best of their level, and only
    children of those can be among the n best of the next: n log n candidates a level, whatever the
    vocabulary. Ties go to the shallower node, then to the one whose path is lesser in rank.
    """
    count, batch = budget.size - 1, logits.shape[0]
    width = min(count, logits.shape[-1])
    if drawing.shapes:  # a grammar drops later what it does not allow on a branch
        first, below = drawing.shaped(logits[:, :1]), drawing.shaped_below(logits[:, 1:])
        logits = jnp.concatenate([first, below], 1)
    rows, ids = lax.top_k(sampling.log_probs(logits[:, : budget.max_depth]), width)
    ids = drawing.target_ids(ids)
    levels = [Candidates(ids[:, 0], rows[:, 0], jnp.full((batch, width), -1), _index(batch, width))]
    for depth in range(1, budget.max_depth):
        above = levels[-1]
        rank_above, rank = _pairs(above.scores.shape[1], width, count)
        scores, best = lax.top_k(
            above.scores[:, rank_above] + rows[:, depth, rank], min(count, rank.size)
        )
        start = sum(level.scores.shape[1] for level in levels)
        place = _index(batch, best.shape[1])
        parents = jnp.take_along_axis(above.index, jnp.asarray(rank_above)[best], 1)
        drafted = jnp.take_along_axis(ids[:, depth], jnp.asarray(rank)[best], 1)
        levels.append(Candidates(drafted, scores, parents, start + place))
    every = Candidates(*(jnp.concatenate(parts, 1) for parts in zip(*levels, strict=True)))
    _, best = lax.top_k(every.scores, count)
    return expand.rerooted(drawing, every.take(jnp.sort(best, -1)), budget.max_depth)


def _index(batch: int, size: int) -> Array:
    return jnp.broadcast_to(jnp.arange(size), (batch, size))


def _pairs(paths: int, width: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks (i, j) of a path and its child that can be among the ``count`` likeliest, in order."""
    ranks = np.indices((paths, width)).reshape(2, -1)
    return tuple(ranks[:, (ranks[0] + 1) * (ranks[1] + 1) <= count])
