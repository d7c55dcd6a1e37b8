"""Block verification: a chain is judged as a whole, and so is a tree (traversal verification).

Both let a good later token make up for a doubtful earlier one, so that no less is accepted than
token by token (arXiv 2403.10444 for chains, 2505.12398 for trees).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.chain import ChainDistributions, chain_distributions, conclude, is_chain
from jspec.verify.nodes import Nodes, one_hot, take


def block(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array, *, distribution: Proposal = "mixed"
) -> tuple[Array, Array, Array]:
    """Accepts the path to one node, the first in post-order that passes its coin.

    Every node has a probability P of acceptance, 1 at the root and min(1, P p(x) / q(x)) at a
    child. A node is judged after all its children, whose refusal each leaves the residual
    max(P p - q, 0), of mass R, and P becomes R / (R + 1 - P). On a chain the last node that
    passes ends the path. A tree holds the laws of one node a depth, and looks at up to N of them.

    Arguments and results as for ``jspec.verify.rejection``. The coins must be fresh in every
    round: keyed by absolute position they bias the text from the second round on.
    """
    if is_chain(draft):
        return _chain(processed, draft, tree, uniforms)
    traversal = _Traversal(processed, draft, tree, uniforms, distribution)
    end, left = traversal.run()
    return *traversal.path_to(end), jnp.log(left)


with_replacement = functools.partial(block, distribution="iid")
points_last = functools.partial(block, distribution="points_last")


# ------------------------------------------------------------------------------------- chains


def _chain(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array
) -> tuple[Array, Array, Array]:
    """P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)): node i passes with probability h_i.

    h_i = R_i / (R_i + 1 - P_i), where R_i is the mass of max(P_i p_{i+1} - q_{i+1}, 0), and
    h_i = P_i at the last drafted node.
    """
    distributions = chain_distributions(processed, draft)
    valid = draft.valid[:, 1:]
    keep = jnp.where(valid, distributions.log_ratio, -jnp.inf)
    log_joint = _clipped_cumsum(keep)  # log P_i, [B, K]
    rest = _residual_mass(
        distributions, draft, log_joint
    )  # R_i, [B, K]; the last column is not used
    joint = jnp.exp(log_joint)
    threshold = _passing(rest, joint)
    is_last = valid & ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    threshold = jnp.where(is_last, joint, threshold)
    passed = valid & (uniforms[:, 1:] < threshold)
    num_accepted = jnp.where(passed, jnp.arange(1, passed.shape[1] + 1), 0).max(1, initial=0)
    reached = jnp.pad(log_joint, ((0, 0), (1, 0)))  # log P_0 = 0
    scale = jnp.take_along_axis(reached, num_accepted[:, None], 1)
    return conclude(distributions, draft, tree, num_accepted, scale)


def _passing(rest: Array, joint: Array) -> Array:
    """R / (R + 1 - P). 0 / 0 means that all so far and the next law agree: passing is certain."""
    missing = rest + 1 - joint
    return jnp.where(missing > 0, rest / jnp.where(missing > 0, missing, 1), 1)


def _clipped_cumsum(log_ratio: Array) -> Array:
    """log P_i = min(0, log P_{i-1} + log r_i) along a chain, [B, K]."""
    log_joint, columns = jnp.zeros(log_ratio.shape[:1], log_ratio.dtype), []
    for index in range(log_ratio.shape[1]):
        log_joint = jnp.minimum(0, log_joint + log_ratio[:, index])
        columns.append(log_joint)
    return jnp.stack(columns, 1) if columns else log_ratio


def _residual_mass(distributions: ChainDistributions, draft: Draft, log_joint: Array) -> Array:
    """R_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0) for i = 1..K-1, then 0: [B, K]."""
    log_p, joint = distributions.log_p[:, 1:-1], log_joint[:, :-1]
    if draft.draft_to_target is not None:
        log_p = log_p[:, :, draft.draft_to_target]
    p = jnp.exp(joint[:, :, None] + log_p)
    mass = jnp.maximum(p - jnp.exp(distributions.log_q[:, 1:]), 0).sum(-1)
    if draft.draft_to_target is not None:  # q is 0 outside of the draft's vocabulary
        mass += jnp.maximum(jnp.exp(joint) - p.sum(-1), 0)
    if draft.sampled is not None:  # of a point mass: all that is not on its token
        other = jnp.exp(joint) * -jnp.expm1(distributions.log_p_token[:, 1:])
        mass = jnp.where(draft.sampled[:, 2:], mass, other)
    return jnp.pad(mass, ((0, 0), (0, 1)))[:, : log_joint.shape[1]]


# -------------------------------------------------------------------------------------- trees


class _Stack(NamedTuple):
    """The root and the opened nodes below it down to where each row stands, one a depth."""

    p: Array  # [B, D, V], weights of the target's law; once a child is refused, what that left
    q: Array  # [B, D, V], weights of the law of the next child drawn
    joint: Array  # [B, D], P
    factor: Array  # [B, D], of p: times it, its mass is P
    q_mass: Array  # [B, D]


class _Place(NamedTuple):
    """Where each row stands in its traversal."""

    stack: _Stack
    node: Array  # [B], the top of the stack; where ``going`` is over, the end
    waiting: Array  # [B, N] bool, nodes that are neither judged nor opened yet
    going: Array  # [B] bool


@dataclasses.dataclass(frozen=True)
class _Traversal(Nodes):
    """Post-order over a tree. Nodes with children are opened, and judged once these are refused."""

    def run(self) -> tuple[Array, Array]:
        """The first node that is accepted [B], and the law after it [B, V]."""
        place = lax.while_loop(lambda place: place.going.any(), self._judge, self._start())
        on_top = self._opens(place.node) | (place.node == 0)
        depth = jnp.where(on_top, take(self.tree.depth, place.node), 0)
        residual, fresh = take(place.stack.p, depth), self.target_probs(place.node)
        return place.node, jnp.where(on_top[:, None], residual, fresh)

    def _start(self) -> _Place:
        """Every row at its root."""
        root = jnp.zeros_like(self.tree.parents[:, 0])
        below = max(self.tree.max_depth, 1) - 1
        stack = jax.tree.map(
            lambda x: jnp.pad(x[:, None], ((0, 0), (0, below), (0, 0))[: x.ndim + 1]),
            self._entry(root, jnp.ones(root.shape, self.processed.dtype)),
        )
        waiting = self.draft.valid & (jnp.arange(self.tree.parents.shape[1]) > 0)
        return _Place(stack, root, waiting, jnp.ones(root.shape, bool))

    def _judge(self, place: _Place) -> _Place:
        """Judges the next leaf below the node, or the node itself where there is none."""
        place = lax.while_loop(lambda place: self._next_to_open(place)[1].any(), self._dive, place)
        leaf, has_leaf, leaf_joint = self._next(place)
        separate_joint = take(place.stack.joint, take(self.tree.depth, place.node))
        subject = jnp.where(has_leaf, leaf, place.node)
        joint = jnp.where(has_leaf, leaf_joint, separate_joint)
        # Strict, so that P = 0 is never accepted. The root is committed already.
        accepted = (take(self.uniforms, subject) < joint) | (subject == 0)
        parent = jnp.where(has_leaf, place.node, take(self.tree.parents, place.node))
        refused = place.going & ~accepted
        return _Place(
            stack=self._refuse(place.stack, subject, parent, refused),
            node=jnp.where(place.going, jnp.where(accepted, subject, parent), place.node),
            waiting=place.waiting & ~one_hot(subject, place.waiting.shape[1]),
            going=refused,
        )

    def _next(self, place: _Place) -> tuple[Array, Array, Array]:
        """The next child of the node, whether there is one, and its P: each [B]."""
        own = place.waiting & (self.tree.parents == place.node[:, None])
        child, stack = self.first(own), place.stack
        top = (jnp.arange(own.shape[0]), take(self.tree.depth, place.node))
        at = (*top, take(self.draft.tokens, child))
        at_p, at_q = stack.p[at] * stack.factor[top], stack.q[at]
        at_p, at_q = self.odds(child, at_p, at_q, stack.q_mass[top])
        return child, own.any(1), jnp.minimum(1, at_p / at_q)

    def _next_to_open(self, place: _Place) -> tuple[Array, Array, Array]:
        """The same, if the next child is to be opened."""
        child, exists, joint = self._next(place)
        return child, place.going & exists & self._opens(child), joint

    def _opens(self, node: Array) -> Array:
        return self.children(node).any(1)

    def _dive(self, place: _Place) -> _Place:
        """Opens the next child, where it is to be opened."""
        child, dives, joint = self._next_to_open(place)
        dives &= joint >= 0  # always: so the stack is read before it is written, not copied
        put = _writer(place.stack, take(self.tree.depth, child), dives)
        is_child = one_hot(child, place.waiting.shape[1])
        return _Place(
            stack=_Stack(*map(put, place.stack, self._entry(child, joint))),
            node=jnp.where(dives, child, place.node),
            waiting=place.waiting & ~(is_child & dives[:, None]),
            going=place.going,
        )

    def _entry(self, node: Array, joint: Array) -> _Stack:
        """Of a node that is opened: [B, V] and [B]."""
        q, q_mass = self.draft_probs(node)
        return _Stack(self.target_probs(node), q, joint, joint, q_mass)

    def _refuse(self, stack: _Stack, child: Array, parent: Array, where: Array) -> _Stack:
        """What the refusal of ``child`` leaves to its ``parent``, which is on top."""
        depth = take(self.tree.depth, parent)
        p, q, joint, factor, q_mass = (take(rows, depth) for rows in stack)
        rest = self.residual(child, factor[:, None] * p, q, q_mass)
        mass = rest.sum(-1)
        passing, left = _passing(mass, joint), mass > 0
        # Nothing left: P was 0 and is, or P p = q up to rounding and nothing is refused.
        factor = jnp.where(left, passing / jnp.where(left, mass, 1), passing * factor)
        token, drops = take(self.draft.tokens, child), where & self.leaves_distribution(child)
        dropped = one_hot(token, q.shape[1]) & drops[:, None]
        q_mass = jnp.where(dropped, 0, q).sum(-1)
        # The mass is never below 0: so the stack is read before it is written, not copied.
        token = jnp.where(drops & (q_mass >= 0) & (mass >= 0), token, q.shape[1])
        put = _writer(stack, depth, where & (mass >= 0))
        return _Stack(
            p=put(stack.p, jnp.where(left[:, None], rest, p)),
            q=stack.q.at[jnp.arange(token.shape[0]), depth, token].set(0, mode="drop"),
            joint=put(stack.joint, passing),
            factor=put(stack.factor, factor),
            q_mass=put(stack.q_mass, q_mass),
        )


def _writer(stack: _Stack, depth: Array, where: Array) -> Callable[[Array, Array], Array]:
    """Writes one entry a row at ``depth`` [B], in the rows ``where`` [B]."""
    batch = jnp.arange(depth.shape[0])
    depth = jnp.where(where, depth, stack.joint.shape[1])  # out of bounds: dropped
    return lambda rows, entry: rows.at[batch, depth].set(entry, mode="drop")
