"""Drafts of heads that guess several tokens in one pass, none of which sees another.

All nodes of a depth share a distribution: that of the token at their position given the committed
text alone. So row d of the logits gives the children of every node at depth d. A chain is K
independent draws, a static tree needs one pass, and the probability of a path is the product of the
rows' probabilities, so the likeliest paths are found without expanding others.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import sampling
from jspec.core.static_trees import StaticTree
from jspec.core.types import Array, Draft
from jspec.drafters.trees import expand
from jspec.drafters.trees.drawing import Drawing, chain_draft
from jspec.drafters.trees.drawing import chain as draw_chain
from jspec.drafters.trees.expand import Candidates
from jspec.drafters.trees.tree_settings import BestFirst


def grow(drawing: Drawing, tree: StaticTree | BestFirst, logits: Array) -> Draft:
    """Return a draft from logits [B, K, Vd]: row d for the children of nodes at depth d."""
    if isinstance(tree, BestFirst):
        return best_first(drawing, tree, logits)
    if max(tree.widths) == 1:
        return chain(drawing, logits[:, : tree.max_depth])
    return expand.ranked(drawing, tree, logits[:, :1], _next_row, logits)


def _next_row(logits: Array, drafted, parents, depth: int, slot) -> tuple[Array, Array]:
    """Return the row of the next depth, which does not depend on the drafted tokens."""
    del drafted, parents, slot
    return logits, logits[:, depth : depth + 1]


def chain(drawing: Drawing, logits: Array) -> Draft:
    """Return a chain of K nodes from logits [B, K, Vd], all drawn at once.

    Logits processors read the tokens drafted before, so with them the nodes are drawn in order.
    """
    depth = logits.shape[1]
    if drawing.has_processors:
        return draw_chain(drawing, depth, logits[:, :1], _next_row, logits, unrolled=True)[0]
    nodes = jnp.arange(depth)
    children = drawing.children(logits, np.ones(depth, int), nodes, nodes)
    tokens = drawing.target_ids(children.ids[..., 0])
    return chain_draft(drawing, tokens, children.distribution)


def best_first(drawing: Drawing, budget: BestFirst, logits: Array) -> Draft:
    """Return the N - 1 likeliest paths; every prefix of one is among them (arXiv 2604.12989).

    With n = N - 1 and the paths of a depth in order, the child of rank j of path i (both from 0) is
    no likelier than (i + 1)(j + 1) - 1 others: the children of ranks up to j of paths up to i. So
    only pairs with (i + 1)(j + 1) <= n can be among the n best of their depth, which leaves n log n
    candidates a depth for any vocabulary. Ties go to the shallower node, then to the lower rank.
    """
    count, batch = budget.size - 1, logits.shape[0]
    width = min(count, logits.shape[-1])
    if drawing.has_processors:  # a grammar drops later the nodes that a branch forbids
        first = drawing.apply_processors(logits[:, :1])
        below = drawing.apply_processors(logits[:, 1:], any_branch=True)
        logits = jnp.concatenate([first, below], 1)
    log_probs, ids = sampling.top_k(sampling.log_probs(logits[:, : budget.max_depth]), width)
    ids = drawing.target_ids(ids)
    root = jnp.full((batch, width), -1)
    above = Candidates(ids[:, 0], log_probs[:, 0], root, _index(batch, width))
    depths, start = [above], width
    for depth in range(1, budget.max_depth):
        path, rank = _pairs(above.scores.shape[1], width, count)
        scores = above.scores[:, path] + log_probs[:, depth, rank]
        scores, best = lax.top_k(scores, min(count, rank.size))
        parents = jnp.take_along_axis(above.index, jnp.asarray(path)[best], 1)
        tokens = jnp.take_along_axis(ids[:, depth], jnp.asarray(rank)[best], 1)
        above = Candidates(tokens, scores, parents, start + _index(batch, best.shape[1]))
        depths.append(above)
        start += best.shape[1]
    candidates = Candidates(*(jnp.concatenate(parts, 1) for parts in zip(*depths, strict=True)))
    return expand.likeliest_tree(drawing, candidates, budget.size, budget.max_depth)


def _index(batch: int, size: int) -> Array:
    return jnp.broadcast_to(jnp.arange(size), (batch, size))


def _pairs(paths: int, width: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks (i, j) of a path and its child that may be among the ``count`` likeliest."""
    ranks = np.indices((paths, width)).reshape(2, -1)
    return tuple(ranks[:, (ranks[0] + 1) * (ranks[1] + 1) <= count])
