"""Target-only verification: follow the target's own draws down the draft.

The target draws a token after every node. The walk follows the child that equals its parent's draw,
and the first draw without such a child is the next token. This is exact for every tree that was
built without the target's noise. It is the best rule for deterministic drafts: no rule can accept a
path with more than its target probability.
"""

import jax.numpy as jnp

from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.nodes import end_at, with_ancestors


def match(
    processed: Array, draft: Draft, tree: Tree, draws: Array, proposal: Proposal
) -> tuple[Array, Array, Array]:
    """Accept the longest path whose every token is the draw of its parent.

    ``draws`` int32 [B, N] are the target's draws after each node; siblings may repeat a token. The
    rest is as for ``jspec.verify.rejection``; the next logits are the target's.
    """
    del proposal
    matches = draft.valid & (draft.tokens == jnp.take_along_axis(draws, tree.parents, 1))
    accepted, _ = with_ancestors(matches, tree)  # paths with equal tokens have equal draws
    end = jnp.argmax(jnp.where(accepted, tree.depth, -1), 1)
    return end_at(end, processed, tree)
