"""The check "distribution": distance of a rule's exact distribution from the target's."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import numpy as np

from jspec.core import trees
from jspec.core.filters import FILTERS
from jspec.core.types import Proposal, Sampling
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify import conditionals, enumeration, kernels
from jspec.tools.certify.drawing import DEPTH, NUM_NODES, Case
from jspec.tools.certify.report import Finding, raised, worst
from jspec.verify import RULES, Rule, load_rule

EXACT = 1e-12  # rounding of float64 in sums of thousands of terms
EXACT_CONTEXT = 1e-9  # after a single text, whose probability may be 1e-4
EXACT_FLOAT32, EXACT_CONTEXT_FLOAT32 = 1e-6, 1e-3  # the same, by a kernel
VOCAB_SIZE = 3
UNEVEN = (-1, 0, 0, 1, 1)  # the tree of proposals with siblings
_CHAIN = tuple(trees.chain(DEPTH).tolist())
_MIXED = ("without_replacement", "deterministic", "top_plus_one", *["deterministic"] * 4)

SAMPLING = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 0.8, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.9, "min_p": 0.3},
)


def rule_of(rule: str | Rule) -> Rule:
    """Return a ``Rule``, given by itself, by its name in ``RULES`` or by its dotted path.

    Raises:
      ValueError: there is no such rule.
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]
    if isinstance(rule, str) and "." in rule:
        return load_rule(rule)
    raise ValueError(
        f"rule={rule!r} is not known; use one of {', '.join(RULES)}, a jspec.verify.Rule, or the "
        "dotted path of one, such as 'my_package.rules.MINE'."
    )


def distributions(
    rule: str | Rule,
    tree: Sequence[int] | None = None,
    seed: int = 0,
    backend: str | None = None,
    **filters: float,
) -> Iterator[Finding]:
    """Yield ``distribution`` of a rule for all proposals that it claims to be exact for.

    Arguments are those of ``distribution``; without ``filters`` for several combinations of them.

    Raises:
      ValueError: an argument is out of range.
    """
    rule = rule_of(rule)
    if not rule.exact_for or not rule.lossless:
        subject = f"{rule.name}: it declares that it changes the distribution (lossless=False)"
        yield Finding("distribution", subject, float("nan"), EXACT)
        return
    # A rule judged by the target's draws treats all proposals alike: these give every draft.
    by_draws = rule.randomness == "target"
    proposals = ("chain", "without_replacement") if by_draws else get_args(Proposal)
    siblings = tree is not None and len(set(tree)) < len(tree)
    for proposal in proposals:
        judged = proposal in rule.exact_for and kernels.judges(backend, proposal)
        if judged and not (siblings and proposal == "chain"):
            settings = SAMPLING if proposal == "chain" else SAMPLING[:1]
            for each in (filters,) if filters else settings:
                yield distribution(rule, proposal, tree, seeds=(seed,), backend=backend, **each)


def distribution(
    rule: str | Rule,
    proposal: Proposal = "chain",
    tree: Sequence[int] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    backend: str | None = None,
    **filters: float,
) -> Finding:
    """Measure the distance of a rule's output distribution from the target's, by enumeration.

    The shipped code runs on every draft and every pass or fail of every uniform, in float64, on a
    vocabulary of three tokens. The distribution is over texts of four tokens, and the worst case
    counts. For each seed, target and drafter have random distributions that differ after every
    prefix, for entire drafts and for some that end early. Further cases: distributions that agree,
    that share no token, and a drafter whose vocabulary has two tokens of three.

    A rule judged by the target's draws must give the text of plain sampling for every draft by
    itself, which is more.

    Args:
      rule: a name in ``RULES``, a ``Rule``, or the dotted path of one.
      proposal: of the drafts.
      tree: parents, -1 at the root; at most 7 nodes, 3 edges deep. None: a chain of three, and for
        proposals with siblings ``UNEVEN``.
      seeds: of the random distributions.
      backend: that judges instead of the shipped function, as the ``sampling_backend`` of ``LLM``.
        Its kernels are interpreted, and compute in float32; their filters are not enumerated.
      **filters: temperature (more than 0, 1 by default), top_k, top_p and min_p, as in
        ``SamplingParams``.

    Raises:
      ValueError: an argument is out of range.
    """
    rule = rule_of(rule)
    check_names(filters)
    filters = {"temperature": 1.0} | filters
    sampling = _sampling(filters)
    parents = _parents(proposal, tree)
    judge = kernels.through(rule, backend, proposal, parents).for_proposal(proposal)
    measure = _by_draws if judge.randomness == "target" else _by_uniforms
    tried = itertools.chain.from_iterable(
        _tried(measure, judge, name, case)
        for name, case in _cases(proposal, parents, seeds, sampling)
    )
    name = rule.name if backend is None else f"{rule.name} by {backend}"
    subject = ", ".join([f"{name}, {_words(proposal, parents)}", *changed(filters)])
    return dataclasses.replace(worst(tried), subject=subject)


