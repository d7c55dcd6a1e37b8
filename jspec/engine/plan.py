"""The plan: all static settings of a generation, in one hashable value."""

import dataclasses
from typing import Literal, NamedTuple

import jax

from jspec import verify
from jspec.core import packing, validation
from jspec.core.types import Array, Draft, Drafter, History, Request, Target, Tree, Verdict
from jspec.util.messages import shown
from jspec.util.values import are_whole, listed


class Pass(NamedTuple):
    """A size of the target's pass over B rows."""

    nodes: int  # of a row, at most
    total: int  # nodes that the matmuls run over
    packed: bool  # whether these are a list of the valid nodes


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """The settings of rounds with one drafter. Fields are those of ``Plan``, and not checked."""

    target: Target  # the model whose distribution the output has
    drafter: Drafter
    rule: str | verify.Rule = "rejection"  # a name in ``jspec.verify.RULES``, or a ``Rule``
    # Node counts that the target's pass is compiled for, ascending up to the drafter's
    # ``tree_size``. A round runs in the smallest that holds its valid nodes. () for the drafter's
    # own ``node_buckets``, or else 1 and ``tree_size``.
    node_buckets: tuple[int, ...] = ()
    # Whether passes run over lists of the valid nodes of all rows, in sizes of their own.
    packed: bool = False
    platform: Literal["cpu", "gpu", "tpu"] | None = None  # that passes are for; None: JAX's default

    def passes(self, batch: int) -> tuple[Pass, ...]:
        """Return the sizes that the target's pass is compiled for, ascending.

        A round runs in the first that holds its valid nodes.
        """
        platform, most = self.platform or jax.default_backend(), self.node_buckets[-1]
        passes = [Pass(nodes, batch * nodes, False) for nodes in self.node_buckets]
        sizes = packing.sizes(batch, batch * most, platform) if self.packed else ()
        if platform == "cpu":
            return tuple(Pass(most, size, True) for size in sizes) or tuple(passes)
        # No row has more nodes than the list, so attention needs no more of each row.
        passes += [Pass(min(most, size), size, True) for size in sizes[:-1]]
        passes.sort(key=lambda each: each.total)
        # Passes of few rows take the same time: the largest of them serves for all.
        few = [each for each in passes if each.total <= packing.MATMULS[platform].free_rows]
        return (*few[-1:], *passes[len(few) :])

    def programs(self, batch: int) -> tuple[tuple[Pass, ...], ...]:
        """Return the passes, grouped by the program that runs them.

        On a CPU the matmuls of one program choose among lists of all sizes. On an accelerator each
        pass is a program, as a choice costs more there.
        """
        passes = self.passes(batch)
        is_one = all(each.packed for each in passes)
        return (passes,) if is_one else tuple((each,) for each in passes)

    @property
    def effective_rule(self) -> verify.Rule:
        """The rule as it runs on this drafter's proposals."""
        return self._rule.for_proposal(self.drafter.proposal)

    @property
    def _rule(self) -> verify.Rule:
        return verify.RULES[self.rule] if isinstance(self.rule, str) else self.rule

    def verify(
        self, request: Request, draft: Draft, tree: Tree, logits: Array, history: History
    ) -> Verdict:
        """Judge a draft by the target's raw logits; see ``jspec.verify``."""
        rule, proposal = self.effective_rule, self.drafter.proposal
        return verify.verify(rule, proposal, request, draft, tree, logits, history)


@dataclasses.dataclass(frozen=True)
class Plan(RoundPlan):
    """A target, a drafter and an acceptance rule that fit each other.

    Equal plans share their compiled programs. Nothing falls back on a lossy rule.

    Raises:
      ValueError: target or drafter lack a member; the rule is unknown, not exact for the drafter's
        proposals, or set for other depths; it needs a kernel that these proposals never reach, or
        noise that the drafter cannot share; ``node_buckets`` is out of range; the target cannot be
        ``packed``.
    """

    def __post_init__(self):
        validation.check_target(self.target)
        validation.check_drafter(self.drafter)
        if self.packed and not self.target.packs_nodes:
            raise ValueError(
                f"packed=True needs a target whose forward takes a packing, and "
                f"{type(self.target).__name__} has no packs_nodes=True; leave packed out."
            )
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
        buckets = listed("node_buckets", self.node_buckets)
        buckets = buckets or self.drafter.node_buckets
        size = self.drafter.tree_size
        ascending = are_whole(buckets, 1) and list(buckets) == sorted(set(buckets))
        if not ascending or buckets[-1] != size:
            raise ValueError(
                f"node_buckets={shown(buckets)} must ascend from 1 or more to tree_size={size}, "
                "in whole numbers."
            )
        object.__setattr__(self, "node_buckets", buckets)

    def at_length(self, length: int) -> RoundPlan:
        """Return the plan of rounds with K = ``length``, for an ``Adaptive`` drafter.

        A lossless rule that is not exact for these drafts has nothing to judge, as nothing is
        drafted: the target draws. A rule's settings are for the longest K; drafts may end before.
        """
        rounds = self.drafter.at_length(length)
        has_rule = not self._rule.lossless or rounds.proposal in self._rule.exact_for
        rule, sizes = self.rule if has_rule else "match", {rounds.tree_size, *self.node_buckets}
        buckets = tuple(size for size in rounds.node_buckets if size in sizes)
        return RoundPlan(self.target, rounds, rule, buckets, self.packed)


def _check_pair(rule: verify.Rule, drafter: Drafter) -> None:
    """Refuse pairs that are not exact, unless the rule is lossy, and rules for other depths."""
    proposal, name = drafter.proposal, type(drafter).__name__
    if proposal == "chain" and drafter.tree_size != drafter.max_depth + 1:
        raise ValueError(
            f"{name} has proposal='chain', but tree_size={drafter.tree_size} nodes for "
            f"max_depth={drafter.max_depth}; name the proposal of its siblings, such as "
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
        depths = f"{least} or more" if most is None else f"{least}"
        raise ValueError(
            f"rule={rule.name!r} is set for drafts of depth {depths}, but {name} drafts to depth "
            f"{drafter.max_depth}; give Plan a rule made for it, such as "
            f"rule=jspec.verify.{rule.name}(...)."
        )


def _check_kernel(rule: verify.Rule, drafter: Drafter) -> None:
    """Refuse a kernel that would never run."""
    effective = rule.for_proposal(drafter.proposal).name
    if rule.implementation is not None and effective != rule.name:
        raise ValueError(
            f"rule={rule.name!r} names implementation={rule.implementation!r}, but the drafts of "
            f"{type(drafter).__name__} are deterministic (as are all dynamic trees), and "
            f"{effective!r}, which judges those, has no kernel; leave implementation out, or have "
            "drafts drawn."
        )
    if rule.implementation is not None and drafter.proposal == "deterministic_last":
        raise ValueError(
            f"rule={rule.name!r} names implementation={rule.implementation!r}, but no kernel "
            f"takes the {drafter.proposal!r} drafts of {type(drafter).__name__}; leave it out."
        )
