"""Acceptance at given rates, for benchmarks: it shows the gain from a draft of given quality."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.verify.nodes import end_at, take
from jspec.verify.rule import Rule, Setting


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts the first drafted token of each depth at a given rate. Lossy.

    Give one of the two attributes; their keys in ``speculative_config`` are
    ``synthetic_acceptance_rates`` and ``synthetic_acceptance_length``. ``length`` stands for the
    rates with the smallest variance: 1 for the first tokens and 0 for the last.
    """

    rates: tuple[float, ...] | None = None  # r_i: probability to accept the first i drafted tokens
    length: float | None = None  # mean tokens a round, the next token included

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
        got = f"got {list(self.rates)}."
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(f"synthetic_acceptance_rates entries must be in [0, 1], {got}")
        if any(rate < later for rate, later in zip(self.rates, self.rates[1:], strict=False)):
            raise ValueError(f"synthetic_acceptance_rates must be non-increasing, {got}")

    @property
    def depths(self) -> tuple[int, int | None]:
        """Smallest and largest draft depth that fit the rates; None for no limit."""
        if self.rates is not None:
            return len(self.rates), len(self.rates)
        return int(-(-(self.length - 1) // 1)), None

    def rates_to(self, depth: int) -> tuple[float, ...]:
        """Return the rates of ``depth`` tokens.

        >>> Synthetic(length=2.25).rates_to(4)
        (1.0, 0.25, 0.0, 0.0)
        """
        if self.rates is not None:
            return self.rates[:depth]
        return tuple(float(min(max(self.length - 1 - i, 0), 1)) for i in range(depth))

    def __call__(
        self, processed: Array, draft: Draft, tree: Tree, uniforms: Array, proposal: Proposal
    ) -> tuple[Array, Array, Array]:
        """Follow the first valid children from the root, the i-th with probability r_i / r_{i-1}.

        Arguments and results as for ``jspec.verify.rejection``; the next logits are the target's.
        """
        del proposal
        index = jnp.arange(tree.parents.shape[1])
        end = jnp.zeros_like(tree.parents[:, 0])
        active, previous = True, 1.0
        for rate in self.rates_to(tree.max_depth):
            children = draft.valid & (tree.parents == end[:, None]) & (index > 0)
            child = jnp.argmax(children, 1).astype(end.dtype)
            active &= children.any(1) & (
                take(uniforms, child) < (rate / previous if previous else 0)
            )
            end, previous = jnp.where(active, child, end), rate
        return end_at(end, processed, tree)


_SETTINGS = (
    Setting(
        "synthetic_acceptance_rates",
        "rates",
        "for 'synthetic': how often the first i drafted tokens are accepted, for i = 1..K",
        is_list=True,
    ),
    Setting(
        "synthetic_acceptance_length",
        "length",
        "for 'synthetic', instead of rates: mean tokens a round, bonus token included",
    ),
)


def synthetic(rates: Sequence[float] | None = None, length: float | None = None) -> Rule:
    """Return lossy acceptance at given rates, for benchmarks; see ``Synthetic``."""
    walk = Synthetic(rates if rates is None else tuple(rates), length)
    return Rule(
        "synthetic",
        walk,
        "round",
        frozenset(),
        depths=walk.depths,
        lossless=False,
        greedy_is_match=False,
        summary="for benchmarks: accept any draft, at given rates",
        settings=_SETTINGS,
        make=synthetic,
    )
