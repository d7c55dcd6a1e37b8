"""Block verification: chains and trees are judged as a whole (trees by traversal verification).

A likely later token makes up for an unlikely earlier one, so the rule accepts at least as much as
token-by-token rejection (arXiv 2403.10444 for chains, 2505.12398 for trees).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.chain import ChainProbs, chain_probs, conclude, is_chain
from jspec.verify.nodes import Nodes, one_hot, path_to, take
from jspec.verify.rule import ALL, Rule


def block(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array, proposal: Proposal
) -> tuple[Array, Array, Array]:
    """Accept the path to one node: the first in post-order that passes its uniform.

    Every node has a probability P of acceptance, 1 at the root and min(1, P p(x) / q(x)) at a
    child. A node is judged after all its children. Each refused child leaves the residual
    max(P p - q, 0), of mass R, and P becomes R / (R + 1 - P). On a chain the last node that passes
    ends the path. A tree holds the distributions of one node per depth, and visits up to N nodes.

    Arguments and results as for ``jspec.verify.rejection``. The uniforms must be fresh in every
    round: keyed by absolute position they bias the text from the second round on.
    """
    if is_chain(draft):
        return _chain(processed, draft, tree, uniforms)
    end, next_probs = _Traversal(processed, draft, tree, uniforms, proposal).run()
    return path_to(end, tree), take(tree.depth, end), jnp.log(next_probs)


BLOCK = Rule(
    "block",
    block,
    "round",
    ALL,
    summary="judges the draft as a whole, accepts at least as much: block verification of chains, "
    "traversal verification of trees",
)


# ------------------------------------------------------------------------------------- chains


def _chain(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array
) -> tuple[Array, Array, Array]:
    """Judge a chain: P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)).

    Node i passes with probability h_i = R_i / (R_i + 1 - P_i), where R_i is the mass of
    max(P_i p_{i+1} - q_{i+1}, 0), and h_i = P_i at the last drafted node.
    """
    probs = chain_probs(processed, draft)
    valid = draft.valid[:, 1:]
    log_joint = _clipped_cumsum(jnp.where(valid, probs.log_ratio, -jnp.inf))  # log P_i, [B, K]
    joint = jnp.exp(log_joint)
    threshold = _pass_probability(_residual_mass(probs, draft, log_joint), joint)
    is_last = valid & ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    threshold = jnp.where(is_last, joint, threshold)
    passes = valid & (uniforms[:, 1:] < threshold)
    num_accepted = jnp.where(passes, jnp.arange(1, passes.shape[1] + 1), 0).max(1, initial=0)
    log_joint = jnp.pad(log_joint, ((0, 0), (1, 0)))  # log P_0 = 0
    scale = jnp.take_along_axis(log_joint, num_accepted[:, None], 1)
    return conclude(probs, draft, tree, num_accepted, scale)


def _pass_probability(mass: Array, joint: Array) -> Array:
    """R / (R + 1 - P). 0 / 0 means that p and q agree from the root on: the node surely passes."""
    missing = mass + 1 - joint
    return jnp.where(missing > 0, mass / jnp.where(missing > 0, missing, 1), 1)


def _clipped_cumsum(log_ratio: Array) -> Array:
    """log P_i = min(0, log P_{i-1} + log r_i) along a chain, [B, K]."""
    log_joint, columns = jnp.zeros(log_ratio.shape[:1], log_ratio.dtype), []
    for index in range(log_ratio.shape[1]):
        log_joint = jnp.minimum(0, log_joint + log_ratio[:, index])
        columns.append(log_joint)
    return jnp.stack(columns, 1) if columns else log_ratio


def _residual_mass(probs: ChainProbs, draft: Draft, log_joint: Array) -> Array:
    """R_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0) for i = 1..K-1, then 0: [B, K]."""
    log_p, joint = probs.log_p[:, 1:-1], log_joint[:, :-1]
    if draft.draft_to_target is not None:
        log_p = log_p[:, :, draft.draft_to_target]
    p = jnp.exp(joint[:, :, None] + log_p)
    mass = jnp.maximum(p - jnp.exp(probs.log_q[:, 1:]), 0).sum(-1)
    if draft.draft_to_target is not None:  # q is 0 outside of the draft's vocabulary
        mass += jnp.maximum(jnp.exp(joint) - p.sum(-1), 0)
    if draft.sampled is not None:  # a deterministic node leaves the mass off its token
        off_token = jnp.exp(joint) * -jnp.expm1(probs.log_p_token[:, 1:])
        mass = jnp.where(draft.sampled[:, 2:], mass, off_token)
    return jnp.pad(mass, ((0, 0), (0, 1)))[:, : log_joint.shape[1]]


# -------------------------------------------------------------------------------------- trees


class _Stack(NamedTuple):
    """The opened nodes from the root down to the current node of each row, one per depth."""

    p: Array  # [B, D, V], weights of the target's distribution, or of the residual after refusals
    q: Array  # [B, D, V], weights of the distribution of the next drawn child
    joint: Array  # [B, D], P
    factor: Array  # [B, D], scales p to mass P
    q_mass: Array  # [B, D]


class _State(NamedTuple):
    """The traversal of each row."""

    stack: _Stack
    node: Array  # [B], the top of the stack, or the end of a finished row
    pending: Array  # [B, N] bool, nodes that are neither judged nor opened yet
    active: Array  # [B] bool


@dataclasses.dataclass(frozen=True)
class _Traversal(Nodes):
    """Post-order over a tree: a node with children is opened, and judged once they are refused."""

    def run(self) -> tuple[Array, Array]:
        """Return the first accepted node [B], and the distribution after it [B, V]."""
        state = lax.while_loop(lambda state: state.active.any(), self._judge, self._start())
        opened = self._has_children(state.node) | (state.node == 0)
        depth = jnp.where(opened, take(self.tree.depth, state.node), 0)
        residual = take(state.stack.p, depth)
        return state.node, jnp.where(opened[:, None], residual, self.target_probs(state.node))

    def _start(self) -> _State:
        root = jnp.zeros_like(self.tree.parents[:, 0])
        below = max(self.tree.max_depth, 1) - 1
        stack = jax.tree.map(
            lambda x: jnp.pad(x[:, None], ((0, 0), (0, below), (0, 0))[: x.ndim + 1]),
            self._entry(root, jnp.ones(root.shape, self.processed.dtype)),
        )
        pending = self.draft.valid & (jnp.arange(self.tree.parents.shape[1]) > 0)
        return _State(stack, root, pending, jnp.ones(root.shape, bool))

    def _judge(self, state: _State) -> _State:
        """Judge the next leaf below the current node, or the node itself if no child is pending."""
        state = lax.while_loop(lambda state: self._next_to_open(state)[1].any(), self._open, state)
        leaf, has_leaf, leaf_joint = self._next(state)
        own_joint = take(state.stack.joint, take(self.tree.depth, state.node))
        judged = jnp.where(has_leaf, leaf, state.node)
        joint = jnp.where(has_leaf, leaf_joint, own_joint)
        # Strict, so that P = 0 is never accepted. The root is committed already.
        accepted = (take(self.uniforms, judged) < joint) | (judged == 0)
        parent = jnp.where(has_leaf, state.node, take(self.tree.parents, state.node))
        refused = state.active & ~accepted
        return _State(
            stack=self._refuse(state.stack, judged, parent, refused),
            node=jnp.where(state.active, jnp.where(accepted, judged, parent), state.node),
            pending=state.pending & ~one_hot(judged, state.pending.shape[1]),
            active=refused,
        )

    def _next(self, state: _State) -> tuple[Array, Array, Array]:
        """The next child of the current node, whether there is one, and its P: each [B]."""
        pending = state.pending & (self.tree.parents == state.node[:, None])
        child, stack = self.first(pending), state.stack
        top = (jnp.arange(pending.shape[0]), take(self.tree.depth, state.node))
        entry = (*top, take(self.draft.tokens, child))
        p, q = self.odds(
            child, stack.p[entry] * stack.factor[top], stack.q[entry], stack.q_mass[top]
        )
        return child, pending.any(1), jnp.minimum(1, p / q)

    def _next_to_open(self, state: _State) -> tuple[Array, Array, Array]:
        """The next child, whether it must be opened, and its P: each [B]."""
        child, exists, joint = self._next(state)
        return child, state.active & exists & self._has_children(child), joint

    def _has_children(self, node: Array) -> Array:
        return self.children(node).any(1)

    def _open(self, state: _State) -> _State:
        """Open the next child in the rows where it has children."""
        child, opens, joint = self._next_to_open(state)
        opens &= joint >= 0  # always true; XLA then reads the stack before writing, without a copy
        put = _writer(state.stack, take(self.tree.depth, child), opens)
        is_child = one_hot(child, state.pending.shape[1])
        return _State(
            stack=_Stack(*map(put, state.stack, self._entry(child, joint))),
            node=jnp.where(opens, child, state.node),
            pending=state.pending & ~(is_child & opens[:, None]),
            active=state.active,
        )

    def _entry(self, node: Array, joint: Array) -> _Stack:
        """The stack entry of a node that is opened: [B, V] and [B]."""
        q, q_mass = self.draft_probs(node)
        return _Stack(self.target_probs(node), q, joint, joint, q_mass)

    def _refuse(self, stack: _Stack, child: Array, parent: Array, where: Array) -> _Stack:
        """Update the entry of ``parent``, the top of the stack, after the refusal of ``child``."""
        depth = take(self.tree.depth, parent)
        p, q, joint, factor, q_mass = (take(rows, depth) for rows in stack)
        residual = self.residual(child, factor[:, None] * p, q, q_mass)
        mass = residual.sum(-1)
        passing, positive = _pass_probability(mass, joint), mass > 0
        # Mass 0: P was 0 and stays 0, or P p = q up to rounding and nothing is refused.
        factor = jnp.where(positive, passing / jnp.where(positive, mass, 1), passing * factor)
        token, drops = take(self.draft.tokens, child), where & self.drops(child)
        dropped = one_hot(token, q.shape[1]) & drops[:, None]
        q_mass = jnp.where(dropped, 0, q).sum(-1)
        # Masses are never negative; XLA then reads the stack before writing, without a copy.
        token = jnp.where(drops & (q_mass >= 0) & (mass >= 0), token, q.shape[1])
        put = _writer(stack, depth, where & (mass >= 0))
        return _Stack(
            p=put(stack.p, jnp.where(positive[:, None], residual, p)),
            q=stack.q.at[jnp.arange(token.shape[0]), depth, token].set(0, mode="drop"),
            joint=put(stack.joint, passing),
            factor=put(stack.factor, factor),
            q_mass=put(stack.q_mass, q_mass),
        )


def _writer(stack: _Stack, depth: Array, where: Array) -> Callable[[Array, Array], Array]:
    """A function that writes one entry per row at ``depth`` [B], in the rows ``where`` [B]."""
    batch = jnp.arange(depth.shape[0])
    depth = jnp.where(where, depth, stack.joint.shape[1])  # out of bounds: dropped
    return lambda rows, entry: rows.at[batch, depth].set(entry, mode="drop")
