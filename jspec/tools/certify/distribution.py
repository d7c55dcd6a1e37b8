"""The exact output law of a rule on a tiny vocabulary, and how far it is from the target's."""

import dataclasses
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np

from jspec.core import trees
from jspec.core.types import Proposal, Sampling
from jspec.engine.sequences import SequenceParams, request_of
from jspec.tools.certify import chains, drafted_trees, draws
from jspec.tools.certify.report import Finding, worst
from jspec.verify import RULES, Rule

EXACT = 1e-12  # of float64, after sums of some thousand terms
EXACT_CONTEXT = 1e-9  # of a law after one text, which may be as rare as 1e-4
VOCAB_SIZE = 3
UNEVEN = (-1, 0, 0, 1, 1)  # the tree of proposals with siblings: one branch goes on
_CHAIN = tuple(trees.chain(drafted_trees.DEPTH).tolist())
_MIXED = ("without_replacement", "point", "top_plus_one", "point", "point", "point", "point")

SAMPLING = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 0.8, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.9, "min_p": 0.3},
)


def rule_of(rule: str | Rule) -> Rule:
    """The rule of a name in ``RULES``, or at a dotted path such as ``"my_package.rules.MINE"``.

    Raises:
      ValueError: there is none.
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]
    known = ", ".join(RULES)
    if not isinstance(rule, str) or "." not in rule:
        raise ValueError(
            f"rule={rule!r} is not known; use one of {known}, a jspec.verify.Rule, or the dotted "
            "path of one, such as 'my_package.rules.MINE'."
        )
    try:
        found = pkgutil.resolve_name(rule)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"rule={rule!r} cannot be imported: {error}. Is the package installed, or its folder "
            "on PYTHONPATH?"
        ) from error
    if not isinstance(found, Rule):
        raise ValueError(
            f"rule={rule!r} is a {type(found).__name__}, not a jspec.verify.Rule; wrap its walk: "
            "Rule('mine', walk, 'round', frozenset({'chain'}))."
        )
    return found


def distributions(
    rule: str | Rule, tree: Sequence[int] | None = None, seed: int = 0, **filters: float
) -> Iterator[Finding]:
    """``law`` of a rule, for all drafts that it says it is exact for.

    Args:
      rule: as in ``law``.
      tree: as in ``law``; None for a chain, and ``UNEVEN`` where there are siblings.
      seed: of the random laws.
      **warps: temperature, top_k, top_p and min_p; none for several combinations of them.

    Raises:
      ValueError: an argument is out of range.
    """
    rule = rule_of(rule)
    if not rule.exact_for or not rule.lossless:
        words = f"{rule.name}: it says of itself that it changes the law (lossless=False)"
        yield Finding("law", words, float("nan"), EXACT)
        return
    # Judged by the target's draws, a rule has to do with all drafts alike: "iid" gives every one.
    some = ("chain", "iid") if rule.uniforms == "target" else get_args(Proposal)
    siblings = tree is not None and len(set(tree)) < len(tree)
    for proposal in some:
        if proposal in rule.exact_for and not (siblings and proposal == "chain"):
            settings = SAMPLING if proposal == "chain" else SAMPLING[:1]
            for each in (filters,) if filters else settings:
                yield distribution(rule, proposal, tree, seeds=(seed,), **each)


def distribution(
    rule: str | Rule,
    proposal: Proposal = "chain",
    tree: Sequence[int] | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Sequence[int] = (0,),
) -> Finding:
    """How far a rule's output law is from the target's, by enumeration of the shipped code.

    Over every draft and every pass or fail of every coin, in float64, on a vocabulary of three
    tokens; for each seed with random laws of target and drafter that differ after every prefix, for
    whole drafts and for some that end early; besides for laws that agree, that share no token, and
    a drafter that knows two tokens of three. The law is that of four tokens, the worst case counts.
    A rule judged by the target's draws must give the text of plain sampling for every draft
    by itself, which is more.

    Args:
      rule: a name in ``RULES``, a ``Rule``, or the dotted path of one.
      proposal: the law of the drafted children.
      tree: parents, -1 at the root; at most 7 nodes, 3 edges deep. None: a chain of three, and for
        proposals with siblings ``UNEVEN``.
      temperature: as in ``SamplingParams``; more than 0, since at 0 every rule is ``match``.
      top_k: as in ``SamplingParams``.
      top_p: as in ``SamplingParams``.
      min_p: as in ``SamplingParams``.
      seeds: of the random laws.

    Raises:
      ValueError: an argument is out of range.
    """
    rule = rule_of(rule)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = _sampling(filters)
    parents = _checked(proposal, tree)
    runs = rule.judging(proposal)
    measure = _by_draws if runs.uniforms == "target" else _by_uniforms
    cases = [_Case(proposal, parents, *pair, sampling) for pair in _pairs(parents, seeds)]
    subject = ", ".join([f"{rule.name}, {_words(proposal, parents)}", *_changed(filters)])
    found = worst(itertools.chain.from_iterable(_tried(measure, runs, case) for case in cases))
    return dataclasses.replace(found, subject=subject)


# ---------------------------------------------------------------------------------- what is tried


@dataclasses.dataclass(frozen=True, eq=False)
class _Case:
    """Laws, and the tree that is drawn from them."""

    proposal: str
    parents: tuple[int, ...]
    name: str
    target: chains.Levels
    drafter: chains.Levels
    vocabulary: tuple[int, ...] | None
    exists: tuple[bool, ...] | None
    sampling: Sampling

    def tree(self) -> drafted_trees.TreeCase:
        """For the enumeration of trees."""
        proposal = _MIXED if self.proposal == "mixed" else self.proposal
        is_drawn_chain = self.proposal == "chain"
        return drafted_trees.TreeCase(
            self.parents,
            "without_replacement" if proposal == "pruned" else proposal,
            chains.level_filters(self.target, self.sampling),
            chains.level_filters(self.drafter, self.sampling),
            self.vocabulary,
            self.exists,
            static=is_drawn_chain and self.parents == _CHAIN,
        )


def _pairs(parents: tuple[int, ...], seeds: Sequence[int]) -> Iterator[tuple]:
    """Names, levels of target and drafter, the drafter's vocabulary, and which nodes exist."""
    levels = lambda seed, count: chains.context_dependent(seed, VOCAB_SIZE, count)
    depth = drafted_trees.DEPTH
    early = (True, True, *(node <= len(parents) // 2 for node in range(2, len(parents))))
    for seed in seeds:
        pair = levels(seed, depth + 1), levels(seed + 1000, depth), None
        yield f"random laws of seed {seed}", *pair, None
        yield f"random laws of seed {seed}, drafts that end early", *pair, early
    same = levels(2000, depth + 1)
    yield "laws that agree", same, same[:-1], None, None
    apart = [
        chains.context_free(distribution, depth + 1) for distribution in ([0.3, 0.7, 0], [0, 0, 1])
    ]
    yield "laws that share no token", apart[0], apart[1][:-1], None, None
    narrow = [level[:, :2] for level in levels(2001, depth)]
    yield "a drafter that knows two tokens of three", same, narrow, (0, 2), None


# ------------------------------------------------------------------------------- what is measured


def _tried(measure: Callable, runs: Rule, case: _Case) -> list[Finding]:
    """What ``measure`` finds; that a rule of the user's raises is a finding as well."""
    try:
        return list(measure(runs, case))
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        note = f"with {case.name} it raises {type(error).__name__}: {words}"
        return [Finding("law", "", float("nan"), EXACT, note)]


def _by_uniforms(runs: Rule, case: _Case) -> Iterator[Finding]:
    found = drafted_trees.outcome(runs.walk, case.tree())
    context = found.worst_context(VOCAB_SIZE)
    note = f"worst with {case.name}; after one text at most {context:.1e}"
    yield Finding("law", "", found.distance, EXACT, note)
    yield Finding("law", "", context, EXACT_CONTEXT, note)
    num_valid = found.distance <= EXACT and context <= EXACT_CONTEXT
    if num_valid and drafted_trees.accepts_the_impossible(
        runs.walk, case.tree()
    ):  # else that says more
        note = f"with {case.name} a coin of exactly 0 lets a token through that the target excludes"
        yield Finding("law", "", float("inf"), EXACT, note)


def _by_draws(runs: Rule, case: _Case) -> Iterator[Finding]:
    chance = draws.disagreement(runs.walk, case.tree())
    yield Finding("law", "", chance, EXACT, "each draft by itself: the text of plain sampling")


# ------------------------------------------------------------------------------------- arguments


def _sampling(filters: dict[str, float]) -> Sampling:
    row = SequenceParams((0,), **filters)  # checks them
    if not row.temperature > 0:
        raise ValueError(
            f"temperature={row.temperature} must be more than 0: at 0 every rule follows the "
            "target's likeliest tokens, and there is nothing to enumerate."
        )
    return request_of([row], 1, row.filters, VOCAB_SIZE)[0].sampling


def _checked(proposal: str, tree: Sequence[int] | None) -> tuple[int, ...]:
    if proposal not in get_args(Proposal):
        known = ", ".join(map(repr, get_args(Proposal)))
        raise ValueError(f"proposal={proposal!r} is not known; use one of {known}.")
    if tree is None:
        return _CHAIN if proposal == "chain" else UNEVEN
    parents = tuple(int(parent) for parent in tree)
    fits = parents[:1] == (-1,) and all(0 <= up < i for i, up in enumerate(parents[1:], 1))
    if not fits or len(parents) > drafted_trees.NUM_NODES:
        raise ValueError(
            f"tree={list(tree)} must hold the parent of each of at most {drafted_trees.NUM_NODES} nodes, "
            "-1 at the root and before its own number elsewhere, such as [-1, 0, 0, 1]."
        )
    depth = trees.from_parents(np.array(parents), len(parents)).depth.max()
    if depth > drafted_trees.DEPTH:
        raise ValueError(
            f"tree={list(tree)} is {depth} edges deep; at most {drafted_trees.DEPTH} fit."
        )
    if proposal == "chain" and len(set(parents)) < len(parents):
        raise ValueError(
            f"tree={list(tree)} has siblings, but proposal='chain' has none; name their law, such "
            "as 'without_replacement'."
        )
    return parents


def _words(proposal: str, parents: tuple[int, ...]) -> str:
    shape = (
        f"chain of {len(parents) - 1}"
        if len(set(parents)) == len(parents)
        else (f"tree {','.join(map(str, parents))}")
    )
    return shape if proposal == "chain" else f"{shape}, {proposal} children"


def _changed(filters: dict[str, float]) -> list[str]:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return [f"{name}={value:g}" for name, value in filters.items() if value != off.get(name)]
