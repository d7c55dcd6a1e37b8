"""Speculative sampling of a chain, token by token (arXiv 2211.17192, 2302.01318)."""

import jax.numpy as jnp

from jspec.sampling import log_residual
from jspec.types import Array, Draft, Tree
from jspec.verify.chain import ChainLaws, chain_laws


def rejection(warped: Array, draft: Draft, tree: Tree, coins: Array) -> tuple[Array, Array, Array]:
    """Accepts x_i while u_i < p_i(x_i) / q_i(x_i); a rejection leaves the residual max(p - q, 0).

    Args:
      warped: the target's warped logits [B, K+1, V].
      draft: a chain whose tokens were drawn from ``draft.logits``.
      tree: its shape.
      coins: uniforms in [0, 1), [B, K+1]; coin i decides node i, coin 0 is not used.

    Returns:
      path [B, K+1], num_accepted [B], next_logits [B, V]: the residual after a rejection, the
      target's law after full acceptance.
    """
    laws = chain_laws(warped, draft)
    # u q < p, in logs. Strict, so that p(x) = 0 is never accepted, not even by u = 0.
    accept = jnp.log(coins[:, 1:]) < laws.log_ratio
    num_accepted = jnp.cumprod(accept & draft.valid[:, 1:], 1, dtype=jnp.int32).sum(1)
    return _conclude(laws, warped, draft, tree, num_accepted, scale=None)


def block(warped: Array, draft: Draft, tree: Tree, coins: Array) -> tuple[Array, Array, Array]:
    """Block verification (arXiv 2403.10444): the chain is judged as a whole, never accepting less.

    With P_0 = 1 and P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), node i passes its own coin with
    probability h_i = R_i / (R_i + 1 - P_i), where R_i is the mass of max(P_i p_{i+1} - q_{i+1}, 0),
    and h_i = P_i at the last drafted node. The *last* node that passes ends the accepted prefix.
    Arguments and results as for ``rejection``.
    """
    laws = chain_laws(warped, draft)
    valid = draft.valid[:, 1:]
    keep = jnp.where(valid, laws.log_ratio, -jnp.inf)
    log_joint = _clipped_cumsum(keep)  # log P_i, [B, K]
    rest = _residual_mass(laws, log_joint)  # R_i, [B, K]; the last column is not used
    joint = jnp.exp(log_joint)
    # 0 / 0 means that everything so far and the next law agree: passing is certain.
    missing = rest + 1 - joint
    threshold = jnp.where(missing > 0, rest / jnp.where(missing > 0, missing, 1), 1)
    is_last = valid & ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    threshold = jnp.where(is_last, joint, threshold)
    passed = valid & (coins[:, 1:] < threshold)
    num_accepted = jnp.where(passed, jnp.arange(1, passed.shape[1] + 1), 0).max(1, initial=0)
    reached = jnp.pad(log_joint, ((0, 0), (1, 0)))  # log P_0 = 0
    scale = jnp.take_along_axis(reached, num_accepted[:, None], 1)
    return _conclude(laws, warped, draft, tree, num_accepted, scale)


def _clipped_cumsum(log_ratio: Array) -> Array:
    """log P_i = min(0, log P_{i-1} + log r_i) along a chain, [B, K]."""
    log_joint, columns = jnp.zeros(log_ratio.shape[:1], log_ratio.dtype), []
    for index in range(log_ratio.shape[1]):
        log_joint = jnp.minimum(0, log_joint + log_ratio[:, index])
        columns.append(log_joint)
    return jnp.stack(columns, 1) if columns else log_ratio


def _residual_mass(laws: ChainLaws, log_joint: Array) -> Array:
    """R_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0) for i = 1..K-1, then 0: [B, K]."""
    p = jnp.exp(log_joint[:, :-1, None] + laws.log_p[:, 1:-1])
    q = jnp.exp(laws.log_q[:, 1:])
    return jnp.pad(jnp.maximum(p - q, 0).sum(-1), ((0, 0), (0, 1)))[:, : log_joint.shape[1]]


def _conclude(laws, warped, draft, tree, num_accepted, scale):
    """Path and next law: the residual where a drafted node was refused, else the target's law."""
    row = num_accepted[:, None, None]
    log_p = jnp.take_along_axis(laws.log_p, row, 1)[:, 0]
    if laws.log_q.shape[1]:
        refused = jnp.take_along_axis(
            jnp.pad(draft.valid[:, 1:], ((0, 0), (0, 1))), num_accepted[:, None], 1
        )
        last = laws.log_q.shape[1] - 1
        log_q = jnp.take_along_axis(laws.log_q, jnp.minimum(row, last), 1)[:, 0]
        scaled = log_p if scale is None else log_p + scale
        log_p = jnp.where(refused, log_residual(scaled, log_q), log_p)
    path = jnp.broadcast_to(jnp.arange(tree.max_depth + 1, dtype=jnp.int32),
                            (warped.shape[0], tree.max_depth + 1))  # fmt: skip
    return path, num_accepted.astype(jnp.int32), log_p
