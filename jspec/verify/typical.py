"""Typical acceptance, as Medusa proposed it (arXiv 2401.10774): lossy."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core.sampling import argmax
from jspec.core.types import Array, Draft, Tree
from jspec.verify.nodes import ending_at, reached

_INSIDE_LOG = 1e-5  # added to p where Medusa's code takes its entropy


@dataclasses.dataclass(frozen=True)
class Typical:
    """Accepts a token x where p(x) > min(threshold, alpha exp(-entropy of p)): by p alone.

    What the target finds likely enough is kept, however often it would be said. A point mass of the
    target is met exactly, so at temperature 0 nothing is lost.

    Attributes:
      threshold: in [0, 1]; Medusa's ``posterior_threshold``.
      alpha: at least 0; Medusa's ``posterior_alpha``.

    Raises:
      ValueError: a setting is out of range.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    def __post_init__(self):
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"posterior_threshold={self.threshold!r} must be in [0, 1].")
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"posterior_alpha={self.alpha!r} must be a number of at least 0.")

    def __call__(
        self, processed: Array, draft: Draft, tree: Tree, uniforms: Array
    ) -> tuple[Array, Array, Array]:
        """The longest path of accepted tokens, and among equals the likeliest.

        Arguments and results as for ``jspec.verify.rejection``; the coins and the laws of the
        draft are not used, and the next law is always the target's.
        """
        del uniforms
        log_total = jax.nn.logsumexp(processed, -1)  # [B, N]
        p = jnp.exp(processed - log_total[..., None])
        entropy = -(p * jnp.log(p + _INSIDE_LOG)).sum(-1)
        floor = jnp.minimum(self.threshold, self.alpha * jnp.exp(-entropy))
        at_parent = lambda x: jnp.take_along_axis(x, tree.parents, 1)
        rows = jnp.arange(processed.shape[0])[:, None]
        log_p = processed[rows, tree.parents, draft.tokens] - at_parent(log_total)
        accepted, above = reached(draft.valid & (jnp.exp(log_p) > at_parent(floor)), tree)
        log_p = jnp.where(accepted, log_p, 0).at[:, 0].set(0)
        score = jnp.where(above, log_p[:, None, :], 0).sum(-1)
        longest = jnp.where(accepted, tree.depth, -1)
        longest = accepted & (longest == longest.max(1, keepdims=True))
        end = argmax(jnp.where(longest, score, -jnp.inf))
        return ending_at(end, processed, tree)
