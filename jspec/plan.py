"""The plan of a generation: everything static, in one hashable value."""

import dataclasses

from jspec import verify
from jspec.types import Array, Draft, Drafter, History, Request, Target, Tree, Verdict


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target, a drafter and an acceptance rule that fit each other.

    Two equal plans share their compiled programs.

    Attributes:
      target: the model whose distribution the output has.
      drafter: what proposes.
      rule: a name in ``jspec.verify.RULES``.
      ladder: node counts that the target's pass is compiled for, ascending, the last one being the
        drafter's ``tree_size``; a round runs at the smallest that holds its longest draft. () for
        the default: 1 and ``tree_size``.
      record_rounds: rounds whose drafts are kept for inspection, 0 for none.

    Raises:
      ValueError: the rule is unknown, or not exact for the drafter's proposals, or the ladder does
        not end at ``tree_size``.
    """

    target: Target
    drafter: Drafter
    rule: str = "rejection"
    ladder: tuple[int, ...] = ()
    record_rounds: int = 0

    def __post_init__(self):
        if self.rule not in verify.RULES:
            known = ", ".join(verify.RULES)
            raise ValueError(f"rule={self.rule!r} is not known; use one of {known}.")
        proposal = self.drafter.proposal
        if proposal != "point" and proposal not in self._rule.exact_for:
            fitting = [name for name, rule in verify.RULES.items() if proposal in rule.exact_for]
            raise ValueError(
                f"rule={self.rule!r} is not exact for the {proposal!r} drafts of "
                f"{type(self.drafter).__name__}; use one of {', '.join(fitting)}."
            )
        if self._rule.shares_noise and proposal != "point":
            object.__setattr__(self, "drafter", dataclasses.replace(self.drafter, noise="target"))
        size = self.drafter.tree_size
        ladder = self.ladder or tuple(sorted({1, size}))
        if ladder[-1] != size or list(ladder) != sorted(set(ladder)) or ladder[0] < 1:
            raise ValueError(
                f"ladder={self.ladder} must ascend from 1 or more to tree_size={size}."
            )
        object.__setattr__(self, "ladder", ladder)

    @property
    def _rule(self) -> verify.Rule:
        return verify.RULES[self.rule]

    @property
    def effective_rule(self) -> verify.Rule:
        """The rule that runs: point-mass drafts take the target-only walk, the same law."""
        return verify.TARGET_ONLY if self.drafter.proposal == "point" else self._rule

    def verify(
        self, request: Request, draft: Draft, tree: Tree, logits: Array, history: History
    ) -> Verdict:
        """Judges a draft by the target's raw logits; see ``jspec.verify``."""
        return verify.verify(self.effective_rule, request, draft, tree, logits, history)
