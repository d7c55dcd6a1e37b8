"""Acceptance by given rates, for benchmarks: what a draft of such a quality would be worth."""

import dataclasses

import jax.numpy as jnp

from jspec.core.types import Array, Draft, Tree
from jspec.verify.nodes import ending_at, take


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts whatever was drafted first at each depth, as often as it is told to. Lossy.

    Give one of the two. Their names are the keys of ``speculative_config``.

    Attributes:
      rates: unconditional rates r_1, r_2, ...: how often the first i drafted tokens are accepted.
      length: mean tokens a round, the one that follows the draft included: the rates are those of
        the smallest variance, 1 for the first tokens and 0 for the last.

    Raises:
      ValueError: rates that are not in [0, 1] or rise, a length below 1, or both or neither.
    """

    rates: tuple[float, ...] | None = None
    length: float | None = None

    def __post_init__(self):
        if (self.rates is None) == (self.length is None):
            raise ValueError(
                "rejection_sample_method='synthetic' requires exactly one of "
                "synthetic_acceptance_rates or synthetic_acceptance_length."
            )
        if self.length is not None and not 1 <= self.length < float("inf"):
            raise ValueError(f"synthetic_acceptance_length must be at least 1, got {self.length}.")
        if self.rates is None:
            return
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))
        said = f"got {list(self.rates)}."
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(f"synthetic_acceptance_rates entries must be in [0, 1], {said}")
        if any(rate < later for rate, later in zip(self.rates, self.rates[1:], strict=False)):
            raise ValueError(f"synthetic_acceptance_rates must be non-increasing, {said}")

    @property
    def depths(self) -> tuple[int, int | None]:
        """The shallowest and the deepest drafts that can be accepted so; None for no limit."""
        if self.rates is not None:
            return len(self.rates), len(self.rates)
        return int(-(-(self.length - 1) // 1)), None

    def rates_to(self, depth: int) -> tuple[float, ...]:
        """The rates of ``depth`` tokens.

        >>> Synthetic(length=2.25).rates_to(4)
        (1.0, 0.25, 0.0, 0.0)
        """
        if self.rates is not None:
            return self.rates[:depth]
        return tuple(float(min(max(self.length - 1 - i, 0), 1)) for i in range(depth))

    def __call__(
        self, processed: Array, draft: Draft, tree: Tree, uniforms: Array
    ) -> tuple[Array, Array, Array]:
        """Follows the first valid children from the root, the i-th with chance r_i / r_{i-1}.

        Arguments and results as for ``jspec.verify.rejection``; no law is looked at, and the next
        one is always the target's.
        """
        index = jnp.arange(tree.parents.shape[1])
        end = jnp.zeros_like(tree.parents[:, 0])
        going, before = True, 1.0
        for rate in self.rates_to(tree.max_depth):
            below = draft.valid & (tree.parents == end[:, None]) & (index > 0)
            child = jnp.argmax(below, 1).astype(end.dtype)
            going &= below.any(1) & (take(uniforms, child) < (rate / before if before else 0))
            end, before = jnp.where(going, child, end), rate
        return ending_at(end, processed, tree)
