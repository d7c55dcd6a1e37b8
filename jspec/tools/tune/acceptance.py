"""Acceptance by depth and rank, counted on the rounds of a generation that drafted widely.

Every rule but ``block`` judges node by node, from the root down and in the order of the ranks: so
what a round accepted of a wide tree says what it would have accepted of any tree within, which is
the longest beginning of the accepted path that the smaller tree holds.

Where the target's own draws decide (greedy texts, point-mass drafts, ``match`` and ``coupled``),
the text is the same whatever is drafted. Then it is recorded one token a round, so that there is a
draft behind every token, and what any tree would have accepted is read off the text. Else the
rounds are those of a generation as it is, a sample of what other shapes would meet. So they are for
methods that learn from call to call, or from round to round, for all rows: what they know depends
on what they drafted.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import get_args

import jax.numpy as jnp
import numpy as np

from jspec.core.trees import StaticTree
from jspec.core.types import Array, Draft, Proposal, Sharing, Tree
from jspec.engine.batch import Answer
from jspec.engine.plan import Plan
from jspec.verify import Rule
from jspec.verify.match import match

_EVIDENCE = 8.0  # trials that what is known of a rank at all depths is worth at one of them


@dataclasses.dataclass(frozen=True)
class Round:
    """What became of one row's draft.

    Attributes:
      path: ranks of the accepted nodes, from the root down.
      drafted: whether there was a draft.
      is_whole: whether the draft ended where the path does, and so may have been too short.
    """

    path: tuple[int, ...]
    drafted: bool = True
    is_whole: bool = False


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The rounds of a row.

    Attributes:
      rounds: in order.
      by_position: whether there is one for every token of the text.
    """

    rounds: Sequence[Round]
    by_position: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Accepted nodes of depth d that had a place for a child of rank r, and how often it was taken.

    int [D, R] each. Whether another child was accepted instead, or the drafter left the place
    empty, makes no difference.
    """

    tried: np.ndarray
    accepted: np.ndarray

    @property
    def chances(self) -> np.ndarray:
        """float [D, R]: how likely the child of rank r of an accepted node is the accepted one.

        Of all children of the node, so that a row sums to 1 at most. Depths with few counts lean on
        the others: as if what all depths say of the rank had been seen in eight more trials.
        """
        tried, accepted = self.tried.sum(0), self.accepted.sum(0)
        usual = accepted / np.maximum(tried, 1)
        found = (self.accepted + _EVIDENCE * usual) / (self.tried + _EVIDENCE)
        return found / np.maximum(found.sum(1, keepdims=True), 1)

    def as_dict(self) -> dict[str, list]:
        """Chances, counts and intervals, for JSON."""
        low, high = self.interval()
        fields = {
            "chances": self.chances,
            "tried": self.tried,
            "accepted": self.accepted,
            "low": low,
            "high": high,
        }
        return {name: value.tolist() for name, value in fields.items()}

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % intervals of the bare shares (Wilson's): float [D, R], 0 and 1 if none.

        Successive rounds of a text are not independent: take them for a lower bound of the doubt.
        """
        z2, n = 1.96**2, np.maximum(self.tried, 1)
        share = self.accepted / n
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = np.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n**2))) / (1 + z2 / n)
        none = self.tried == 0
        return np.where(none, 0, middle - half).clip(0), np.where(none, 1, middle + half).clip(0, 1)


def by_position(plan: Plan, temperature: float) -> bool:
    """Whether neither the text nor what the drafter knows depends on what is drafted."""
    rule = plan.effective_rule
    same_text = rule.uniforms == "target" or (temperature == 0 and rule.greedy_is_match)
    return same_text and not isinstance(plan.drafter, Sharing)


def one_by_one(plan: Plan) -> Plan:
    """The plan with a rule that accepts nothing: a draft for every token of the same text."""
    everything = frozenset(get_args(Proposal))
    rule = Rule("one_by_one", _root_alone, "target", everything)
    return dataclasses.replace(plan, rule=rule)


def _root_alone(
    processed: Array, draft: Draft, tree: Tree, draws: Array
) -> tuple[Array, Array, Array]:
    """The target's own draw after the root; arguments as for ``verify.target_only.match``."""
    path, num_accepted, _ = match(processed, draft, tree, draws)
    return jnp.zeros_like(path), jnp.zeros_like(num_accepted), processed[:, 0]


def rounds_of(answer: Answer, tree: StaticTree | None, every: bool) -> list[Round]:
    """The rounds of a row.

    Of a generation as it is, those whose draft could have reached past the end of the text are left
    out: they were cut short.

    Args:
      answer: with a trace of all rounds.
      tree: of the drafts; None where they have none: then all ranks are called 0.
      every: whether the plan was ``one_by_one``, and the rounds are those of every token.
    """
    depth, text = len(answer.accepted) - 1, answer.tokens.tolist()
    found, begin = [], 0
    for count, nodes, parents in zip(*(part.tolist() for part in answer.trace), strict=True):
        drafted = any(token >= 0 for token in nodes[1:])
        end = len(text) if every else begin + count
        if every or begin + depth + 1 <= len(text):
            path = _path(tree, nodes, parents, text[begin:end])
            is_whole = tree is not None and not _widths(tree).get(path, 0)
            found.append(Round(path, drafted, is_whole))
        begin += count + 1
    return found


def count(rounds: Sequence[Round], tree: StaticTree) -> Acceptance:
    """Counts of all rounds, of drafts of ``tree``."""
    widths = _widths(tree)
    tried = np.zeros((tree.max_depth, max(tree.widths)), int)
    accepted = np.zeros_like(tried)
    for each in rounds:
        for depth in range(len(each.path) + 1):
            width = widths.get(each.path[:depth], 0)
            taken = each.path[depth] if depth < len(each.path) else None
            tried[depth : depth + 1, :width] += 1
            if taken is not None:
                accepted[depth, taken] += 1
    return Acceptance(tried, accepted)


def extended(row: Recorded, chances: np.ndarray, random: np.random.Generator) -> Recorded:
    """The rounds, those whose draft was accepted to its end gone on with by ``chances`` [D, R]."""
    found = []
    for each in row.rounds:
        path = list(each.path)
        while each.is_whole and each.drafted and len(path) < len(chances):
            distribution = chances[len(path)]
            rank = int(np.searchsorted(np.cumsum(distribution), random.random(), side="right"))
            if rank == len(distribution):
                break
            path.append(rank)
        found.append(dataclasses.replace(each, path=tuple(path), is_whole=False))
    return dataclasses.replace(row, rounds=found)


def accepted_by(tree: StaticTree, path: Sequence[int]) -> int:
    """How many nodes of ``path`` a tree of this shape holds, from the root down."""
    widths, length = _widths(tree), 0
    while length < len(path) and path[length] < widths.get(tuple(path[:length]), 0):
        length += 1
    return length


def _path(
    tree: StaticTree | None, nodes: Sequence[int], parents: Sequence[int], text: Sequence[int]
) -> tuple[int, ...]:
    """Ranks of the nodes that hold the longest beginning of ``text``; siblings differ."""
    children = {(parents[n], nodes[n]): n for n in range(1, len(nodes)) if nodes[n] >= 0}
    here, path = 0, []
    for token in text:
        here = children.get((here, token))
        if here is None:
            break
        path.append(0 if tree is None else tree.ranks[here])
    return tuple(path)


@functools.lru_cache(maxsize=256)
def _widths(tree: StaticTree) -> dict[tuple[int, ...], int]:
    """The number of children of each node, by its path."""
    return dict(zip(((), *tree.paths), tree.widths, strict=True))
