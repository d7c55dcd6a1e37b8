"""Distributions of a drafted chain, and the end of a walk along it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.core import trees
from jspec.core.sampling import log_residual
from jspec.core.types import Array, Draft, Tree


class ChainProbs(NamedTuple):
    """Normalised log-probabilities of a chain of K drafted tokens."""

    log_p: Array  # [B, K+1, V], row i is the target's distribution after node i
    log_q: Array  # [B, K, Vd], row i is the distribution that node i + 1 was drawn from
    log_ratio: Array  # [B, K], log p(x) / q(x) of node i + 1; q is 1 for a deterministic node
    log_p_token: Array  # [B, K], log p(x) of node i + 1


def is_chain(draft: Draft) -> bool:
    """Return whether a draft with distributions is a chain, which tracing decides."""
    return draft.logits is not None and trees.is_chain(draft.parents)


def chain_probs(processed: Array, draft: Draft) -> ChainProbs:
    """Normalise processed logits [B, K+1, V] and ``draft.logits``, and gather them at the tokens.

    A token that its own recorded distribution excludes was not drawn from it. Its ratio is 0, so
    that it is refused.
    """
    depth = draft.tokens.shape[1] - 1
    log_p = jax.nn.log_softmax(processed, -1)
    recorded = draft.logits[:, :depth].astype(log_p.dtype)
    missing = depth - recorded.shape[1]  # rows of the last nodes, whose children are deterministic
    log_q = jax.nn.log_softmax(jnp.pad(recorded, ((0, 0), (0, missing), (0, 0))), -1)
    p_token = _at(log_p[:, :depth], draft.tokens[:, 1:])
    q_token = _at_draft_tokens(log_q, draft)
    if draft.sampled is not None:
        q_token = jnp.where(draft.sampled[:, 1:], q_token, 0)
    possible = ~jnp.isneginf(q_token)
    log_ratio = jnp.where(possible, p_token - jnp.where(possible, q_token, 0), -jnp.inf)
    return ChainProbs(log_p, log_q, log_ratio, p_token)


def _at(log_probs: Array, tokens: Array) -> Array:
    return jnp.take_along_axis(log_probs, tokens[..., None], -1, mode="promise_in_bounds")[..., 0]


def _at_draft_tokens(log_q: Array, draft: Draft) -> Array:
    """log q at the drafted tokens, -inf for those outside a reduced vocabulary: [B, K]."""
    tokens = draft.tokens[:, 1:]
    if draft.draft_to_target is None:
        return _at(log_q, tokens)
    ids = jnp.searchsorted(draft.draft_to_target, tokens)
    ids = jnp.minimum(ids, draft.draft_to_target.shape[0] - 1)
    return jnp.where(draft.draft_to_target[ids] == tokens, _at(log_q, ids), -jnp.inf)


def conclude(
    probs: ChainProbs, draft: Draft, tree: Tree, num_accepted: Array, scale: Array | None
) -> tuple[Array, Array, Array]:
    """Return path, length and next logits: the residual after a refusal, else the target's.

    ``scale`` [B, 1] is the log of the factor on p in the residual; None for 1.
    """
    row = num_accepted[:, None, None]
    log_p = jnp.take_along_axis(probs.log_p, row, 1)[:, 0]
    if probs.log_q.shape[1]:
        refused = jnp.take_along_axis(
            jnp.pad(draft.valid[:, 1:], ((0, 0), (0, 1))), num_accepted[:, None], 1
        )
        last = probs.log_q.shape[1] - 1
        log_q = jnp.take_along_axis(probs.log_q, jnp.minimum(row, last), 1)[:, 0]
        log_q = _over_target_ids(log_q, draft, num_accepted, log_p)
        scaled = log_p if scale is None else log_p + scale
        log_p = jnp.where(refused, log_residual(scaled, log_q), log_p)
    chain = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)
    path = jnp.broadcast_to(chain, (len(num_accepted), len(chain)))
    return path, num_accepted.astype(jnp.int32), log_p


def _over_target_ids(log_q: Array, draft: Draft, num_accepted: Array, like: Array) -> Array:
    """log q of the refused node over all target ids [B, V]; one-hot for a deterministic node."""
    if draft.draft_to_target is not None:
        empty = jnp.full_like(like, -jnp.inf)
        log_q = empty.at[:, draft.draft_to_target].set(
            log_q, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
        )
    if draft.sampled is None:
        return log_q
    node = jnp.minimum(num_accepted + 1, draft.tokens.shape[1] - 1)[:, None]
    is_token = jnp.arange(like.shape[1]) == jnp.take_along_axis(draft.tokens, node, 1)
    drawn = jnp.take_along_axis(draft.sampled, node, 1)
    return jnp.where(drawn, log_q, jnp.where(is_token, 0.0, -jnp.inf))
