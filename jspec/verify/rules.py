"""The table ``RULES`` of all acceptance rules, and rules from the user's code."""

import dataclasses

from jspec import ops
from jspec.core.types import Drafter
from jspec.util.messages import shown
from jspec.util.values import imported
from jspec.verify.block import BLOCK
from jspec.verify.match import COUPLED, MATCH
from jspec.verify.rejection import REJECTION
from jspec.verify.rule import Rule
from jspec.verify.synthetic_acceptance import synthetic
from jspec.verify.typical_acceptance import typical

RULES = {
    rule.name: rule
    for rule in (
        # On deterministic drafts both have the output of ``match``, which needs no residual.
        dataclasses.replace(REJECTION, deterministic_rule=MATCH),
        dataclasses.replace(BLOCK, deterministic_rule=MATCH),
        MATCH,
        COUPLED,
        typical(),
        synthetic(rates=()),  # for drafts of depth 0: rates have no default
    )
}


def check_fit(rule: Rule, drafter: Drafter, backend: str | None = None) -> None:
    """Refuse pairs that are not exact, unless the rule is lossy, and rules for other depths.

    Raises:
      ValueError: as said, or ``backend`` is no back-end of the rule that these drafts would reach.
    """
    proposal, name = drafter.proposal, type(drafter).__name__
    if proposal == "chain" and drafter.tree_size != drafter.max_depth + 1:
        raise ValueError(
            f"{name} has proposal='chain', but tree_size={drafter.tree_size} nodes for "
            f"max_depth={drafter.max_depth}; name the proposal of its siblings, such as "
            "'without_replacement'."
        )
    if rule.lossless and proposal not in rule.exact_for:
        fitting = [known.name for known in RULES.values() if proposal in known.exact_for]
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
    check_backend(rule, backend)
    if backend not in (None, "xla"):
        _check_kernel(rule, drafter, backend)


def check_backend(rule: Rule, backend: str | None) -> None:
    """Refuse a ``sampling_backend`` that does not exist, or does not judge by the rule.

    Raises:
      ValueError: as said.
    """
    known = ("xla", *(x.name for x in ops.BACKENDS["rejection_sampling"] if x.platform))
    if backend not in (None, *known):
        names = ", ".join(map(repr, known))
        raise ValueError(
            f"sampling_backend={shown(backend)} is not known; use None or one of {names}."
        )
    if backend not in (None, "xla") and not _has_kernels(rule):
        rules = " and ".join(map(repr, ops.REJECTION_SAMPLING_RULES))
        raise ValueError(
            f"sampling_backend={backend!r} is for the rules {rules}, not for {rule.name!r}; leave "
            "it out."
        )


def _check_kernel(rule: Rule, drafter: Drafter, backend: str) -> None:
    """Refuse a kernel that the drafts would never reach."""
    given, effective = f"sampling_backend={backend!r}", rule.for_proposal(drafter.proposal)
    if not _has_kernels(effective):
        raise ValueError(
            f"{given} is for drawn drafts, but those of {type(drafter).__name__} are deterministic "
            f"(as are all dynamic trees), and {effective.name!r}, which judges those, has no "
            "kernel; leave it out, or have drafts drawn."
        )
    if drafter.proposal == "deterministic_last":
        raise ValueError(
            f"{given} does not take the {drafter.proposal!r} drafts of {type(drafter).__name__}; "
            "leave it out."
        )


def _has_kernels(rule: Rule) -> bool:
    """Return whether kernels compute the walk of a rule."""
    return rule.name in ops.REJECTION_SAMPLING_RULES and rule.walk is RULES[rule.name].walk


def load_rule(path: str, key: str = "rule") -> Rule:
    """Import the user's ``Rule`` at a path such as ``"my_package.rules.MINE"``; raise ValueError.

    ``key`` is the name of the setting, for messages.
    """
    rule = imported(key, path)
    if not isinstance(rule, Rule):
        raise ValueError(
            f"{key}={shown(path)} is a {type(rule).__name__}, not a jspec.verify.Rule; wrap its "
            "walk: Rule('mine', walk, 'round', frozenset({'chain'}))."
        )
    return rule
