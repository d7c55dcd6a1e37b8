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

    Args:
      processed: the target's processed logits [B, N, V].
      draft: siblings may repeat a token.
      tree: the draft's.
      draws: int32 [B, N], the target's draw after each node.
      proposal: not used.

    Returns:
      path [B, max_depth+1], num_accepted [B], next_logits [B, V]: the target's at the path's end.
    """
    del proposal
    matches = draft.valid & (draft.tokens == jnp.take_along_axis(draws, tree.parents, 1))
    accepted, _ = with_ancestors(matches, tree)  # paths with equal tokens have equal draws
    end = jnp.argmax(jnp.where(accepted, tree.depth, -1), 1)
    return end_at(end, processed, tree)
