"""Typical acceptance, as Medusa proposed it (arXiv 2401.10774): lossy."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core.sampling import argmax
from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.nodes import end_at, with_ancestors
from jspec.verify.rule import Rule, Setting

_INSIDE_LOG = 1e-5  # Medusa's code adds it to p in the entropy


@dataclasses.dataclass(frozen=True)
class Typical:
    """Accepts a token x where p(x) > min(threshold, alpha exp(-entropy of p)).

    The rule keeps tokens that the target finds likely enough, whatever the draft's distribution. At
    temperature 0 it accepts the target's argmax only, so nothing is lost.

    """

    threshold: float = 0.09  # in [0, 1]; Medusa's ``posterior_threshold``
    alpha: float = 0.3  # at least 0; Medusa's ``posterior_alpha``

    def __post_init__(self):
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"posterior_threshold={self.threshold!r} must be in [0, 1].")
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"posterior_alpha={self.alpha!r} must be a number of at least 0.")

    def __call__(
        self, processed: Array, draft: Draft, tree: Tree, uniforms: Array, proposal: Proposal
    ) -> tuple[Array, Array, Array]:
        """Accept the longest path of typical tokens, the likeliest among equally long ones.

        Arguments and results as for ``jspec.verify.rejection``; the next logits are the target's.
        """
        del uniforms, proposal
        log_total = jax.nn.logsumexp(processed, -1)  # [B, N]
        p = jnp.exp(processed - log_total[..., None])
        entropy = -(p * jnp.log(p + _INSIDE_LOG)).sum(-1)
        floor = jnp.minimum(self.threshold, self.alpha * jnp.exp(-entropy))
        at_parent = lambda x: jnp.take_along_axis(x, tree.parents, 1)
        rows = jnp.arange(processed.shape[0])[:, None]
        log_p = processed[rows, tree.parents, draft.tokens] - at_parent(log_total)
        typical = draft.valid & (jnp.exp(log_p) > at_parent(floor))
        accepted, ancestors = with_ancestors(typical, tree)
        log_p = jnp.where(accepted, log_p, 0).at[:, 0].set(0)
        path_log_p = jnp.where(ancestors, log_p[:, None, :], 0).sum(-1)
        depth = jnp.where(accepted, tree.depth, -1)
        longest = accepted & (depth == depth.max(1, keepdims=True))
        end = argmax(jnp.where(longest, path_log_p, -jnp.inf))
        return end_at(end, processed, tree)


_SETTINGS = (
    Setting(
        "posterior_threshold",
        "threshold",
        "for 'typical', default 0.09: accept if p > min(threshold, alpha * exp(-entropy))",
    ),
    Setting("posterior_alpha", "alpha", "for 'typical', default 0.3"),
)


def typical(threshold: float = 0.09, alpha: float = 0.3) -> Rule:
    """Return Medusa's typical acceptance, which is lossy; see ``Typical``."""
    return Rule(
        "typical",
        Typical(threshold, alpha),
        "none",
        frozenset(),
        lossless=False,
        summary="Medusa's: accept tokens that the target finds likely enough, by its entropy; "
        "greedy decoding stays exact",
        settings=_SETTINGS,
        make=typical,
    )
