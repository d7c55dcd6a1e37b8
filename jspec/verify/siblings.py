"""Recursive rejection sampling on trees (arXiv 2402.12374, 2402.14160).

The walk judges the children of a node in turn, each against the residual that the refusals before
it left.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jspec.core.types import Array
from jspec.verify.nodes import Nodes, one_hot, take


def chances(nodes: Nodes) -> Array:
    """Return min(1, p / q) at the time when the walk judged each node [B, N]; NaN: not judged."""
    shape, dtype = nodes.draft.tokens.shape, nodes.processed.dtype
    return walk(nodes, jnp.full(shape, jnp.nan, dtype))[2]


class _Siblings(NamedTuple):
    """The children of one node per batch row, some of them refused already."""

    p: Array  # [B, V], the target's distribution, or the residual of the refusals so far
    q: Array  # [B, V], weights of the distribution of the next drawn child
    q_mass: Array  # [B]
    pending: Array  # [B, N] bool, children that are not judged yet
    chances: Array | None  # [B, N], of all nodes judged so far, else NaN; None: not recorded


class _Judged(NamedTuple):
    """The child that each row judged last; a row without children neither accepts nor refuses."""

    siblings: _Siblings
    child: Array  # [B]
    accepted: Array  # [B] bool
    refused: Array  # [B] bool


def walk(nodes: Nodes, chances: Array | None = None) -> tuple[Array, Array, Array | None]:
    """Walk down from the root; return the last accepted node [B], the next distribution [B, V].

    The third value is ``chances`` [B, N] with those of the judged nodes.

    The loop holds the distributions of one node per row. It runs while some row descends, so a
    round with early acceptance costs little.
    """

    def descend(carry: tuple) -> tuple:
        node, next_probs, active, chances = carry
        pending = nodes.children(node) & active[:, None]
        siblings = _Siblings(nodes.target_probs(node), *nodes.draft_probs(node), pending, chances)
        judged = _judge(nodes, siblings)
        next_probs = jnp.where(active[:, None], judged.siblings.p, next_probs)
        node = jnp.where(judged.accepted, judged.child, node)
        return node, next_probs, judged.accepted, judged.siblings.chances

    root = jnp.zeros_like(nodes.tree.parents[:, 0])
    start = (root, jnp.zeros_like(nodes.processed[:, 0]), jnp.ones(root.shape, bool), chances)
    end, next_probs, _, chances = lax.while_loop(lambda carry: carry[2].any(), descend, start)
    return end, next_probs, chances


def _judge(nodes: Nodes, siblings: _Siblings) -> _Judged:
    """Judge the children in turn, until one is accepted or none is left."""
    batch = jnp.arange(siblings.p.shape[0])

    def judge_next(siblings: _Siblings, waiting: Array | bool = True) -> _Judged:
        child, exists = nodes.first(siblings.pending), siblings.pending.any(1)
        token = take(nodes.draft.tokens, child)
        p, q = nodes.odds(child, take(siblings.p, token), take(siblings.q, token), siblings.q_mass)
        if siblings.chances is not None:
            here = one_hot(child, siblings.pending.shape[1]) & (exists & waiting)[:, None]
            chances = jnp.where(here, jnp.minimum(1, p / q)[:, None], siblings.chances)
            siblings = siblings._replace(chances=chances)
        # Strict, so that p(x) = 0 is never accepted, not even by u = 0.
        passes = take(nodes.uniforms, child) * q < p
        return _Judged(siblings, child, exists & passes, exists & ~passes)

    def refuse(judged: _Judged) -> _Judged:
        p, q, q_mass, pending, chances = judged.siblings
        child, refused = judged.child, judged.refused
        residual = nodes.residual(child, p, q, q_mass)
        mass = residual.sum(-1, keepdims=True)
        # The mass is 0 only where p = q up to rounding; then p stays as it is.
        update = refused[:, None] & (mass > 0)
        # The mass is never negative; the test makes XLA read q before it writes q, without a copy.
        drop = refused & nodes.drops(child) & (mass[:, 0] >= 0)
        token = jnp.where(drop, take(nodes.draft.tokens, child), q.shape[1])
        q = q.at[batch, token].set(0, mode="drop")
        p = jnp.where(update, residual / jnp.where(update, mass, 1), p)
        pending &= ~one_hot(child, pending.shape[1])
        then = judge_next(_Siblings(p, q, q.sum(-1), pending, chances), refused)
        accepted = judged.accepted | refused & then.accepted
        child = jnp.where(refused, then.child, child)
        return _Judged(then.siblings, child, accepted, refused & then.refused)

    return lax.while_loop(lambda judged: judged.refused.any(), refuse, judge_next(siblings))
