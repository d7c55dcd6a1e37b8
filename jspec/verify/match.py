"""Target-only verification: follow the target's own draws down the draft.

The target draws a token after every node. The walk follows the child that equals its parent's draw,
and the first draw without such a child is the next token. This is exact for every tree that was
built without the target's noise. It is the best rule for deterministic drafts: no rule can accept a
path with more than its target probability.

``match`` judges draws after all nodes; ``follow`` makes the draws on the path only.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jspec import sharding
from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.nodes import end_at, path_to, take, with_ancestors
from jspec.verify.rule import ALL, Rule


def match(
    processed: Array, draft: Draft, tree: Tree, draws: Array, proposal: Proposal
) -> tuple[Array, Array, Array]:
    """Accept the longest path whose every token is the draw of its parent.

    ``draws`` int32 [B, N] are the target's draws after each node; siblings may repeat a token. The
    rest is as for ``jspec.verify.rejection``; the next logits are the target's.
    """
    del proposal
    at_parent = jnp.take_along_axis(draws, tree.parents, 1, mode="promise_in_bounds")
    matches = draft.valid & (draft.tokens == at_parent)
    accepted, _ = with_ancestors(matches, tree)  # paths with equal tokens have equal draws
    end = jnp.argmax(jnp.where(accepted, tree.depth, -1), 1)
    return end_at(end, processed, tree)


_EQUAL = "accept while the target's own draw equals the draft"
_SHARED = "match, with draft and target sharing noise: the text of plain sampling"
MATCH = Rule("match", match, "target", ALL, summary=_EQUAL, aliases=("strict",))
COUPLED = Rule("coupled", match, "target", ALL, shares_noise=True, summary=_SHARED)


def follow(draw: Callable[[Array], Array], draft: Draft, tree: Tree) -> tuple[Array, Array, Array]:
    """Return the path and num_accepted of ``match``, and the draw after the path [B].

    ``draw`` maps nodes [B] to the target's draws after them, int32 [B]; -1 ends a row's path. It
    runs while some row descends, so a round draws for few nodes: a draw costs V values of noise.
    Where devices may divide the rows, it runs for every depth, and no device waits for others.
    """

    def descend(carry: tuple) -> tuple:
        here, end, token, active = carry
        node = jnp.argmax(here, 1).astype(end.dtype)
        token = jnp.where(active, draw(node), token)
        # Siblings may repeat a token: all of them are on the path until one of them goes on.
        parent_here = jnp.take_along_axis(here, tree.parents, 1, mode="promise_in_bounds")
        below = draft.valid & parent_here & (draft.tokens == token[:, None]) & active[:, None]
        below = below.at[:, 0].set(False)
        end = jnp.where(active, node, end)
        return below, end, token, below.any(1)

    root = jnp.zeros(draft.tokens.shape[:1], jnp.int32)
    here = jnp.zeros(draft.tokens.shape, bool).at[:, 0].set(True)
    start = here, root, root, jnp.ones(root.shape, bool)
    if sharding.num_row_shards(draft.tokens) > 1:
        last = lax.fori_loop(0, tree.max_depth + 1, lambda _, carry: descend(carry), start)
    else:
        last = lax.while_loop(lambda carry: carry[-1].any(), descend, start)
    _, end, token, _ = last
    return path_to(end, tree), take(tree.depth, end), token
