"""Block verification of a tree, that is traversal verification (arXiv 2505.12398), on scalars.

Nodes are judged in post-order: one that has children is opened, and judged once they are refused.
The notation is that of ``jspec.verify.block``. What refusals did to the law of an open node is kept
as the steps that lead there, so a row holds no law, but some scalars a depth and child.
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
    Ending,
    Rows,
    children_of,
    choose,
    no_refusal,
    passing_of,
)

Array = jax.Array


class _Open(NamedTuple):
    """The open nodes from the root down to where each row stands, one a depth: [B, D] each."""

    node: Array
    judged: Array  # children that are opened or refused already
    joint: Array  # P
    factor: Array  # of the law: times it, its mass is P
    q_mass: Array  # of the law of the next child drawn
    steps: Refusal  # [B, D, C], what the refusal of each child did to both


class _Place(NamedTuple):
    """Where each row stands."""

    open: _Open
    depth: Array  # [B], of the node on top; where ``going`` is over, of the end
    leaf: Array  # [B], the end where it was never opened, -1 otherwise
    going: Array  # [B] bool


class _Next(NamedTuple):
    """The next child of the node on top, [B] each."""

    child: Children
    joint: Array  # its P
    opens: Array  # bool: it has children


def traverse(rows: Rows, proposal: Proposal, uniforms: Array, form: Form) -> Ending:
    """The first node in post-order that passes its coin."""
    tree = _Traversal(rows, proposal, uniforms, form)
    place = lax.while_loop(lambda place: place.going.any(), tree.judge, tree.start())
    return tree.ending(place)


class _Traversal(NamedTuple):
    """A batch of drafts under their coins."""

    rows: Rows
    proposal: Proposal
    uniforms: Array
    form: Form

    def start(self) -> _Place:
        """Every row at its root."""
        batch, depths = self.uniforms.shape[0], max(self.form.max_depth, 1)
        zeros = jnp.zeros((batch, depths), jnp.int32)
        ones = jnp.ones((batch, depths), jnp.float32)
        steps = no_refusal(batch, depths, self.form.max_children)
        none = zeros[:, 0]
        q_mass = ones.at[:, 0].set(self.q_mass(none))
        stack = _Open(zeros, zeros, ones, ones, q_mass, steps)
        return _Place(stack, none, none - 1, jnp.ones((batch,), bool))

    def judge(self, place: _Place) -> _Place:
        """Judges the next leaf below the node on top, or that node where there is none."""
        dives = lambda place: (place.going & self.next(place).opens).any()
        place = lax.while_loop(dives, self.dive, place)
        found = self.next(place)
        top = _at(place.open, place.depth)
        is_leaf = found.child.exists
        uniform = jnp.where(is_leaf, found.child.uniform, _at(self.uniforms, top.node))
        joint = jnp.where(is_leaf, found.joint, top.joint)
        # Strict, so that P = 0 is never accepted. The root is committed already.
        accepted = (uniform < joint) | (~is_leaf & (place.depth == 0))
        refused = place.going & ~accepted
        ends = place.going & accepted & is_leaf
        # A node that was opened is refused by the one above it, which judged it last.
        depth = jnp.where(refused & ~is_leaf, place.depth - 1, place.depth)
        rank = _at(place.open.judged, depth) - jnp.where(is_leaf, 0, 1)
        return _Place(
            open=self.refuse(place.open, depth, rank, refused),
            depth=jnp.where(ends, place.depth + 1, depth),
            leaf=jnp.where(ends, found.child.node, place.leaf),
            going=refused,
        )

    def next(self, place: _Place) -> _Next:
        """The next child of the node on top of each row."""
        top = _at(place.open, place.depth)
        children = self.children(top.node)
        child = children.rank(top.judged)
        child = child._replace(exists=child.exists & (top.judged < self.form.max_children))
        distribution, draft_probs = self.distributions(top.node, children)
        steps = _unstack(top.steps)
        _, p, q = weights(child.x, child.y, child.token, distribution, draft_probs, steps)
        # A token that its own recorded law excludes was not drawn from it: it is refused.
        against = jnp.where(child.drawn, q / jnp.where(top.q_mass > 0, top.q_mass, 1), 1.0)
        possible = against > 0
        ratio = top.factor * p / jnp.where(possible, against, 1)
        joint = jnp.where(possible, jnp.minimum(1.0, ratio), 0.0)
        below = self.proposal.valid & (self.proposal.parents == child.node[:, None])
        return _Next(child, joint, child.exists & below[:, 1:].any(1))

    def dive(self, place: _Place) -> _Place:
        """Opens the next child, where it is to be opened."""
        found = self.next(place)
        dives = place.going & found.opens
        put = functools.partial(_put, depth=place.depth + 1, where=dives)
        joint, node = found.joint, found.child.node
        fresh = no_refusal(node.shape[0], self.form.max_children)
        entry = _Open(node, jnp.zeros_like(node), joint, joint, self.q_mass(node), fresh)
        judged = place.open.judged
        judged = _put(judged, _at(judged, place.depth) + 1, depth=place.depth, where=dives)
        stack = place.open._replace(judged=judged)
        return place._replace(
            open=jax.tree.map(put, stack, entry), depth=place.depth + dives.astype(jnp.int32)
        )

    def refuse(self, stack: _Open, depth: Array, rank: Array, where: Array) -> _Open:
        """What the refusal of child ``rank`` leaves to the node at ``depth``, [B] each."""
        top = _at(stack, depth)
        children = self.children(top.node)
        child = children.rank(rank)
        distribution, draft_probs = self.distributions(top.node, children)
        # A drawn token stays in the law where only its children were refused; q loses it.
        leaves = child.drawn & (not self.form.replaced)
        out_of_q = jnp.where(leaves, from_q_alone(child.token), -1)
        share = jnp.where(child.drawn, 1 / jnp.where(top.q_mass > 0, top.q_mass, 1), 0.0)
        step = Refusal(top.factor, share, jnp.where(child.drawn, out_of_q, child.token))
        keep = functools.partial(_put, depth=rank, where=where)
        steps = jax.tree.map(keep, top.steps, step)
        found = self.rows.masses(self.rows.at(top.node), distribution, draft_probs, _unstack(steps))
        mass = found.after.sum(-1)
        passing = passing_of(mass, top.joint)
        # Nothing left: P was 0 and is, or P p = q up to rounding and nothing is refused.
        left = mass > 0
        step = choose(left, step, no_refusal(*rank.shape)._replace(dropped=out_of_q))
        fresh = top._replace(
            judged=rank + 1,
            joint=passing,
            factor=jnp.where(left, passing / jnp.where(left, mass, 1), passing * top.factor),
            q_mass=jnp.where(leaves, found.draft.sum(-1), top.q_mass),
            steps=jax.tree.map(keep, top.steps, step),
        )
        return jax.tree.map(functools.partial(_put, depth=depth, where=where), stack, fresh)

    def children(self, node: Array) -> Children:
        """Those of ``node`` [B]."""
        return children_of(self.rows, self.proposal, self.uniforms, node, self.form.max_children)

    def distributions(self, node: Array, children: Children):
        """The target's at ``node`` [B], and that of its first drawn child."""
        return self.rows.distributions_at(
            self.rows.at(node), children.points() if self.form.mixed else ()
        )

    def q_mass(self, node: Array) -> Array:
        """The mass of the law of the first drawn child of ``node`` [B]: siblings are distinct."""
        if not self.form.mixed:
            return jnp.ones(node.shape, jnp.float32)
        distributions = self.distributions(node, self.children(node))
        return self.rows.masses(self.rows.at(node), *distributions, ()).draft.sum(-1)

    def ending(self, place: _Place) -> Ending:
        """Where the rows stand, all of them at their end."""
        opened = place.leaf < 0
        top = _at(place.open, jnp.where(opened, place.depth, 0))
        node = jnp.where(opened, top.node, place.leaf)
        path = jnp.pad(place.open.node, ((0, 0), (0, 1)))[:, : self.form.max_depth + 1]
        path = _put(path, place.leaf, depth=place.depth, where=~opened)
        absent = self.children(node).points() if self.form.mixed else ()
        steps = [choose(opened, step, no_refusal(*node.shape)) for step in _unstack(top.steps)]
        return Ending(node, path, place.depth, absent, tuple(steps))


def _at(stack, depth: Array):
    """Entry ``depth`` [B] of arrays [B, D, ...]."""

    def take(x: Array) -> Array:
        index = depth.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(x, index, 1, mode="clip")[:, 0]

    return jax.tree.map(take, stack)


def _put(x: Array, new: Array, *, depth: Array, where: Array) -> Array:
    """x [B, D, ...] with ``new`` [B, ...] at ``depth`` [B], in the rows ``where``."""
    depth = jnp.where(where, depth, x.shape[1])  # out of bounds: dropped
    return x.at[jnp.arange(x.shape[0]), depth].set(new, mode="drop")


def _unstack(steps: Refusal) -> list[Refusal]:
    """Steps [B, C] one by one."""
    return [Refusal(*(x[:, rank] for x in steps)) for rank in range(steps.scale.shape[1])]
