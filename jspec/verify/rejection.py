"""Speculative sampling, token by token (arXiv 2211.17192, 2302.01318), on chains and on trees.

On a tree, the walk judges the children of a node in turn, each against the residual that the
refusals before it left: recursive rejection sampling (arXiv 2402.12374, 2402.14160).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.chain import chain_probs, conclude, is_chain
from jspec.verify.nodes import Nodes, one_hot, path_to, take
from jspec.verify.rule import ALL, Rule


def rejection(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array, proposal: Proposal
) -> tuple[Array, Array, Array]:
    """Accept a token x where u < p(x) / q(x); a refusal leaves the residual max(p - q, 0).

    q is the distribution that the child was drawn from, given its earlier siblings; a deterministic
    child has q = 1 at its token. The walk starts at the root and descends to the accepted child.

    Args:
      processed: the target's processed logits [B, N, V].
      draft: siblings hold distinct tokens.
      tree: the draft's.
      uniforms: in [0, 1), [B, N]; entry i decides node i, entry 0 is not used.
      proposal: static, how the drafter chose the children of a node.

    Returns:
      path [B, max_depth+1], num_accepted [B], next_logits [B, V]: the residual at the path's end,
      or the target's distribution where the end has no children.
    """
    if is_chain(draft):
        probs = chain_probs(processed, draft)
        # u q < p, in logs. Strict, so that p(x) = 0 is never accepted, not even by u = 0.
        accept = jnp.log(uniforms[:, 1:]) < probs.log_ratio
        num_accepted = jnp.cumprod(accept & draft.valid[:, 1:], 1, dtype=jnp.int32).sum(1)
        return conclude(probs, draft, tree, num_accepted, scale=None)
    end, next_probs, _ = _walk(Nodes(processed, draft, tree, uniforms, proposal))
    return path_to(end, tree), take(tree.depth, end), jnp.log(next_probs)


REJECTION = Rule(
    "rejection",
    rejection,
    "round",
    ALL,
    summary="token rule with p/q: accept by ratio, else draw from the residual",
    aliases=("standard", "probabilistic"),
)


def chances(nodes: Nodes) -> Array:
    """Return min(1, p / q) at the time when the walk judged each node [B, N]; NaN: not judged."""
    shape, dtype = nodes.draft.tokens.shape, nodes.processed.dtype
    return _walk(nodes, jnp.full(shape, jnp.nan, dtype))[2]


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


def _walk(nodes: Nodes, chances: Array | None = None) -> tuple[Array, Array, Array | None]:
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
