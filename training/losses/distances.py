"""Distances between the target's distribution p and the drafter's q, for distillation.

Each distance maps log p and log q [..., V] to values [...], and is differentiated by log q alone.
Speculative sampling accepts a drafted token with probability sum min(p, q) (arXiv 2211.17192,
theorem 3.5). ``tvd``, ``lk`` and ``overlap`` train that; ``kl`` and ``ce`` have steadier gradients
far from the target.

If q covers a reduced vocabulary, log p [..., Vd] is the target's distribution at those tokens, not
renormalised: the probability of all other tokens counts as rejected.
"""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jspec.core.types import Array

Distance = Callable[[Array, Array], Array]
LK_ETA = 3.0  # how fast the hybrid turns from KL to total variation


def _compact(distance: Distance) -> Distance:
    """Squeeze axes of size one: with them, XLA's CPU backend sums a product 40 times slower."""

    @functools.wraps(distance)
    def squeezed(log_p: Array, log_q: Array) -> Array:
        shape = jnp.broadcast_shapes(log_p.shape, log_q.shape)[:-1]
        ones = tuple(axis for axis, size in enumerate(shape) if size == 1)
        return distance(jnp.squeeze(log_p, ones), jnp.squeeze(log_q, ones)).reshape(shape)

    return squeezed


@_compact
def overlap_of(log_p: Array, log_q: Array) -> Array:
    """Return the probability of acceptance alpha, sum min(p, q)."""
    return jnp.exp(jnp.minimum(log_p, log_q)).sum(-1)


@_compact
def ce(log_p: Array, log_q: Array) -> Array:
    """Return the cross-entropy -sum p log q; its gradient is that of ``kl``."""
    return -(jnp.exp(log_p) * log_q).sum(-1)


@_compact
def kl(log_p: Array, log_q: Array) -> Array:
    """Return the forward KL, sum p log (p / q)."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


@_compact
def reverse_kl(log_p: Array, log_q: Array) -> Array:
    """Return the reverse KL, sum q log (q / p)."""
    return (jnp.exp(log_q) * (log_q - log_p)).sum(-1)


def jsd(log_p: Array, log_q: Array) -> Array:
    """Return the Jensen-Shannon divergence, the mean KL of p and q to their mean."""
    log_mean = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * (kl(log_p, log_mean) + kl(log_q, log_mean))


def tvd(log_p: Array, log_q: Array) -> Array:
    """Return the total variation, 1 - alpha."""
    return 1 - overlap_of(log_p, log_q)


def overlap(log_p: Array, log_q: Array) -> Array:
    """Return -log alpha: its gradient is that of total variation, divided by alpha."""
    return -jnp.log(overlap_of(log_p, log_q))


def lk(log_p: Array, log_q: Array) -> Array:
    """Return a hybrid of KL and total variation, weighted by exp(-3 alpha) (arXiv 2602.23881)."""
    share = jnp.exp(-LK_ETA * jax.lax.stop_gradient(overlap_of(log_p, log_q)))
    return share * kl(log_p, log_q) + (1 - share) * tvd(log_p, log_q)


@_compact
def tvd_plus(log_p: Array, log_q: Array) -> Array:
    """Return total variation as a policy gradient with normalised reward (arXiv 2403.00858, TVD++).

    The gradient of total variation is E_q[-r grad log q] with the reward r = 1{p > q}. Here r is
    centred and divided by its standard deviation. Both are taken under q within a row, where the
    paper takes them over a batch: so the loss of a row does not depend on other rows. Subtracting a
    mean under q leaves the gradient unchanged, so only the weight of a row changes.
    """
    q = jax.lax.stop_gradient(jnp.exp(log_q))
    reward = (log_p > log_q).astype(q.dtype)
    mean = (q * reward).sum(-1, keepdims=True)
    deviation = jnp.sqrt(mean * (1 - mean) + 1e-6)
    return -(q * (reward - mean) / deviation * log_q).sum(-1)


LossName = Literal["kl", "ce", "reverse_kl", "jsd", "tvd", "tvd++", "lk", "overlap"]
_FUNCTIONS = (kl, ce, reverse_kl, jsd, tvd, tvd_plus, lk, overlap)
LOSSES: dict[LossName, Distance] = dict(zip(get_args(LossName), _FUNCTIONS, strict=True))
GUESS_LOSSES = ("labels", *LOSSES)
GuessLoss = LossName | Literal["labels"]  # labels: cross-entropy with the text
