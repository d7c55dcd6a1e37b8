"""Growing a draft tree depth by depth, in static shapes, with any head that gives logits.

``jspec.drafters.trees.drawing`` describes frontiers. There are two kinds of trees besides chains:

* ``ranked``: a ``StaticTree``. The children of a node are the likeliest tokens, draws without
  replacement, or the likeliest tokens and one draw;
* ``dynamic``: EAGLE-2's tree (arXiv 2406.16858), which follows the head's confidence. Its children
  are the likeliest tokens, because no rule is exact for draws that are dropped for their values.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.core import sampling
from jspec.core.history import root_token
from jspec.core.static_trees import StaticTree
from jspec.core.types import Array, Draft
from jspec.drafters.trees.drawing import Children, Drawing, Feed, Frontier, all_depths, largest
from jspec.drafters.trees.tree_settings import Dynamic


class _Nodes(NamedTuple):
    """The nodes so far, [B, n]."""

    tokens: Array
    valid: Array
    sampled: Array


def ranked(
    drawing: Drawing, tree: StaticTree, logits: Array, feed: Feed, frontier: Frontier
) -> Draft:
    """Return a static tree; arguments as for ``chain``, but depths and slots are static."""
    parents, ranks, depths, widths = (
        np.array(part) for part in (tree.parents, tree.ranks, tree.depth, tree.widths)
    )
    root = root_token(drawing.history)[:, None]
    nodes = _Nodes(root, jnp.ones_like(root, dtype=bool), jnp.zeros_like(root, dtype=bool))
    inner, distributions, slot = np.zeros(1, int), [], 0  # ``inner`` nodes have children
    for depth in range(tree.max_depth):
        drafted = None
        if drawing.has_processors:
            drafted = nodes.tokens[:, _paths(parents, inner, depth)]
        children = drawing.children(logits, widths[inner], jnp.asarray(inner), depth, drafted)
        if children.distribution is not None:
            rows = np.arange(inner.size) % children.distribution.shape[1]
            distributions.append(children.distribution[:, rows])
        below = np.flatnonzero(depths == depth + 1)
        row = np.searchsorted(inner, parents[below])
        new = _children(drawing, nodes.valid[:, parents[below]], children, row, ranks[below])
        nodes = _Nodes(*(jnp.concatenate(pair, 1) for pair in zip(nodes, new, strict=True)))
        inner = below[widths[below] > 0]
        if inner.size:
            rows = row[inner - below[0]]
            frontier, logits = feed(frontier, nodes.tokens[:, inner], rows, depth + 1, slot)
            slot += inner.size
    # A row for every node; leaves, which have no children, repeat another node's row.
    row = np.maximum(np.cumsum(widths > 0) - 1, 0)
    return Draft(
        tokens=nodes.tokens,
        parents=np.array(parents, np.int32),
        valid=nodes.valid,
        logits=jnp.concatenate(distributions, 1)[:, row] if distributions else None,
        sampled=nodes.sampled if distributions else None,
        draft_to_target=drawing.draft_to_target if distributions else None,
        max_depth=tree.max_depth,
    )


def _paths(parents: np.ndarray, nodes: np.ndarray, depth: int) -> np.ndarray:
    """Return the nodes from below the root to each of ``nodes`` [F] at ``depth``: [F, depth]."""
    path = np.zeros((nodes.size, depth), int)
    for above in reversed(range(depth)):
        path[:, above], nodes = nodes, parents[nodes]
    return path


def _children(
    drawing: Drawing, valid: Array, children: Children, row: np.ndarray, rank: np.ndarray
) -> _Nodes:
    """Return child ``rank`` [n] of frontier node ``row`` [n]; ``valid`` [B, n] are the parents."""
    pick = lambda x: x[:, row % x.shape[1], rank]
    if children.valid is not None:
        valid &= pick(children.valid)
    sampled = jnp.zeros_like(valid) if children.sampled is None else pick(children.sampled) & valid
    return _Nodes(jnp.where(valid, drawing.target_ids(pick(children.ids)), 0), valid, sampled)


class Candidates(NamedTuple):
    """Candidate nodes of a tree, [B, n]."""

    tokens: Array  # target ids
    scores: Array  # log of the product of probabilities along the path
    parents: Array  # index of the parent; -1 for the root
    index: Array  # in the order of expansion

    def take(self, rows: Array) -> "Candidates":
        """Return the candidates at ``rows`` [B, n]."""
        return Candidates(*(jnp.take_along_axis(x, rows, 1) for x in self))


def dynamic(
    drawing: Drawing, tree: Dynamic, logits: Array, feed: Feed, frontier: Any, unrolled: bool
) -> Draft:
    """Return EAGLE-2's tree: expand the most confident nodes, then keep the most confident ones.

    A node's confidence is the product of the head's probabilities along its path. Each depth feeds
    the k most confident nodes of the depth above and expands each to its k likeliest children. Of
    all these candidates the N - 1 most confident are kept. No child is more confident than its
    parent, and ties go to the node that was expanded first, so parents stay with their children.

    Arguments as for ``chain``; ``frontier`` holds the root k times, or once if ``unrolled``.
    """
    top_k, batch = tree.top_k, logits.shape[0]

    def likeliest(logits: Array, drafted: Array | None) -> tuple[Array, Array]:
        logits = drawing.apply_processors(logits, drafted)
        scores, ids = largest(sampling.log_probs(logits), top_k)
        return scores, drawing.target_ids(ids)

    def step(carry, depth: int | Array):
        frontier, fed, rows, drafted = carry
        frontier, logits = feed(frontier, fed.tokens, rows, depth, (depth - 1) * top_k)
        if drafted is not None:
            drafted = jnp.take_along_axis(drafted, rows[..., None], 1)
            drafted = drafted.at[:, :, depth - 1].set(fed.tokens)
        scores, tokens = likeliest(logits, drafted)
        flat = lambda x: jnp.broadcast_to(x, (batch, top_k, top_k)).reshape(batch, -1)
        order = jnp.arange(top_k**2, dtype=jnp.int32).reshape(top_k, top_k)
        candidates = Candidates(
            flat(tokens),
            flat(fed.scores[..., None] + scores),
            flat(fed.index[..., None]),
            flat(top_k + (depth - 1) * top_k**2 + order),
        )
        _, best = largest(candidates.scores, top_k)
        return (frontier, candidates.take(best), best // top_k, drafted), candidates

    drafted = None
    if drawing.has_processors:
        drafted = jnp.full((batch, top_k, tree.max_depth), -1, jnp.int32)
    scores, tokens = (x[:, 0] for x in likeliest(logits, drafted))
    order = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.int32), (batch, top_k))
    first = Candidates(tokens, scores, jnp.full_like(order, -1), order)
    carry = frontier, first, jnp.zeros_like(order), drafted
    _, candidates = all_depths(step, carry, first, tree.max_depth, unrolled)
    return likeliest_tree(drawing, candidates, tree.size, tree.max_depth)


def likeliest_tree(drawing: Drawing, candidates: Candidates, size: int, max_depth: int) -> Draft:
    """Return the tree of the root and the ``size`` - 1 candidates of the highest scores."""
    _, best = largest(candidates.scores, size - 1)
    chosen = candidates.take(jnp.sort(best, -1))
    before = (chosen.index[:, None, :] < chosen.parents[:, :, None]).sum(-1, dtype=jnp.int32)
    parents = jnp.where(chosen.parents < 0, 0, 1 + before)
    valid = chosen.scores > -jnp.inf
    lead = lambda x, fill: jnp.pad(x, ((0, 0), (1, 0)), constant_values=fill)
    tokens = lead(jnp.where(valid, chosen.tokens, 0), 0)
    return Draft(
        tokens=tokens.at[:, 0].set(root_token(drawing.history)),
        parents=lead(jnp.where(valid, parents, 0), -1),
        valid=lead(valid, True),
        max_depth=max_depth,
    )
