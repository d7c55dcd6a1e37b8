"""Speculative sampling, token by token (arXiv 2211.17192, 2302.01318), on chains and on trees.

On a tree, the children of a node are judged in turn (``jspec.verify.siblings``).
"""

import jax.numpy as jnp

from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.chain import chain_probs, conclude, is_chain
from jspec.verify.nodes import Nodes, path_to, take
from jspec.verify.rule import ALL, Rule
from jspec.verify.siblings import walk


def rejection(
    processed: Array, draft: Draft, tree: Tree, uniforms: Array, proposal: Proposal
) -> tuple[Array, Array, Array]:
    """Accept a token x where u < p(x) / q(x); a refusal leaves the residual max(p - q, 0).

    q is the distribution that the child was drawn from, given its earlier siblings; a deterministic
    child has q = 1 at its token. The walk starts at the root and descends to the accepted child.

    Args:
      processed: the target's processed logits [B, N, V].
      draft: siblings hold distinct tokens.
      tree: the draft's.
      uniforms: in [0, 1), [B, N]; entry i decides node i, entry 0 is not used.
      proposal: static, how the drafter chose the children of a node.

    Returns:
      path [B, max_depth+1], num_accepted [B], next_logits [B, V]: the residual at the path's end,
      or the target's distribution where the end has no children.
    """
    if is_chain(draft):
        probs = chain_probs(processed, draft)
        # u q < p, in logs. Strict, so that p(x) = 0 is never accepted, not even by u = 0.
        accept = jnp.log(uniforms[:, 1:]) < probs.log_ratio
        num_accepted = jnp.cumprod(accept & draft.valid[:, 1:], 1, dtype=jnp.int32).sum(1)
        return conclude(probs, draft, tree, num_accepted, scale=None)
    end, next_probs, _ = walk(Nodes(processed, draft, tree, uniforms, proposal))
    return path_to(end, tree), take(tree.depth, end), jnp.log(next_probs)


REJECTION = Rule(
    "rejection",
    rejection,
    "round",
    ALL,
    summary="token rule with p/q: accept by ratio, else draw from the residual",
    aliases=("standard", "probabilistic"),
)
