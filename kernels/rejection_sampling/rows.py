"""What rules of acceptance are told of a batch: laws of rows as scalars, and children in order."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.kernels.rejection_sampling.distributions import (
    Distribution,
    DraftDistribution,
    Masses,
    Proposal,
    Refusal,
)

Array = jax.Array


class Kernels(NamedTuple):
    """The kernels of a device; see ``pallas_tpu``."""

    distributions: Callable[..., Distribution]
    masses: Callable[..., Masses]
    segment: int  # tokens that a mass is the sum of


class Ending(NamedTuple):
    """Where the accepted path of each row ends, and what happened to the law there."""

    node: Array  # [B]
    path: Array  # [B, max_depth + 1]
    num_accepted: Array  # [B]
    absent: tuple[Array, ...]  # [B] each, of the draft's law
    steps: tuple[Refusal, ...]  # [B] each


class Rows(NamedTuple):
    """The laws of all nodes of a batch, in rows [B * N]."""

    logits: Array  # [B * N, V]
    draft: Array | None
    distribution: Distribution
    draft_probs: DraftDistribution | None
    nodes: int  # N
    kernels: Kernels

    def at(self, node: Array) -> Array:
        """Rows of ``node`` [B, ...] of each row of the batch."""
        first = jnp.arange(node.shape[0], dtype=jnp.int32) * self.nodes
        return first.reshape(-1, *[1] * (node.ndim - 1)) + node

    def distributions_at(
        self, rows: Array, absent: tuple[Array, ...] = ()
    ) -> tuple[Distribution, DraftDistribution | None]:
        """The laws of ``rows``, in their shape."""
        distribution = Distribution(*(x[rows] for x in self.distribution))
        if self.draft_probs is None:
            return distribution, None
        return distribution, DraftDistribution(
            self.draft_probs.peak[rows], self.draft_probs.log_total[rows], absent
        )

    def entries(self, rows: Array, tokens: Array) -> tuple[Array, Array | None]:
        """Raw logits and draft log-weights of ``tokens``, one a row of ``rows``."""
        return self.logits[rows, tokens], None if self.draft is None else self.draft[rows, tokens]

    def masses(
        self,
        rows: Array | None,
        distribution: Distribution,
        draft_probs: DraftDistribution | None,
        steps,
    ) -> Masses:
        """See ``pallas_tpu.masses``."""
        return self.kernels.masses(self.logits, self.draft, rows, distribution, draft_probs, steps)


class Children(NamedTuple):
    """The children of one node a row, in the order they are judged; [B, max_children] each."""

    node: Array
    exists: Array  # bool
    token: Array
    drawn: Array  # bool
    uniform: Array
    x: Array  # raw logit of the token
    y: Array | None  # draft log-weight of the token

    def rank(self, rank: int | Array) -> "Children":
        """The children of one rank, or of rank [B] of each row: [B] each."""
        if isinstance(rank, int):
            return Children(*(None if x is None else x[:, rank] for x in self))
        take = lambda x: jnp.take_along_axis(x, rank[:, None], 1, mode="clip")[:, 0]
        return Children(*(None if x is None else take(x) for x in self))

    def points(self) -> tuple[Array, ...]:
        """Tokens of the point masses, -1 for other children, but for those of rank 0: [B] each.

        Drawn children come first: where any is drawn, it has rank 0.
        """
        points = jnp.where(self.exists & ~self.drawn, self.token, -1)
        return tuple(points[:, rank] for rank in range(1, points.shape[1]))


def children_of(
    rows: Rows, proposal: Proposal, uniforms: Array, node: Array, count: int
) -> Children:
    """The valid children of ``node`` [B]. Drawn ones come first, as in ``jspec.verify``."""
    index = jnp.arange(rows.nodes, dtype=jnp.int32)
    own = proposal.valid & (proposal.parents == node[:, None]) & (index > 0)
    turn = jnp.where(own, index + rows.nodes * ~proposal.sampled, 2 * rows.nodes)
    turn = jnp.sort(turn, 1)[:, :count]
    child = turn % rows.nodes
    take = lambda x: jnp.take_along_axis(x, child, 1)
    token = take(proposal.tokens)
    x, y = rows.entries(rows.at(node)[:, None], token)
    exists = turn < 2 * rows.nodes
    return Children(child, exists, token, take(proposal.sampled), take(uniforms), x, y)


def no_refusal(*shape: int) -> Refusal:
    """Steps that change nothing."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Refusal(zeros + 1, zeros, jnp.full(shape, -1, jnp.int32))


def choose(condition: Array, step: Refusal, other: Refusal) -> Refusal:
    """One step where the condition holds, the other elsewhere."""
    return Refusal(*(jnp.where(condition, a, b) for a, b in zip(step, other, strict=True)))


def passing_of(rest: Array, joint: Array) -> Array:
    """R / (R + 1 - P), the odds of a node whose child was refused; see ``jspec.verify.block``.

    0 / 0 means that everything so far and the next law agree: passing is certain.
    """
    missing = rest + 1 - joint
    return jnp.where(missing > 0, rest / jnp.where(missing > 0, missing, 1), 1.0)
