"""Target-only verification: walk down the draft along the target's own draws.

The target draws a token after every node; from the root, follow the child that equals the draw of
its parent, and emit the first draw that no child matches. Exact for every tree that was built
without looking at the target's noise, and the best rule there is for point-mass drafts: no rule can
accept a path with more than its target probability.
"""

import jax.numpy as jnp

from jspec.core.types import Array, Draft, Tree
from jspec.verify.nodes import ending_at, reached


def match(processed: Array, draft: Draft, tree: Tree, draws: Array) -> tuple[Array, Array, Array]:
    """Accepts the longest path whose every token is the draw of its parent.

    Args:
      warped: the target's warped logits [B, N, V].
      draft: the proposal; siblings may repeat a token.
      tree: its shape.
      draws: int32 [B, N], what the target draws after each node.

    Returns:
      path [B, max_depth+1], num_accepted [B], next_logits [B, V]: the law at the path's end.
    """
    drawn_above = jnp.take_along_axis(draws, tree.parents, 1)
    matches = draft.valid & (draft.tokens == drawn_above)
    accepted, _ = reached(matches, tree)  # one text: twins draw the same after them
    end = jnp.argmax(jnp.where(accepted, tree.depth, -1), 1)
    return ending_at(end, processed, tree)
