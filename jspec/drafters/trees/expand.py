"""Growing a draft level by level, in static shapes, by any head that says what may come next.

The nodes whose children are wanted next are a *frontier* of F nodes; a head is a function that
takes a frontier in and gives a row of logits for each of its nodes. Three kinds of trees:

* ``chain``: one child a node;
* ``ranked``: a static ``StaticTree``. Its children are the likeliest tokens, draws without replacement,
  or the likeliest and one draw;
* ``dynamic``: EAGLE-2's tree (arXiv 2406.16858), whose shape follows the head's confidence. Its
  children are the likeliest tokens: a node that was drawn may not be dropped for its value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import sampling, trees
from jspec.core.history import root_token
from jspec.core.trees import StaticTree
from jspec.core.types import Array, Draft
from jspec.drafters.trees.drawing import Children, Drawing, largest
from jspec.drafters.trees.tree_settings import Dynamic

Frontier = Any
# feed(frontier, tokens [B, F'], parents [F'] or [B, F'], depth, slot) -> (frontier', logits)
#
# ``tokens`` become the frontier. ``parents`` index the frontier before; ``depth`` is that of the
# tokens, the root's being 0; ``slot`` counts the nodes fed before in this round. All but the
# frontier and its tokens may be static. The logits are [B, F', Vd], or [B, 1, Vd] for all alike.
Feed = Callable[..., tuple[Frontier, Array]]


class Level(NamedTuple):
    """The nodes of a chain at one depth, [B], or at several, [B, n]."""

    tokens: Array  # int32, target ids
    distribution: Array | None  # [..., Vd], what they were drawn from
    likely: Array | None  # the product of probabilities from the root on, where it counts

    @property
    def carried(self) -> "Level":
        """What the next depth reads of it."""
        return self._replace(distribution=None)


def grow(
    drawing: Drawing,
    tree: StaticTree | Dynamic,
    logits: Array,
    feed: Feed,
    frontier: Frontier,
    *,
    unrolled: bool = False,
) -> Draft:
    """A draft of any shape; arguments as for ``chain``, ``dynamic`` and ``ranked``."""
    if isinstance(tree, Dynamic):
        return dynamic(drawing, tree, logits, feed, frontier, unrolled=unrolled)
    if max(tree.widths) == 1:
        return chain(drawing, tree.max_depth, logits, feed, frontier, unrolled=unrolled)
    return ranked(drawing, tree, logits, feed, frontier)


def chain(
    drawing: Drawing,
    depth: int,
    logits: Array,
    feed: Feed,
    frontier: Frontier,
    *,
    unrolled: bool = False,
) -> Draft:
    """A chain of ``depth`` nodes, of which those behind its end are not valid.

    Where it ends is decided by the tokens before, so no law is changed (SpecDec++, arXiv
    2405.19715, has a trained head decide). Where all rows have ended, the head does not run, unless
    it is ``unrolled``.

    Args:
      drawing: how children are chosen.
      depth: K.
      logits: after the root, [B, 1, Vd].
      feed: takes in drafted tokens; depth and slot are traced, but where ``unrolled``.
      frontier: the root.
      unrolled: whether ``feed`` needs depth and slot static, its weights being those of a depth.
    """
    only, least = np.ones(1, int), drawing.confidence_threshold

    def draw(logits: Array, node: int | Array, said: Array | None, likely: Array | None) -> Level:
        logits = drawing.shaped(logits, said)
        drawn = drawing.children_of(logits, only, jnp.int32(node)[None], node)
        ids = drawn.ids[:, :, 0]
        if likely is not None:
            likely *= sampling.chance(logits, drawn.distribution, ids, drawing.request.sampling)
        return Level(drawing.target_ids(ids), drawn.distribution, likely)

    def step(carry: tuple[Frontier, Array | None, Level], node: int | Array):
        frontier, said, before = carry
        frontier, logits = feed(frontier, before.tokens, only - 1, node, node - 1)
        if said is not None:
            said = said.at[:, :, node - 1].set(before.tokens)
        level = draw(logits, node, said, before.likely)
        return (frontier, said, level.carried), level

    batch = logits.shape[0]
    said = jnp.full((batch, 1, depth), -1, jnp.int32) if drawing.shapes else None
    first = draw(logits, 0, said, None if least is None else jnp.ones((batch, 1)))
    levels = _levels(step, (frontier, said, first.carried), first, depth, unrolled, least)
    draft = chained(drawing, levels.tokens, levels.distribution)
    return draft if least is None else ended(draft, levels.likely, least)


def scan_likely(step: Callable, carry: tuple, nodes: Array, least: float | None) -> tuple:
    """``lax.scan`` over the depths of a chain, until no row is ``least`` likely any more.

    ``carry`` ends with the ``Level`` before; ``step`` gives a level. Those not come to are zeros.
    """
    if least is None or not nodes.size:
        return lax.scan(step, carry, nodes)
    # Not a scan of ``lax.cond``: what a branch reads, the head's cache, may be copied for it.
    _, level = jax.eval_shape(step, carry, nodes[0])
    levels = jax.tree.map(lambda x: jnp.zeros((nodes.size, *x.shape), x.dtype), level)

    def goes_on(loop: tuple) -> Array:
        index, carry, _ = loop
        return (index < nodes.size) & (carry[-1].likely >= least).any()

    def advance(loop: tuple) -> tuple:
        index, carry, levels = loop
        carry, level = step(carry, nodes[index])
        put = lambda all_of_them, one: all_of_them.at[index].set(one)
        return index + 1, carry, jax.tree.map(put, levels, level)

    _, carry, levels = lax.while_loop(goes_on, advance, (jnp.int32(0), carry, levels))
    return carry, levels


def ended(draft: Draft, likely: Array, least: float) -> Draft:
    """A chain whose nodes 1 to K are as ``likely`` [B, K], cut behind the first below ``least``."""
    goes_on = jnp.cumprod(likely[:, :-1] >= least, 1, dtype=jnp.int32).astype(bool)
    valid = jnp.pad(goes_on, ((0, 0), (2, 0)), constant_values=True)  # of the root and its child
    return draft.replace(valid=draft.valid & valid)


def chained(drawing: Drawing, drafted: Array, distributions: Array | None) -> Draft:
    """The draft of a chain of target ids [B, K], drawn from ``laws`` [B, K, Vd] if there are."""
    if distributions is not None:  # and a row for the leaf, which has no children
        distributions = jnp.concatenate([distributions, jnp.zeros_like(distributions[:, :1])], 1)
    drafted = jnp.concatenate([root_token(drawing.history)[:, None], drafted], 1)
    depth = drafted.shape[1] - 1
    return Draft(
        tokens=drafted,
        parents=trees.chain(depth),
        valid=jnp.ones_like(drafted, dtype=bool),
        logits=distributions,
        draft_to_target=None if distributions is None else drawing.draft_to_target,
        max_depth=depth,
    )


def _levels(
    step: Callable,
    carry: Any,
    first: Any,
    max_depth: int,
    unrolled: bool,
    least: float | None = None,
) -> Any:
    """``first`` and what ``step`` gives at depths 1, 2, ..., joined along axis 1.

    One program serves all depths, or each has its own where ``unrolled``. ``least`` is of
    ``scan_likely``; unrolled, what is carried may grow from depth to depth, and all are run.
    """
    if unrolled:
        found = [first]
        for depth in range(1, max_depth):
            carry, level = step(carry, depth)
            found.append(level)
        return jax.tree.map(lambda *levels: jnp.concatenate(levels, 1), *found)
    _, later = scan_likely(step, carry, jnp.arange(1, max_depth, dtype=jnp.int32), least)
    flat = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    return jax.tree.map(lambda a, b: jnp.concatenate([a, flat(b)], 1), first, later)


def ranked(
    drawing: Drawing, tree: StaticTree, logits: Array, feed: Feed, frontier: Frontier
) -> Draft:
    """A tree of a static shape; arguments as for ``chain``, but depths and slots are static."""
    parents, ranks, depths, widths = (
        np.array(part) for part in (tree.parents, tree.ranks, tree.depth, tree.widths)
    )
    root = root_token(drawing.history)[:, None]
    grown = _Grown(root, jnp.ones_like(root, dtype=bool), jnp.zeros_like(root, dtype=bool))
    inner, distributions, slot = np.zeros(1, int), [], 0  # nodes of a level that have children
    for depth in range(tree.max_depth):
        children = drawing.children(
            logits,
            widths[inner],
            jnp.asarray(inner),
            depth,
            grown.tokens[:, _paths(parents, inner, depth)] if drawing.shapes else None,
        )
        if children.distribution is not None:
            distributions.append(
                children.distribution[:, np.arange(inner.size) % children.distribution.shape[1]]
            )
        below = np.flatnonzero(depths == depth + 1)
        row = np.searchsorted(inner, parents[below])
        grown = _append(grown, drawing, children, parents[below], row, ranks[below])
        inner = below[widths[below] > 0]
        if inner.size:
            rows = row[inner - below[0]]
            frontier, logits = feed(frontier, grown.tokens[:, inner], rows, depth + 1, slot)
            slot += inner.size
    # A row for every node; leaves, which have no law, repeat another's.
    row = np.maximum(np.cumsum(widths > 0) - 1, 0)
    return Draft(
        tokens=grown.tokens,
        parents=np.array(parents, np.int32),
        valid=grown.valid,
        logits=jnp.concatenate(distributions, 1)[:, row] if distributions else None,
        sampled=grown.sampled if distributions else None,
        draft_to_target=drawing.draft_to_target if distributions else None,
        max_depth=tree.max_depth,
    )


def _paths(parents: np.ndarray, nodes: np.ndarray, depth: int) -> np.ndarray:
    """The nodes from below the root down to each of ``nodes`` [F] at ``depth``: [F, depth]."""
    path = np.zeros((nodes.size, depth), int)
    for level in reversed(range(depth)):
        path[:, level], nodes = nodes, parents[nodes]
    return path


class _Grown(NamedTuple):
    """The nodes so far, [B, n]."""

    tokens: Array
    valid: Array
    sampled: Array


def _append(
    grown: _Grown,
    drawing: Drawing,
    children: Children,
    parents: np.ndarray,
    row: np.ndarray,
    rank: np.ndarray,
) -> _Grown:
    """Adds a level: child ``rank`` [n] of frontier node ``row`` [n], whose node is ``parents``."""
    pick = lambda x: x[:, row % x.shape[1], rank]
    valid = grown.valid[:, parents]
    if children.valid is not None:
        valid &= pick(children.valid)
    sampled = jnp.zeros_like(valid) if children.sampled is None else pick(children.sampled) & valid
    drafted = jnp.where(valid, drawing.target_ids(pick(children.ids)), 0)
    join = lambda old, new: jnp.concatenate([old, new], 1)
    return _Grown(
        join(grown.tokens, drafted), join(grown.valid, valid), join(grown.sampled, sampled)
    )


def dynamic(
    drawing: Drawing,
    budget: Dynamic,
    logits: Array,
    feed: Feed,
    frontier: Frontier,
    *,
    unrolled: bool = False,
) -> Draft:
    """EAGLE-2's tree: widen where the head is confident, then keep the most confident nodes.

    A node's confidence is the product of the head's probabilities along its path. Each level feeds
    the k most confident nodes of the level above and looks at k children of each; of all that were
    looked at, the N - 1 most confident stay. No child is more confident than its parent, and ties
    go to the node that was looked at first, so parents stay with their children.

    Arguments as for ``chain``; ``frontier`` holds the root k times.
    """
    top_k, batch = budget.top_k, logits.shape[0]

    def likeliest(logits: Array, said: Array | None) -> tuple[Array, Array]:
        logits = drawing.shaped(logits, said)
        scores, ids = largest(sampling.log_probs(logits), top_k)
        return scores, drawing.target_ids(ids)

    def step(carry, depth: int | Array):
        frontier, fed, rows, said = carry
        frontier, logits = feed(frontier, fed.tokens, rows, depth, (depth - 1) * top_k)
        if said is not None:
            said = jnp.take_along_axis(said, rows[..., None], 1)
            said = said.at[:, :, depth - 1].set(fed.tokens)
        scores, drafted = likeliest(logits, said)
        flat = lambda x: jnp.broadcast_to(x, (batch, top_k, top_k)).reshape(batch, -1)
        order = jnp.arange(top_k**2, dtype=jnp.int32).reshape(top_k, top_k)
        looked_at = Candidates(
            flat(drafted),
            flat(fed.scores[..., None] + scores),
            flat(fed.index[..., None]),
            flat(top_k + (depth - 1) * top_k**2 + order),
        )
        _, best = largest(looked_at.scores, top_k)
        return (frontier, looked_at.take(best), best // top_k, said), looked_at

    said = None
    if drawing.shapes:
        said = jnp.full((batch, top_k, budget.max_depth), -1, jnp.int32)
    scores, drafted = (x[:, 0] for x in likeliest(logits, said))
    order = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.int32), (batch, top_k))
    first = Candidates(drafted, scores, jnp.full_like(order, -1), order)
    carry = (frontier, first, jnp.zeros_like(order), said)
    every = _levels(step, carry, first, budget.max_depth, unrolled)
    _, best = largest(every.scores, budget.size - 1)
    return rerooted(drawing, every.take(jnp.sort(best, -1)), budget.max_depth)


class Candidates(NamedTuple):
    """Nodes that were looked at, [B, n]: what may become a tree."""

    tokens: Array  # target ids
    scores: Array  # log of the product of probabilities along the path
    parents: Array  # index of the parent; -1 for the root
    index: Array  # in the order of being looked at

    def take(self, rows: Array) -> "Candidates":
        """Those at ``rows`` [B, n]."""
        return Candidates(*(jnp.take_along_axis(x, rows, 1) for x in self))


def rerooted(drawing: Drawing, kept: Candidates, max_depth: int) -> Draft:
    """The draft of the candidates that were kept, in ascending order, under the root."""
    before = (kept.index[:, None, :] < kept.parents[:, :, None]).sum(-1, dtype=jnp.int32)
    parents = jnp.where(kept.parents < 0, 0, 1 + before)
    valid = kept.scores > -jnp.inf
    lead = lambda x, fill: jnp.pad(x, ((0, 0), (1, 0)), constant_values=fill)
    drafted = lead(jnp.where(valid, kept.tokens, 0), 0)
    return Draft(
        tokens=drafted.at[:, 0].set(root_token(drawing.history)),
        parents=lead(jnp.where(valid, parents, 0), -1),
        valid=lead(valid, True),
        max_depth=max_depth,
    )
