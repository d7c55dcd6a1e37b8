"""Lookups that the tree rules share: distributions at a node, its children, the path to an end."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core import trees
from jspec.core.types import Array, Draft, Proposal, Tree


@dataclasses.dataclass(frozen=True)
class Nodes:
    """A draft under judgement; its methods handle one node per batch row, [B].

    Fields are the arguments of ``jspec.verify.rejection.rejection``. Distributions are weights, not
    logs; a separate mass accompanies weights that may not sum to 1.
    """

    processed: Array
    draft: Draft
    tree: Tree
    uniforms: Array
    proposal: Proposal

    def children(self, node: Array) -> Array:
        """Return a mask of the valid children of ``node`` [B]: bool [B, N]."""
        index = jnp.arange(self.tree.parents.shape[1])
        return self.draft.valid & (self.tree.parents == node[:, None]) & (index > 0)

    def first(self, pending: Array) -> Array:
        """Return the next of the ``pending`` siblings [B, N] to judge: [B], 0 if there is none.

        Drawn siblings come in their order, before deterministic ones. For "top_plus_one" this order
        is optimal: it equals judging the drawn child alone and following the next token (arXiv
        2502.18779).
        """
        num_nodes = pending.shape[1]
        index = jnp.arange(num_nodes)
        order = jnp.where(self.draft.drawn, index, index + num_nodes)
        order = jnp.where(pending, order, 2 * num_nodes)
        return jnp.where(pending.any(1), jnp.argmin(order, 1), 0).astype(jnp.int32)

    def target_probs(self, node: Array) -> Array:
        """Return the target's distribution after ``node`` [B]: [B, V]."""
        return jax.nn.softmax(take(self.processed, node), -1)

    def draft_probs(self, node: Array) -> tuple[Array, Array]:
        """Return the distribution of the first drawn child of ``node``: weights [B, V], mass [B].

        It is the recorded row without the tokens of deterministic siblings, since siblings are
        distinct. Under "deterministic_last" it is the entire row.
        """
        shape, dtype = (node.shape[0], self.processed.shape[-1]), self.processed.dtype
        if self.draft.logits is None:
            return jnp.zeros(shape, dtype), jnp.zeros(shape[:1], dtype)
        q = jax.nn.softmax(take(self.draft.logits, node).astype(dtype), -1)
        if self.draft.draft_to_target is not None:
            entries = jnp.zeros(shape, dtype).at[:, self.draft.draft_to_target]
            q = entries.set(q, indices_are_sorted=True, unique_indices=True)
        if self.draft.sampled is not None and self.proposal != "deterministic_last":
            excluded = self.children(node) & ~self.draft.drawn
            tokens = jnp.where(excluded, self.draft.tokens, shape[1])
            q = q.at[jnp.arange(shape[0])[:, None], tokens].set(0, mode="drop")
        return q, q.sum(-1)

    def odds(self, child: Array, p: Array, q: Array, q_mass: Array) -> tuple[Array, Array]:
        """Return p(x) and q(x) of ``child`` [B], given its weights; it passes where u q < p."""
        drawn = take(self.draft.drawn, child)
        # A token that its own recorded distribution excludes was not drawn from it: refuse it.
        possible = ~drawn | (q > 0)
        q = jnp.where(drawn & possible, q / jnp.where(q_mass > 0, q_mass, 1), 1)
        return jnp.where(possible, p, 0), q

    def residual(self, child: Array, p: Array, q: Array, q_mass: Array) -> Array:
        """Return the residual of p [B, V] after the refusal of ``child`` [B]: max(p - q, 0)."""
        is_token = one_hot(take(self.draft.tokens, child), p.shape[1])
        q = q / jnp.where(q_mass > 0, q_mass, 1)[:, None]
        return jnp.maximum(p - jnp.where(take(self.draft.drawn, child)[:, None], q, is_token), 0)

    def drops(self, child: Array) -> Array:
        """Return whether the refusal of ``child`` removes its token from q: bool [B]."""
        return take(self.draft.drawn, child)


def with_ancestors(passes: Array, tree: Tree) -> tuple[Array, Array]:
    """Return the nodes that pass with all their ancestors [B, N], and the ancestors [B, N, N].

    The root always passes: it is committed already.
    """
    ancestors = trees.unpack_bits(tree.ancestors, tree.depth.shape[1])
    passes = passes.at[:, 0].set(True)
    return (~ancestors | passes[:, None, :]).all(-1), ancestors


def path_to(end: Array, tree: Tree) -> Array:
    """Return node ids from the root down to ``end`` [B], 0 below it: [B, max_depth+1]."""
    ancestors = trees.unpack_bits(take(tree.ancestors, end), tree.depth.shape[1])  # [B, N]
    depth = jnp.arange(tree.max_depth + 1)[:, None]
    on_path = ancestors[:, None, :] & (tree.depth[:, None, :] == depth)  # [B, max_depth+1, N]
    return jnp.argmax(on_path, -1).astype(jnp.int32)


def end_at(end: Array, processed: Array, tree: Tree) -> tuple[Array, Array, Array]:
    """Return the result of a walk that ends at node ``end`` [B] and refuses nothing there."""
    return path_to(end, tree), take(tree.depth, end), take(processed, end)


def take(rows: Array, index: Array) -> Array:
    """Return entry ``index`` [B] of each of ``rows`` [B, N, ...]: [B, ...]."""
    index = index.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, 1, mode="promise_in_bounds")[:, 0]


def one_hot(index: Array, size: int) -> Array:
    """Return bool [B, size], True at ``index`` [B]."""
    return jnp.arange(size) == index[:, None]
