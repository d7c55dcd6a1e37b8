"""The laws of a drafted chain, which every rule for sampled chains starts from."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.types import Array, Draft


class ChainLaws(NamedTuple):
    """Normalised log-laws of a chain of K drafted tokens, and their ratio at the tokens."""

    log_p: Array  # [B, K+1, V], row i is the target's law after node i
    log_q: Array  # [B, K, V], row i is the law that node i + 1 was drawn from
    log_ratio: Array  # [B, K], log p(x) / q(x) of node i + 1


def chain_laws(warped: Array, draft: Draft) -> ChainLaws:
    """Normalises warped logits [B, K+1, V] and ``draft.logits``, and gathers them at the tokens.

    A token that its own recorded law excludes was not drawn from it; its ratio is set to 0, so
    that it is refused.
    """
    depth = draft.tokens.shape[1] - 1
    log_p = jax.nn.log_softmax(warped, -1)
    log_q = jax.nn.log_softmax(draft.logits[:, :depth].astype(log_p.dtype), -1)
    tokens = draft.tokens[:, 1:, None]
    at_p = jnp.take_along_axis(log_p[:, :depth], tokens, -1)[..., 0]
    at_q = jnp.take_along_axis(log_q, tokens, -1)[..., 0]
    drawable = ~jnp.isneginf(at_q)
    log_ratio = jnp.where(drawable, at_p - jnp.where(drawable, at_q, 0), -jnp.inf)
    return ChainLaws(log_p, log_q, log_ratio)
