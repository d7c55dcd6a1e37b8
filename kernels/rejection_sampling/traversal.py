"""Block verification on scalars: of a tree, traversal verification (arXiv 2505.12398).

Nodes are judged in post-order: a node with children is opened, and judged after their refusal. The
notation is that of ``jspec.verify.block``. The refusals of an open node's children describe its
distribution, so a row holds some scalars per depth and child, and no distribution.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.kernels.rejection_sampling.distributions import (
    Form,
    Proposal,
    Refusal,
    from_q_alone,
    weights,
)
from jspec.kernels.rejection_sampling.rows import (
    Children,
    End,
    Rows,
    children_of,
    no_refusal,
    where,
)

Array = jax.Array


class _Stack(NamedTuple):
    """The opened nodes from the root down to the current node of each row: [B, D] each."""

    node: Array
    judged: Array  # children that are opened or refused already
    joint: Array  # P
    factor: Array  # scales the node's distribution to mass P
    q_mass: Array  # mass of the next drawn child's distribution
    refusals: Refusal  # [B, D, C], one per child


class _State(NamedTuple):
    """The traversal of each row."""

    stack: _Stack
    depth: Array  # [B], of the current node; in a finished row, of the end
    leaf: Array  # [B], the end if it was never opened, else -1
    active: Array  # [B] bool


class _Next(NamedTuple):
    """The next child of the current node, [B] each."""

    child: Children
    joint: Array  # its P
    has_children: Array  # bool


def traverse(rows: Rows, proposal: Proposal, uniforms: Array, form: Form) -> End:
    """Return the first node in post-order that passes its uniform."""
    traversal = _Traversal(rows, proposal, uniforms, form)
    state = traversal.start()
    state = lax.while_loop(lambda state: state.active.any(), traversal.judge, state)
    return traversal.end(state)


class _Traversal(NamedTuple):
    """A batch of drafts with their uniforms."""

    rows: Rows
    proposal: Proposal
    uniforms: Array
    form: Form

    def start(self) -> _State:
        """Every row at its root."""
        batch, depths = self.uniforms.shape[0], max(self.form.max_depth, 1)
        zeros = jnp.zeros((batch, depths), jnp.int32)
        ones = jnp.ones((batch, depths), jnp.float32)
        refusals = no_refusal(batch, depths, self.form.max_children)
        root = zeros[:, 0]
        q_mass = ones.at[:, 0].set(self.q_mass(root))
        stack = _Stack(zeros, zeros, ones, ones, q_mass, refusals)
        return _State(stack, root, root - 1, jnp.ones((batch,), bool))

    def judge(self, state: _State) -> _State:
        """Judge the next leaf below the current node, or that node if no child is left."""
        state = lax.while_loop(
            lambda state: (state.active & self.next(state).has_children).any(), self.open, state
        )
        following = self.next(state)
        top = _at(state.stack, state.depth)
        is_leaf = following.child.exists
        uniform = jnp.where(is_leaf, following.child.uniform, _at(self.uniforms, top.node))
        joint = jnp.where(is_leaf, following.joint, top.joint)
        # Strict, so that P = 0 is never accepted. The root is committed already.
        accepted = (uniform < joint) | (~is_leaf & (state.depth == 0))
        refused = state.active & ~accepted
        ends = state.active & accepted & is_leaf
        # The refusal of an opened node concerns its parent, which judged it last.
        depth = jnp.where(refused & ~is_leaf, state.depth - 1, state.depth)
        rank = _at(state.stack.judged, depth) - jnp.where(is_leaf, 0, 1)
        return _State(
            stack=self.refuse(state.stack, depth, rank, refused),
            depth=jnp.where(ends, state.depth + 1, depth),
            leaf=jnp.where(ends, following.child.node, state.leaf),
            active=refused,
        )

    def next(self, state: _State) -> _Next:
        """The next child of the current node of each row."""
        top = _at(state.stack, state.depth)
        children = self.children(top.node)
        child = children.rank(top.judged)
        child = child._replace(exists=child.exists & (top.judged < self.form.max_children))
        target, draft = self.distributions(top.node, children)
        _, p, q = weights(child.x, child.y, child.token, target, draft, _unstack(top.refusals))
        # A token that its own recorded distribution excludes was not drawn from it: refuse it.
        q = jnp.where(child.drawn, q / jnp.where(top.q_mass > 0, top.q_mass, 1), 1.0)
        possible = q > 0
        ratio = top.factor * p / jnp.where(possible, q, 1)
        joint = jnp.where(possible, jnp.minimum(1.0, ratio), 0.0)
        below = self.proposal.valid & (self.proposal.parents == child.node[:, None])
        return _Next(child, joint, child.exists & below[:, 1:].any(1))

    def open(self, state: _State) -> _State:
        """Open the next child in the rows where it has children."""
        following = self.next(state)
        opens = state.active & following.has_children
        put = functools.partial(_put, depth=state.depth + 1, rows=opens)
        joint, node = following.joint, following.child.node
        fresh = no_refusal(node.shape[0], self.form.max_children)
        entry = _Stack(node, jnp.zeros_like(node), joint, joint, self.q_mass(node), fresh)
        judged = state.stack.judged
        judged = _put(judged, _at(judged, state.depth) + 1, depth=state.depth, rows=opens)
        stack = state.stack._replace(judged=judged)
        return state._replace(
            stack=jax.tree.map(put, stack, entry), depth=state.depth + opens.astype(jnp.int32)
        )

    def refuse(self, stack: _Stack, depth: Array, rank: Array, rows: Array) -> _Stack:
        """Refuse child ``rank`` of the node at ``depth``, [B] each, in ``rows`` [B]."""
        top = _at(stack, depth)
        children = self.children(top.node)
        child = children.rank(rank)
        target, draft = self.distributions(top.node, children)
        # A drawn token stays in p if only its descendants were refused; q loses it.
        from_q = jnp.where(child.drawn, from_q_alone(child.token), -1)
        share = jnp.where(child.drawn, 1 / jnp.where(top.q_mass > 0, top.q_mass, 1), 0.0)
        refusal = Refusal(top.factor, share, jnp.where(child.drawn, from_q, child.token))
        put = functools.partial(_put, depth=rank, rows=rows)
        refusals = _unstack(jax.tree.map(put, top.refusals, refusal))
        masses = self.rows.masses(self.rows.at(top.node), target, draft, refusals)
        mass = masses.after.sum(-1)
        passing = _pass_probability(mass, top.joint)
        # Mass 0: P was 0 and stays 0, or P p = q up to rounding and nothing is refused.
        positive = mass > 0
        refusal = where(positive, refusal, no_refusal(*rank.shape)._replace(dropped=from_q))
        scaled = passing / jnp.where(positive, mass, 1)
        entry = top._replace(
            judged=rank + 1,
            joint=passing,
            factor=jnp.where(positive, scaled, passing * top.factor),
            q_mass=jnp.where(child.drawn, masses.draft.sum(-1), top.q_mass),
            refusals=jax.tree.map(put, top.refusals, refusal),
        )
        return jax.tree.map(functools.partial(_put, depth=depth, rows=rows), stack, entry)

    def children(self, node: Array) -> Children:
        """The children of ``node`` [B]."""
        return children_of(self.rows, self.proposal, self.uniforms, node, self.form.max_children)

    def distributions(self, node: Array, children: Children):
        """The target's distribution at ``node`` [B], and that of its first drawn child."""
        absent = children.deterministic_tokens() if self.form.mixed else ()
        return self.rows.distributions_at(self.rows.at(node), absent)

    def q_mass(self, node: Array) -> Array:
        """The mass of the distribution of the first drawn child of ``node`` [B]."""
        if not self.form.mixed:
            return jnp.ones(node.shape, jnp.float32)
        distributions = self.distributions(node, self.children(node))
        return self.rows.masses(self.rows.at(node), *distributions, ()).draft.sum(-1)

    def end(self, state: _State) -> End:
        """The ends of all rows."""
        opened = state.leaf < 0
        top = _at(state.stack, jnp.where(opened, state.depth, 0))
        node = jnp.where(opened, top.node, state.leaf)
        path = jnp.pad(state.stack.node, ((0, 0), (0, 1)))[:, : self.form.max_depth + 1]
        path = _put(path, state.leaf, depth=state.depth, rows=~opened)
        absent = self.children(node).deterministic_tokens() if self.form.mixed else ()
        refusals = [where(opened, each, no_refusal(*node.shape)) for each in _unstack(top.refusals)]
        return End(node, path, state.depth, absent, tuple(refusals))


def _pass_probability(mass: Array, joint: Array) -> Array:
    """R / (R + 1 - P). 0 / 0 means that p and q agree from the root on: the node surely passes."""
    missing = mass + 1 - joint
    return jnp.where(missing > 0, mass / jnp.where(missing > 0, missing, 1), 1.0)


def _at(stack, depth: Array):
    """Entry ``depth`` [B] of arrays [B, D, ...]."""

    def take(x: Array) -> Array:
        index = depth.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(x, index, 1, mode="clip")[:, 0]

    return jax.tree.map(take, stack)


def _put(x: Array, new: Array, *, depth: Array, rows: Array) -> Array:
    """x [B, D, ...] with ``new`` [B, ...] at ``depth`` [B], in the batch rows ``rows`` [B]."""
    depth = jnp.where(rows, depth, x.shape[1])  # out of bounds: dropped
    return x.at[jnp.arange(x.shape[0]), depth].set(new, mode="drop")


def _unstack(refusals: Refusal) -> list[Refusal]:
    """Refusals [B, C] one by one."""
    return [Refusal(*(x[:, rank] for x in refusals)) for rank in range(refusals.scale.shape[1])]
