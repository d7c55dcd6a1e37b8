"""The plan of a generation: everything static, in one hashable value."""

import copy
import dataclasses
from typing import Any

from jspec import verify
from jspec.core import validation
from jspec.core.types import Array, Draft, Drafter, History, Mode, Request, Target, Tree, Verdict
from jspec.drafters.trees import tree_settings
from jspec.util.messages import shown
from jspec.util.values import are_whole, is_whole, listed


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target, a drafter and an acceptance rule that fit each other.

    Two equal plans share their compiled programs.

    Attributes:
      target: the model whose distribution the output has.
      drafter: what proposes; it may be ``MultiMode``.
      rule: a name in ``jspec.verify.RULES``, or a ``Rule``: of your own, or with other settings
        than those listed. A lossy rule must be asked for like this; nothing falls back on one.
      ladder: node counts that the target's pass is compiled for, ascending, the last one being the
        drafter's ``tree_size``; a round runs at the smallest that holds its longest draft. () for
        the default: the drafter's ``node_buckets`` if it has any, else 1 and ``tree_size``.
      record_rounds: rounds whose drafts are kept for inspection, 0 for none.
      record_nodes: whether their nodes are kept, too, or only how many were drafted and accepted.

    Raises:
      ValueError: the target or the drafter is none, the rule is unknown, or not exact for the
        drafter's proposals, or its settings are for other depths, or it names a kernel that these
        proposals never reach, or noise that the drafter cannot share; or the ladder does not end at
        ``tree_size``, or rounds to record are no number of them.
    """

    target: Target
    drafter: Drafter
    rule: str | verify.Rule = "rejection"
    node_buckets: tuple[int, ...] = ()
    record_rounds: int = 0
    record_nodes: bool = True

    def __post_init__(self):
        validation.check_target(self.target)
        validation.check_drafter(self.drafter)
        if isinstance(self.rule, str) and self.rule not in verify.RULES:
            known = ", ".join(verify.RULES)
            raise ValueError(f"rule={self.rule!r} is not known; use one of {known}.")
        if not isinstance(self.rule, str | verify.Rule):
            raise ValueError(
                f"rule={shown(self.rule, 60)} must be a name in jspec.RULES, or a "
                "jspec.verify.Rule: a walk of your own with what it is exact for."
            )
        validation.check_hashable("rule", self._rule)
        _check_pair(self._rule, self.drafter)
        _check_kernel(self._rule, self.drafter)
        if self._rule.shares_noise:
            object.__setattr__(self, "drafter", validation.sharing_noise(self.drafter))
        if not is_whole(self.record_rounds, 0):
            raise ValueError(
                f"record_rounds={shown(self.record_rounds)} must be a whole number, 0 for none."
            )
        object.__setattr__(self, "node_buckets", _node_buckets(self.drafter, self.node_buckets))

    def in_mode(self, mode: Mode) -> "Plan":
        """The plan of rounds that ``mode`` drafts for, one of a ``MultiMode`` drafter's.

        A rule's settings are for the depth of them all: drafts may end before. Where nothing is
        drafted, a rule that is not for point masses has nothing to judge: the target draws.
        """
        own, size = copy.copy(self), mode.tree_size
        node_buckets = getattr(mode, "node_buckets", tree_settings.node_buckets(size))
        object.__setattr__(own, "drafter", mode)
        if self._rule.lossless and mode.proposal not in self._rule.exact_for:
            object.__setattr__(own, "rule", "match")
        object.__setattr__(
            own,
            "node_buckets",
            tuple(n for n in node_buckets if n == size or n in self.node_buckets),
        )
        return own

    @property
    def _rule(self) -> verify.Rule:
        return verify.RULES[self.rule] if isinstance(self.rule, str) else self.rule

    @property
    def effective_rule(self) -> verify.Rule:
        """The rule as it runs on this drafter's proposals."""
        return self._rule.for_proposal(self.drafter.proposal)

    def verify(
        self, request: Request, draft: Draft, tree: Tree, logits: Array, history: History
    ) -> Verdict:
        """Judges a draft by the target's raw logits; see ``jspec.verify``."""
        rule, proposal = self.effective_rule, self.drafter.proposal
        return verify.verify(rule, proposal, request, draft, tree, logits, history)


def _node_buckets(drafter: Drafter, asked: Any) -> tuple[int, ...]:
    """The node counts that were ``asked`` for, or else the drafter's."""
    size = drafter.tree_size
    own = tuple(getattr(drafter, "node_buckets", ()))
    node_buckets = listed("node_buckets", asked) or own or tree_settings.node_buckets(size)
    if (
        not are_whole(node_buckets, 1)
        or node_buckets[-1] != size
        or list(node_buckets) != sorted(set(node_buckets))
    ):
        raise ValueError(
            f"node_buckets={shown(node_buckets)} must ascend from 1 or more to tree_size={size}, in whole "
            "numbers."
        )
    return node_buckets


def _check_pair(rule: verify.Rule, drafter: Drafter) -> None:
    """Refuses what is not exact, unless it is a lossy rule, which must be asked for by name."""
    proposal, name = drafter.proposal, type(drafter).__name__
    if proposal == "chain" and drafter.tree_size != drafter.max_depth + 1:
        raise ValueError(
            f"{name} says proposal='chain', but has tree_size={drafter.tree_size} nodes for "
            f"max_depth={drafter.max_depth}: name the law of its siblings, such as "
            "'without_replacement'."
        )
    if rule.lossless and proposal not in rule.exact_for:
        fitting = [known.name for known in verify.RULES.values() if proposal in known.exact_for]
        raise ValueError(
            f"rule={rule.name!r} is not exact for the {proposal!r} drafts of {name}; use one of "
            f"{', '.join(fitting)}."
        )
    least, most = rule.depths
    if not least <= drafter.max_depth <= (drafter.max_depth if most is None else most):
        wanted = f"{least} or more" if most is None else f"{least}"
        raise ValueError(
            f"rule={rule.name!r} is set for drafts of depth {wanted}, but {name} drafts to depth "
            f"{drafter.max_depth}; give Plan a rule made for it, such as "
            f"rule=jspec.verify.{rule.name}(...)."
        )


def _check_kernel(rule: verify.Rule, drafter: Drafter) -> None:
    """Refuses a kernel that would never run."""
    stands_in = rule.for_proposal(drafter.proposal).name
    if rule.implementation is not None and stands_in != rule.name:
        raise ValueError(
            f"rule={rule.name!r} names implementation={rule.implementation!r}, but the drafts of "
            f"{type(drafter).__name__} are deterministic (as are all dynamic trees), and there it "
            f"comes to {stands_in!r}, which has no kernel; leave implementation out, or have "
            "drafts drawn."
        )
    if rule.implementation is not None and drafter.proposal == "deterministic_last":
        raise ValueError(
            f"rule={rule.name!r} names implementation={rule.implementation!r}, but no kernel "
            f"takes the {drafter.proposal!r} drafts of {type(drafter).__name__}; leave it out."
        )
