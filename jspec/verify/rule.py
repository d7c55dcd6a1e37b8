"""The type of an acceptance rule."""

import dataclasses
from typing import Literal, get_args

from jspec import ops
from jspec.core.types import Proposal, Walk
from jspec.util.messages import shown
from jspec.util.values import is_whole

Randomness = Literal["target", "round", "none"]
_ARGUMENTS = "(processed logits, draft, tree, randomness, proposal)"


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule and its properties; an invalid field raises ValueError.

    ``randomness`` is the fourth argument of ``walk``. "target": the target's own draw after every
    node, int32 [B, N]; "round": uniforms in [0, 1), float32 [B, N], fresh in every round; "none":
    the same uniforms, which the walk does not use.
    """

    name: str
    walk: Walk  # a function or a frozen dataclass: plans must be hashable
    randomness: Randomness
    exact_for: frozenset[Proposal]  # proposals with the target's output distribution; none if lossy
    deterministic_rule: "Rule | None" = None  # judges deterministic drafts instead of this one
    shares_noise: bool = False  # whether the drafter draws with the target's noise
    lossless: bool = True  # False changes the output distribution, and judges any proposal
    greedy_is_match: bool = True  # whether the rule equals ``match`` at temperature 0
    depths: tuple[int, int | None] = (0, None)  # least and most depth of drafts; None: any
    # The kernel of ``ops.rejection_sampling`` that runs instead of ``walk``, with the same verdict
    # up to float32 rounding. None runs ``walk``; no kernel was measured faster.
    implementation: str | None = None
    summary: str = ""

    def __post_init__(self):
        proposals, sources = get_args(Proposal), get_args(Randomness)
        kernel, substitute, walk = self.implementation, self.deterministic_rule, self.walk
        is_subset = isinstance(self.exact_for, frozenset) and self.exact_for <= set(proposals)
        is_rule = isinstance(substitute, Rule | None)
        is_kernel = kernel in (None, *ops.IMPLEMENTATIONS)
        for field, value, holds, valid in (
            ("name", self.name, isinstance(self.name, str), "a string"),
            ("walk", walk, callable(walk), f"a function of {_ARGUMENTS}"),
            ("randomness", self.randomness, self.randomness in sources, f"in {sources}"),
            ("exact_for", self.exact_for, is_subset, f"a frozenset of proposals among {proposals}"),
            ("deterministic_rule", substitute, is_rule, "a Rule, or None"),
            ("depths", self.depths, _is_span(self.depths), "a pair (smallest, largest or None)"),
            ("implementation", kernel, is_kernel, f"None or in {ops.IMPLEMENTATIONS}"),
        ):
            if not holds:
                raise ValueError(f"{field}={shown(value, 60)} of a Rule must be {valid}.")
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