def _cases(
    proposal: str, parents: tuple[int, ...], seeds: Sequence[int], sampling: Sampling
) -> Iterator[tuple[str, Case]]:
    early = (True, True, *(node <= len(parents) // 2 for node in range(2, len(parents))))
    random = lambda seed, count: conditionals.context_dependent(seed, VOCAB_SIZE, count)
    is_chain = proposal == "chain" and parents == _CHAIN

    def case(target, drafter, vocabulary=None, exists=None) -> Case:
        pair = (conditionals.processed(logits, sampling) for logits in (target, drafter))
        kind = _MIXED if proposal == "mixed" else proposal
        return Case(parents, kind, *pair, vocabulary, exists, static=is_chain)

    for seed in seeds:
        pair = random(seed, DEPTH + 1), random(seed + 1000, DEPTH)
        name = f"random distributions of seed {seed}"
        yield name, case(*pair)
        yield f"{name}, drafts that end early", case(*pair, exists=early)
    same = random(2000, DEPTH + 1)
    yield "distributions that agree", case(same, same[:-1])
    yield (
        "distributions that share no token",
        case(
            conditionals.context_free([0.3, 0.7, 0], DEPTH + 1),
            conditionals.context_free([0, 0, 1], DEPTH),
        ),
    )
    narrow = [logits[:, :2] for logits in random(2001, DEPTH)]
    yield "a drafter that knows two tokens of three", case(same, narrow, vocabulary=(0, 2))


# --------------------------------------------------------------------------------- measurements


def _tried(measure: Callable, rule: Rule, name: str, case: Case) -> list[Finding]:
    """The findings of ``measure``; an exception of the user's rule is a finding as well."""
    try:
        return list(measure(rule, name, case))
    except Exception as error:
        return [Finding("distribution", "", float("nan"), EXACT, f"with {name} {raised(error)}")]


def _by_uniforms(rule: Rule, name: str, case: Case) -> Iterator[Finding]:
    outcome = enumeration.outcome(rule, case)
    context = outcome.worst_context(VOCAB_SIZE)
    note = f"worst with {name}; after one text at most {context:.1e}"
    limit, limit_of_context = EXACT, EXACT_CONTEXT
    if isinstance(rule.walk, kernels.KernelWalk):
        limit, limit_of_context = EXACT_FLOAT32, EXACT_CONTEXT_FLOAT32
    yield Finding("distribution", "", outcome.distance, limit, note)
    yield Finding("distribution", "", context, limit_of_context, note)
    exact = outcome.distance <= limit and context <= limit_of_context
    if exact and enumeration.accepts_the_impossible(rule.walk, case):
        note = f"with {name} a uniform of exactly 0 accepts a token that the target excludes"
        yield Finding("distribution", "", float("inf"), EXACT, note)


def _by_draws(rule: Rule, name: str, case: Case) -> Iterator[Finding]:
    note = f"worst with {name}; each draft by itself must give the text of plain sampling"
    measured = enumeration.disagreement(rule.walk, case)
    yield Finding("distribution", "", measured, EXACT, note)


# ------------------------------------------------------------------------------------- arguments


def _sampling(filters: dict[str, float]) -> Sampling:
    row = SequenceParams((0,), **filters)  # checks them
    if not row.temperature > 0:
        raise ValueError(
            f"temperature={row.temperature} must be more than 0: at 0 every rule follows the "
            "target's likeliest tokens, and there is nothing to enumerate."
        )
    return request_of([row], Profile().grown([row]), VOCAB_SIZE)[0].sampling


def _parents(proposal: str, tree: Sequence[int] | None) -> tuple[int, ...]:
    if proposal not in get_args(Proposal):
        known = ", ".join(map(repr, get_args(Proposal)))
        raise ValueError(f"proposal={proposal!r} is not known; use one of {known}.")
    if tree is None:
        return _CHAIN if proposal == "chain" else UNEVEN
    parents = tuple(int(parent) for parent in tree)
    ordered = parents[:1] == (-1,) and all(0 <= up < i for i, up in enumerate(parents[1:], 1))
    if not ordered or len(parents) > NUM_NODES:
        raise ValueError(
            f"tree={list(tree)} must hold the parent of each of at most {NUM_NODES} nodes, -1 at "
            "the root and before its own number elsewhere, such as [-1, 0, 0, 1]."
        )
    depth = trees.from_parents(np.array(parents), len(parents)).depth.max()
    if depth > DEPTH:
        raise ValueError(f"tree={list(tree)} is {depth} edges deep; at most {DEPTH} fit.")
    if proposal == "chain" and len(set(parents)) < len(parents):
        raise ValueError(
            f"tree={list(tree)} has siblings, but proposal='chain' has none; name another, such as "
            "'without_replacement'."
        )
    return parents


def _words(proposal: str, parents: tuple[int, ...]) -> str:
    is_chain = len(set(parents)) == len(parents)
    shape = f"chain of {len(parents) - 1}" if is_chain else f"tree {','.join(map(str, parents))}"
    return shape if proposal == "chain" else f"{shape}, {proposal} children"


def check_names(filters: dict[str, float]) -> None:
    """Refuse keyword arguments that are no sampling filters.

    Raises:
      TypeError: a name is unknown.
    """
    if unknown := filters.keys() - FILTERS:
        raise TypeError(f"unknown arguments {sorted(unknown)}; give some of {list(FILTERS)}.")


def changed(filters: dict[str, float]) -> list[str]:
    """Return the filters that change a distribution, as words."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return [f"{name}={value:g}" for name, value in filters.items() if value != off.get(name)]
