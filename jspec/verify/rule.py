"""The type of an acceptance rule."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from jspec import ops
from jspec.core.types import Proposal, Walk
from jspec.util.messages import shown
from jspec.util.values import is_whole

Randomness = Literal["target", "round", "none"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule and its properties.

    Attributes:
      name: shown in tables and messages.
      walk: the rule itself, see ``jspec.core.types.Walk``. A function or a frozen dataclass: it is
        part of a plan, which must be hashable.
      randomness: the fourth argument of ``walk``. "target": the target's own draw after every node,
        int32 [B, N]; "round": uniforms in [0, 1), float32 [B, N], fresh in every round; "none": the
        same uniforms, which the walk does not use.
      exact_for: proposals for which the output distribution is the target's; none for a lossy rule.
      deterministic_rule: the rule that judges deterministic drafts instead of this one.
      shares_noise: whether the drafter draws with the target's noise.
      lossless: False for a rule that changes the output distribution. It judges any proposal.
      greedy_is_match: whether the rule equals ``match`` at temperature 0.
      depths: smallest and largest draft depth that the settings are for; None for no limit.
      implementation: the kernel of ``ops.rejection_sampling`` that runs instead of ``walk``, with
        the same verdict up to float32 rounding. None runs ``walk``; no kernel was measured faster.
      summary: one line for tables.

    Raises:
      ValueError: a field has an invalid value, or ``implementation`` has no kernel for this rule.
    """

    name: str
    walk: Walk
    randomness: Randomness
    exact_for: frozenset[Proposal]
    deterministic_rule: "Rule | None" = None
    shares_noise: bool = False
    lossless: bool = True
    greedy_is_match: bool = True
    depths: tuple[int, int | None] = (0, None)
    implementation: str | None = None
    summary: str = ""

    def __post_init__(self):
        proposals, exact_for = get_args(Proposal), self.exact_for
        is_subset = isinstance(exact_for, frozenset) and exact_for <= set(proposals)
        for field, holds, valid in (
            ("name", isinstance(self.name, str), "a string"),
            (
                "walk",
                callable(self.walk),
                "a function of (processed logits, draft, tree, randomness, proposal)",
            ),
            (
                "randomness",
                self.randomness in get_args(Randomness),
                f"one of {_quoted(get_args(Randomness))}",
            ),
            ("exact_for", is_subset, f"a frozenset of proposals among {_quoted(proposals)}"),
            (
                "deterministic_rule",
                self.deterministic_rule is None or isinstance(self.deterministic_rule, Rule),
                "a Rule, or None",
            ),
            ("depths", _is_span(self.depths), "a pair: the smallest, and the largest or None"),
            (
                "implementation",
                self.implementation in (None, *ops.IMPLEMENTATIONS),
                f"None or one of {_quoted(ops.IMPLEMENTATIONS)}",
            ),
        ):
            if not holds:
                value = shown(getattr(self, field), 60)
                raise ValueError(f"{field}={value} of a Rule must be {valid}.")
        if self.implementation is not None and self.name not in ops.REJECTION_SAMPLING_RULES:
            known = " and ".join(map(repr, ops.REJECTION_SAMPLING_RULES))
            raise ValueError(
                f"implementation={self.implementation!r} is for the rules {known}, not for "
                f"{self.name!r}; leave it out."
            )

    def for_proposal(self, proposal: Proposal) -> "Rule":
        """Return the rule that judges drafts of ``proposal``: this one, or its substitute."""
        return (self.deterministic_rule or self) if proposal == "deterministic" else self


def _is_span(depths: tuple[int, int | None]) -> bool:
    if not isinstance(depths, tuple) or len(depths) != 2 or not is_whole(depths[0], 0):
        return False
    return depths[1] is None or is_whole(depths[1], depths[0])


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
