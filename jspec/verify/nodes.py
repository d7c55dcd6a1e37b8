"""What rules over trees share: the laws at a node, its children one by one, the path to an end."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core import trees
from jspec.core.types import Array, Draft, Proposal, Tree


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The judging of a draft: looks things up for one node a row, [B], at a time.

    Arguments as for ``jspec.verify.rejection.rejection``. Laws are weights, not logs of them; their
    mass stands beside them where it need not be 1.
    """

    processed: Array
    draft: Draft
    tree: Tree
    uniforms: Array
    distribution: Proposal

    def children(self, node: Array) -> Array:
        """The valid children of ``node`` [B]: bool [B, N]."""
        index = jnp.arange(self.tree.parents.shape[1])
        return self.draft.valid & (self.tree.parents == node[:, None]) & (index > 0)

    def first(self, waiting: Array) -> Array:
        """The next of the ``waiting`` siblings [B, N] to be judged: [B], 0 where there is none.

        Drawn ones come in their order, before point masses: with k - 1 likeliest children and one
        drawn from the rest that is the best order, the same as to judge the drawn one alone and
        then to follow the token that comes out (arXiv 2502.18779).
        """
        num_nodes = waiting.shape[1]
        index = jnp.arange(num_nodes)
        turn = jnp.where(
            waiting, jnp.where(self.draft.drawn, index, index + num_nodes), 2 * num_nodes
        )
        return jnp.where(waiting.any(1), jnp.argmin(turn, 1), 0).astype(jnp.int32)

    def target_probs(self, node: Array) -> Array:
        """The target's law after ``node`` [B]: [B, V]."""
        return jax.nn.softmax(take(self.processed, node), -1)

    def draft_probs(self, node: Array) -> tuple[Array, Array]:
        """The law that the first drawn child of ``node`` [B] came from: weights [B, V], mass [B].

        That is the recorded row without the tokens of the point masses among the children, since
        siblings are distinct; but the whole row where point masses came last.
        """
        shape = (node.shape[0], self.processed.shape[-1])
        if self.draft.logits is None:
            return jnp.zeros(shape, self.processed.dtype), jnp.zeros(
                shape[:1], self.processed.dtype
            )
        q = jax.nn.softmax(take(self.draft.logits, node).astype(self.processed.dtype), -1)
        if self.draft.draft_to_target is not None:
            q = (
                jnp.zeros(shape, q.dtype)
                .at[:, self.draft.draft_to_target]
                .set(q, indices_are_sorted=True, unique_indices=True)
            )
        if self.draft.sampled is not None and self.distribution != "points_last":
            fixed = jnp.where(self.children(node) & ~self.draft.drawn, self.draft.tokens, shape[1])
            q = q.at[jnp.arange(shape[0])[:, None], fixed].set(0, mode="drop")
        return q, q.sum(-1)

    def odds(self, child: Array, at_p: Array, at_q: Array, q_mass: Array) -> tuple[Array, Array]:
        """p(x) and q(x) of ``child`` [B], given its weights; it passes where u q < p."""
        drawn = take(self.draft.drawn, child)
        # A token that its own recorded law excludes was not drawn from it: it is refused.
        possible = ~drawn | (at_q > 0)
        at_q = jnp.where(drawn & possible, at_q / jnp.where(q_mass > 0, q_mass, 1), 1)
        return jnp.where(possible, at_p, 0), at_q

    def residual(self, child: Array, p: Array, q: Array, q_mass: Array) -> Array:
        """What the refusal of ``child`` [B] leaves of p: max(p - q, 0), [B, V]."""
        is_token = one_hot(take(self.draft.tokens, child), p.shape[1])
        q = q / jnp.where(q_mass > 0, q_mass, 1)[:, None]
        return jnp.maximum(p - jnp.where(take(self.draft.drawn, child)[:, None], q, is_token), 0)

    def leaves_distribution(self, child: Array) -> Array:
        """Whether the refusal of ``child`` takes its token out of the law of the next: bool [B]."""
        return (
            jnp.zeros(child.shape, bool)
            if self.distribution == "iid"
            else take(self.draft.drawn, child)
        )

    def path_to(self, end: Array) -> tuple[Array, Array]:
        """Node ids from the root down to ``end`` [B], [B, max_depth+1], and its depth [B]."""
        return path_to(end, self.tree), take(self.tree.depth, end)


def reached(passes: Array, tree: Tree) -> tuple[Array, Array]:
    """Nodes that pass, [B, N], with all above them; and who is above whom: [B, N], [B, N, N].

    The root passes in any case: it is committed already. One reduction in place of a walk.
    """
    above = trees.unpack_bits(tree.ancestors, tree.depth.shape[1])
    passes = passes.at[:, 0].set(True)
    return (~above | passes[:, None, :]).all(-1), above


def path_to(end: Array, tree: Tree) -> Array:
    """Node ids from the root down to ``end`` [B], 0 below it: [B, max_depth+1]."""
    above = trees.unpack_bits(take(tree.ancestors, end), tree.depth.shape[1])  # [B, N]
    level = jnp.arange(tree.max_depth + 1)[:, None]
    here = above[:, None, :] & (tree.depth[:, None, :] == level)  # [B, max_depth+1, N]
    return jnp.argmax(here, -1).astype(jnp.int32)


def ending_at(end: Array, processed: Array, tree: Tree) -> tuple[Array, Array, Array]:
    """What a walk gives that ends at node ``end`` [B] with nothing refused: the target's law."""
    return path_to(end, tree), take(tree.depth, end), take(processed, end)


def take(rows: Array, index: Array) -> Array:
    """Entry ``index`` [B] of each of ``rows`` [B, N, ...]: [B, ...]."""
    index = index.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, 1, mode="clip")[:, 0]


def one_hot(index: Array, size: int) -> Array:
    """Bool [B, size], True at ``index`` [B]."""
    return jnp.arange(size) == index[:, None]
