"""Target-only verification: walk down the draft along the target's own draws.

The target draws a token after every node; from the root, follow the child that equals the draw of
its parent, and emit the first draw that no child matches. Exact for every tree that was built
without looking at the target's noise, and the best rule there is for point-mass drafts: no rule can
accept a path with more than its target probability.
"""

import jax.numpy as jnp

from jspec import topology
from jspec.types import Array, Draft, Tree


def match(warped: Array, draft: Draft, tree: Tree, draws: Array) -> tuple[Array, Array, Array]:
    """Accepts the longest path whose every token is the draw of its parent.

    Args:
      warped: the target's warped logits [B, N, V].
      draft: the proposal; siblings hold distinct tokens.
      tree: its shape.
      draws: int32 [B, N], what the target draws after each node.

    Returns:
      path [B, max_depth+1], num_accepted [B], next_logits [B, V]: the law at the path's end.
    """
    drawn_above = jnp.take_along_axis(draws, tree.parents, 1)
    matches = draft.valid & (draft.tokens == drawn_above)
    matches = matches.at[:, 0].set(True)  # the root is committed already
    # One [N, N] reduction instead of a walk: siblings differ, so the accepted nodes are one path.
    above = topology.unpack_bits(tree.ancestors, tree.depth.shape[1])
    accepted = (~above | matches[:, None, :]).all(-1)
    end = jnp.argmax(jnp.where(accepted, tree.depth, -1), 1)
    path = _path_to(end, above, tree)
    num_accepted = jnp.take_along_axis(tree.depth, end[:, None], 1)[:, 0]
    next_logits = jnp.take_along_axis(warped, end[:, None, None], 1)[:, 0]
    return path, num_accepted, next_logits


def _path_to(end: Array, above: Array, tree: Tree) -> Array:
    """Node ids from the root down to ``end`` [B], 0 below it: [B, max_depth+1]."""
    on_path = jnp.take_along_axis(above, end[:, None, None], 1)[:, 0]  # [B, N]
    level = jnp.arange(tree.max_depth + 1)[:, None]
    here = on_path[:, None, :] & (tree.depth[:, None, :] == level)  # [B, max_depth+1, N]
    return jnp.argmax(here, -1).astype(jnp.int32)
