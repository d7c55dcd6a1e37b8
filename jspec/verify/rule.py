"""The type of an acceptance rule."""

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

from jspec.core.types import Proposal, Walk
from jspec.util.messages import shown
from jspec.util.values import is_whole

Randomness = Literal["target", "round", "none"]
ALL: frozenset[Proposal] = frozenset(get_args(Proposal))
_ARGUMENTS = "(processed logits, draft, tree, randomness, proposal)"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of a rule, as ``speculative_config`` has it."""

    key: str  # the key in ``speculative_config``; rules without it refuse it
    argument: str  # the argument of ``Rule.make``
    note: str  # the effect, for the docs
    is_list: bool = False  # whether it is a list of numbers, or a number


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
    summary: str = ""
    aliases: tuple[str, ...] = ()  # values of ``rejection_sample_method``; () for the name
    settings: tuple[Setting, ...] = ()
    make: "Callable[..., Rule] | None" = None  # returns a rule with other settings
    implementation: dataclasses.InitVar[str | None] = None  # refused: a field of version 0.2

    def __post_init__(self, implementation: str | None):
        if implementation is not None:
            raise ValueError(
                f"implementation={shown(implementation)} is not a field of a Rule; give "
                "sampling_backend to Plan or LLM."
            )
        proposals, sources = get_args(Proposal), get_args(Randomness)
        substitute, walk = self.deterministic_rule, self.walk
        is_subset = isinstance(self.exact_for, frozenset) and self.exact_for <= set(proposals)
        is_rule = isinstance(substitute, Rule | None)
        for field, value, holds, valid in (
            ("name", self.name, isinstance(self.name, str), "a string"),
            ("walk", walk, callable(walk), f"a function of {_ARGUMENTS}"),
            ("randomness", self.randomness, self.randomness in sources, f"in {sources}"),
            ("exact_for", self.exact_for, is_subset, f"a frozenset of proposals among {proposals}"),
            ("deterministic_rule", substitute, is_rule, "a Rule, or None"),
            ("depths", self.depths, _is_span(self.depths), "a pair (smallest, largest or None)"),
        ):
            if not holds:
                raise ValueError(f"{field}={shown(value, 60)} of a Rule must be {valid}.")

    def for_proposal(self, proposal: Proposal) -> "Rule":
        """Return the rule that judges drafts of ``proposal``: this one, or its substitute."""
        return (self.deterministic_rule or self) if proposal == "deterministic" else self


def _is_span(depths: tuple[int, int | None]) -> bool:
    if not isinstance(depths, tuple) or len(depths) != 2 or not is_whole(depths[0], 0):
        return False
    return depths[1] is None or is_whole(depths[1], depths[0])
