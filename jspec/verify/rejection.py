"""Speculative sampling, token by token (arXiv 2211.17192, 2302.01318), on chains and on trees.

On a tree, the children of a node are judged one after the other, each against the residual that the
refusal of those before it left (recursive rejection sampling: arXiv 2305.09781 for children drawn
with replacement, 2402.12374 and 2402.14160 for those drawn without).
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.chain import chain_distributions, conclude, is_chain
from jspec.verify.nodes import Nodes, one_hot, take


def rejection(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array, *, distribution: Proposal = "mixed"
) -> tuple[Array, Array, Array]:
    """Accepts a token x where u < p(x) / q(x); a refusal leaves the residual max(p - q, 0).

    q is the law that the child was drawn from, given its siblings before it; that of a point mass
    is 1 at its token. From the root, the walk goes on from the first child accepted.

    Args:
      warped: the target's warped logits [B, N, V].
      draft: the proposal; siblings hold distinct tokens, unless ``law`` is "iid".
      tree: its shape.
      coins: uniforms in [0, 1), [B, N]; coin i decides node i, coin 0 is not used.
      law: static, that of siblings: "iid", "points_last", or "mixed" for all others.

    Returns:
      path [B, max_depth+1], num_accepted [B], next_logits [B, V]: the residual at the path's end,
      or the target's law where the end has no children.
    """
    if is_chain(draft):
        return _chain(processed, draft, tree, uniforms)
    nodes = Nodes(processed, draft, tree, uniforms, distribution)
    end, left = _walk(nodes)
    return *nodes.path_to(end), jnp.log(left)


with_replacement = functools.partial(rejection, distribution="iid")
points_last = functools.partial(rejection, distribution="points_last")


def _chain(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array
) -> tuple[Array, Array, Array]:
    distributions = chain_distributions(processed, draft)
    # u q < p, in logs. Strict, so that p(x) = 0 is never accepted, not even by u = 0.
    accept = jnp.log(uniforms[:, 1:]) < distributions.log_ratio
    num_accepted = jnp.cumprod(accept & draft.valid[:, 1:], 1, dtype=jnp.int32).sum(1)
    return conclude(distributions, draft, tree, num_accepted, scale=None)


def _walk(nodes: Nodes) -> tuple[Array, Array]:
    """Walks down from the root: the last node accepted [B], and the law after it [B, V].

    The laws of one node a row are held at a time. The loops run while some row descends and while
    some child is refused, so a round that accepts at sight costs little.
    """

    def descend(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        node, distribution, going = carry
        waiting = nodes.children(node) & going[:, None]
        found = _judge(
            nodes, _Siblings(nodes.target_probs(node), *nodes.draft_probs(node), waiting)
        )
        return (
            jnp.where(found.accepted, found.child, node),
            jnp.where(going[:, None], found.siblings.p, distribution),
            found.accepted,
        )

    root = jnp.zeros_like(nodes.tree.parents[:, 0])
    start = (root, jnp.zeros_like(nodes.processed[:, 0]), jnp.ones(root.shape, bool))
    end, distribution, _ = lax.while_loop(lambda carry: carry[2].any(), descend, start)
    return end, distribution


class _Siblings(NamedTuple):
    """The children of one node a row, some of them refused already."""

    p: Array  # [B, V], the target's law; once a child is refused, what that left
    q: Array  # [B, V], weights of the law of the next child drawn
    q_mass: Array  # [B]
    waiting: Array  # [B, N] bool, children that are not judged yet


class _Judged(NamedTuple):
    """A child of each row under its coin; a row that has none left is neither."""

    siblings: _Siblings
    child: Array  # [B]
    accepted: Array  # [B] bool
    refused: Array  # [B] bool


def _judge(nodes: Nodes, siblings: _Siblings) -> _Judged:
    """Judges one child after the other, until one is accepted or none is left."""

    batch = jnp.arange(siblings.p.shape[0])

    def toss(siblings: _Siblings) -> _Judged:
        child, exists = nodes.first(siblings.waiting), siblings.waiting.any(1)
        token = take(nodes.draft.tokens, child)
        at_p, at_q = take(siblings.p, token), take(siblings.q, token)
        at_p, at_q = nodes.odds(child, at_p, at_q, siblings.q_mass)
        # Strict, so that p(x) = 0 is never accepted, not even by u = 0.
        passes = take(nodes.uniforms, child) * at_q < at_p
        return _Judged(siblings, child, exists & passes, exists & ~passes)

    def refuse(judged: _Judged) -> _Judged:
        p, q, q_mass, waiting = judged.siblings
        child, refused = judged.child, judged.refused
        rest = nodes.residual(child, p, q, q_mass)
        mass = rest.sum(-1, keepdims=True)
        # Nothing is left only where p = q up to rounding, and then nothing is refused either.
        left = refused[:, None] & (mass > 0)
        # The mass is never below 0: so q is read before it is written, not copied.
        drops = refused & nodes.leaves_distribution(child) & (mass[:, 0] >= 0)
        token = jnp.where(drops, take(nodes.draft.tokens, child), q.shape[1])
        q = q.at[batch, token].set(0, mode="drop")
        again = toss(
            _Siblings(
                p=jnp.where(left, rest / jnp.where(left, mass, 1), p),
                q=q,
                q_mass=q.sum(-1),
                waiting=waiting & ~one_hot(child, waiting.shape[1]),
            )
        )
        return _Judged(
            again.siblings,
            child=jnp.where(refused, again.child, child),
            accepted=judged.accepted | refused & again.accepted,
            refused=refused & again.refused,
        )

    return lax.while_loop(lambda judged: judged.refused.any(), refuse, toss(siblings))
