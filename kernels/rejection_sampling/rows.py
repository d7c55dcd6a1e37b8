"""The view of a batch that acceptance has: distributions of rows as scalars, children in order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.kernels.rejection_sampling.distributions import (
    DraftDistribution,
    Masses,
    Proposal,
    Refusal,
    TargetDistribution,
)

Array = jax.Array


class Kernels(NamedTuple):
    """The kernels of a device; see ``pallas_tpu``."""

    distributions: Callable[..., TargetDistribution]
    masses: Callable[..., Masses]
    segment: int  # tokens per mass, and the block of a draw


class End(NamedTuple):
    """The end of each row's accepted path, and the changes of the distribution there."""

    node: Array  # [B]
    path: Array  # [B, max_depth + 1]
    num_accepted: Array  # [B]
    absent: tuple[Array, ...]  # [B] each, tokens removed from the draft's distribution
    refusals: tuple[Refusal, ...]  # [B] each


class Rows(NamedTuple):
    """The distributions of all nodes of a batch, in rows [B * N]."""

    logits: Array  # [B * N, V]
    draft_logits: Array | None  # [B * N, V]
    target: TargetDistribution
    draft: DraftDistribution | None
    nodes: int  # N
    kernels: Kernels

    def at(self, node: Array) -> Array:
        """Return the rows of ``node`` [B, ...] of each batch row."""
        first = jnp.arange(node.shape[0], dtype=jnp.int32) * self.nodes
        return first.reshape(-1, *[1] * (node.ndim - 1)) + node

    def distributions_at(
        self, rows: Array, absent: tuple[Array, ...] = ()
    ) -> tuple[TargetDistribution, DraftDistribution | None]:
        """Return the distributions of ``rows``, in their shape."""
        target = TargetDistribution(*(x[rows] for x in self.target))
        if self.draft is None:
            return target, None
        return target, DraftDistribution(self.draft.peak[rows], self.draft.log_total[rows], absent)

    def entries(self, rows: Array, tokens: Array) -> tuple[Array, Array | None]:
        """Return raw logits and draft log-weights of ``tokens``, one per entry of ``rows``."""
        draft_logits = None if self.draft_logits is None else self.draft_logits[rows, tokens]
        return self.logits[rows, tokens], draft_logits

    def masses(self, rows: Array, *arguments: Any) -> Masses:
        """Return the masses of ``rows``; other arguments are those of ``pallas_tpu.masses``."""
        return self.kernels.masses(self.logits, self.draft_logits, rows, *arguments)


class Children(NamedTuple):
    """The children of one node per row, in the order of judgement; [B, max_children] each."""

    node: Array
    exists: Array  # bool
    token: Array
    drawn: Array  # bool
    uniform: Array
    x: Array  # raw logit of the token
    y: Array | None  # draft log-weight of the token

    def rank(self, rank: int | Array) -> "Children":
        """Return the children of one rank, or of rank [B] of each row: [B] each."""
        if isinstance(rank, int):
            return Children(*(None if x is None else x[:, rank] for x in self))
        columns = (
            None if x is None else jnp.take_along_axis(x, rank[:, None], 1, mode="clip")[:, 0]
            for x in self
        )
        return Children(*columns)

    def deterministic_tokens(self) -> tuple[Array, ...]:
        """Return the tokens of deterministic children from rank 1 on, -1 for others: [B] each.

        Drawn children come first, so if any child is drawn, rank 0 is.
        """
        tokens = jnp.where(self.exists & ~self.drawn, self.token, -1)
        return tuple(tokens[:, rank] for rank in range(1, tokens.shape[1]))


def children_of(
    rows: Rows, proposal: Proposal, uniforms: Array, node: Array, count: int
) -> Children:
    """Return the valid children of ``node`` [B], drawn ones first, as in ``jspec.verify``."""
    index = jnp.arange(rows.nodes, dtype=jnp.int32)
    is_child = proposal.valid & (proposal.parents == node[:, None]) & (index > 0)
    order = jnp.where(is_child, index + rows.nodes * ~proposal.sampled, 2 * rows.nodes)
    order = jnp.sort(order, 1)[:, :count]
    child = order % rows.nodes
    take = lambda x: jnp.take_along_axis(x, child, 1)
    token = take(proposal.tokens)
    x, y = rows.entries(rows.at(node)[:, None], token)
    exists = order < 2 * rows.nodes
    return Children(child, exists, token, take(proposal.sampled), take(uniforms), x, y)


def no_refusal(*shape: int) -> Refusal:
    """Return refusals that change nothing."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Refusal(zeros + 1, zeros, jnp.full(shape, -1, jnp.int32))


def where(condition: Array, refusal: Refusal, other: Refusal) -> Refusal:
    """Return ``refusal`` where the condition holds, ``other`` elsewhere."""
    return Refusal(*(jnp.where(condition, a, b) for a, b in zip(refusal, other, strict=True)))
