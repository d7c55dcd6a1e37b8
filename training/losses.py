"""Distances between the target's law p and the drafter's q, for distillation.

Each maps log p and log q [..., V] to values [...], and is differentiated by log q alone. The chance
that speculative sampling accepts a drafted token is sum min(p, q) (arXiv 2211.17192, theorem 3.5),
so ``tvd``, ``lk`` and ``overlap`` train what is measured; ``kl`` and ``ce`` have the steadier
gradients far from the target.

Where q knows only some tokens, log p [..., Vd] is the target's law at those, not renormalised:
then what the others weigh counts as rejected.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jspec.core.types import Array

Distance = Callable[[Array, Array], Array]
LK_ETA = 3.0  # how fast the hybrid turns from KL to total variation


def _compact(distance: Distance) -> Distance:
    """``distance`` of arrays without their axes of one: with such an axis, XLA's CPU backend takes
    forty times as long to sum a product."""

    @functools.wraps(distance)
    def of_rows(log_p: Array, log_q: Array) -> Array:
        shape = jnp.broadcast_shapes(log_p.shape, log_q.shape)[:-1]
        ones = tuple(axis for axis, size in enumerate(shape) if size == 1)
        return distance(jnp.squeeze(log_p, ones), jnp.squeeze(log_q, ones)).reshape(shape)

    return of_rows


@_compact
def overlap_of(log_p: Array, log_q: Array) -> Array:
    """Chance of acceptance alpha, sum min(p, q)."""
    return jnp.exp(jnp.minimum(log_p, log_q)).sum(-1)


@_compact
def ce(log_p: Array, log_q: Array) -> Array:
    """Cross-entropy of q against p, -sum p log q; its gradient is that of ``kl``."""
    return -(jnp.exp(log_p) * log_q).sum(-1)


@_compact
def kl(log_p: Array, log_q: Array) -> Array:
    """Forward KL, sum p log (p / q)."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


@_compact
def reverse_kl(log_p: Array, log_q: Array) -> Array:
    """Reverse KL, sum q log (q / p)."""
    return (jnp.exp(log_q) * (log_q - log_p)).sum(-1)


def jsd(log_p: Array, log_q: Array) -> Array:
    """Jensen-Shannon divergence, the mean KL of p and q to their mean."""
    log_mean = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * (kl(log_p, log_mean) + kl(log_q, log_mean))


def tvd(log_p: Array, log_q: Array) -> Array:
    """Total variation, 1 - alpha."""
    return 1 - overlap_of(log_p, log_q)


def overlap(log_p: Array, log_q: Array) -> Array:
    """-log alpha: total variation's gradient, divided by the chance of acceptance."""
    return -jnp.log(overlap_of(log_p, log_q))


def lk(log_p: Array, log_q: Array) -> Array:
    """Hybrid of KL and total variation, weighed by exp(-3 alpha) (arXiv 2602.23881)."""
    share = jnp.exp(-LK_ETA * jax.lax.stop_gradient(overlap_of(log_p, log_q)))
    return share * kl(log_p, log_q) + (1 - share) * tvd(log_p, log_q)


@_compact
def tvd_plus(log_p: Array, log_q: Array) -> Array:
    """Total variation as a policy gradient with a normalised reward (arXiv 2403.00858, TVD++).

    The gradient of total variation is E_q[-r grad log q] with the reward r = 1{p > q}; here r has
    its mean taken off and is divided by its deviation. Both are a row's own, under its q, where the
    paper takes those of a batch: so a row's loss depends on no other, be it padding or one that
    does not count. Under q no mean changes the gradient, so what is left of the paper's rule is how
    much a row weighs: more, the surer its reward is.
    """
    q = jax.lax.stop_gradient(jnp.exp(log_q))
    reward = (log_p > log_q).astype(q.dtype)
    mean = (q * reward).sum(-1, keepdims=True)
    deviation = jnp.sqrt(mean * (1 - mean) + 1e-6)
    return -(q * (reward - mean) / deviation * log_q).sum(-1)


LossName = Literal["kl", "ce", "reverse_kl", "jsd", "tvd", "tvd++", "lk", "overlap"]
LOSSES: dict[LossName, Distance] = {
    "kl": kl,
    "ce": ce,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "tvd++": tvd_plus,
    "lk": lk,
    "overlap": overlap,
}
