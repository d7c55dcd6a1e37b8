"""Acceptance by depth and rank, recorded once with a wide draft.

Every rule but ``block`` judges node by node, from the root down, in rank order. A smaller tree thus
accepts the longest prefix of the accepted path that it contains.

If the target's own draws decide (greedy texts, deterministic drafts, ``match``, ``coupled``), the
text does not depend on the draft. The text is then recorded one token a round, with a draft after
every token, and the acceptance of any tree is exact. Otherwise the rounds of a normal generation
are a sample of what other trees would meet. Drafters with shared state are recorded in the same
way, because their drafts depend on earlier drafts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.static_trees import StaticTree
from jspec.core.types import Array, Draft, Proposal, Tree
from jspec.engine.functional import Answer
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.tools.tune.families import Family
from jspec.tools.tune.settings import Settings
from jspec.tools.tune.workload import Workload
from jspec.verify import Rule
from jspec.verify.match import match

_PRIOR_TRIALS = 8.0  # weight of a rank's mean over all depths against the counts of one depth


@dataclasses.dataclass(frozen=True)
class Round:
    """The accepted path of one sequence's draft: ranks of the nodes, from the root down."""

    path: tuple[int, ...]
    drafted: bool = True  # False if there was no draft


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Counts of accepted nodes by depth and rank, int [D, R] each."""

    tried: np.ndarray  # accepted nodes at depth d whose child of rank r is in the tree
    # These children, if accepted. One that was not drafted, or whose sibling was accepted, is not.
    accepted: np.ndarray

    @property
    def chances(self) -> np.ndarray:
        """Probability that the child of rank r of an accepted node is accepted, float [D, R].

        Depths with few counts are shrunk towards the mean of the rank over all depths. A row sums
        to at most 1.
        """
        mean = self.accepted.sum(0) / np.maximum(self.tried.sum(0), 1)
        chances = (self.accepted + _PRIOR_TRIALS * mean) / (self.tried + _PRIOR_TRIALS)
        return chances / np.maximum(chances.sum(1, keepdims=True), 1)

    def as_dict(self) -> dict[str, list]:
        """Return chances and counts for JSON."""
        arrays = {"chances": self.chances, "tried": self.tried, "accepted": self.accepted}
        return {name: array.tolist() for name, array in arrays.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """The recorded drafts of a family."""

    prompts: Sequence[Sequence[Round]]
    by_position: bool  # whether there is a round for every token of the text
    acceptance: Acceptance | None = None  # None if drafts have no static tree

    @property
    def is_empty(self) -> bool:
        """True if no draft fitted into an answer, so that nothing can be predicted."""
        return not any(self.prompts)


def record(family: Family, work: Workload, num_prompts: int, settings: Settings) -> Recording:
    """Generate all answers with the family's widest draft.

    ``num_prompts`` counts the distinct prompts of ``work``, which repeats them in order.
    """
    build, tree = family.build(family.probe.config), family.probe.tree
    exact = by_position(build.plan, settings.temperature)
    plan = one_by_one(build.plan) if exact else build.plan
    answers, _ = work.generate(plan, build.params, Profile(nodes=True))
    rounds = [rounds_of(answer, tree, exact) for answer in answers]
    acceptance = None if tree is None else count(list(itertools.chain(*rounds)), tree)
    if not exact:  # pool the random answers to the same prompt
        pools = [list(itertools.chain(*rounds[i::num_prompts])) for i in range(num_prompts)]
        rounds = [pools[row % num_prompts] for row in range(len(rounds))]
    return Recording(rounds, exact, acceptance)


def by_position(plan: Plan, temperature: float) -> bool:
    """Return whether neither the text nor the drafter's state depends on what is drafted."""
    rule = plan.effective_rule
    same_text = rule.randomness == "target" or (temperature == 0 and rule.greedy_is_match)
    return same_text and not shares_state(plan)


def shares_state(plan: Plan) -> bool:
    """Return whether drafts depend on earlier texts, by state that outlives calls."""
    return bool(jax.tree.leaves(jax.eval_shape(plan.drafter.init_shared)))


def one_by_one(plan: Plan) -> Plan:
    """Return the plan with a rule that accepts nothing, so that every token gets a draft."""
    rule = Rule("one_by_one", _reject_all, "target", frozenset(get_args(Proposal)))
    return dataclasses.replace(plan, rule=rule)


def _reject_all(
    processed: Array, draft: Draft, tree: Tree, draws: Array, proposal: Proposal
) -> tuple[Array, Array, Array]:
    """Emit the target's draw after the root; arguments as for ``verify.match.match``."""
    path, num_accepted, _ = match(processed, draft, tree, draws, proposal)
    return jnp.zeros_like(path), jnp.zeros_like(num_accepted), processed[:, 0]


def rounds_of(answer: Answer, tree: StaticTree | None, exact: bool) -> list[Round]:
    """Return the rounds of an answer.

    Rounds whose draft could pass the end of the text are left out, because the limit cut them
    short, unless the plan was ``one_by_one`` (``exact``). Without a tree every rank is 0.
    """
    depth, text = len(answer.accepted) - 1, answer.tokens.tolist()
    rounds, begin = [], 0
    for accepted, tokens, parents in zip(*(part.tolist() for part in answer.trace), strict=True):
        if exact or begin + depth + 1 <= len(text):
            path = _path(tree, tokens, parents, text[begin : None if exact else begin + accepted])
            rounds.append(Round(path, any(token >= 0 for token in tokens[1:])))
        begin += accepted + 1
    return rounds


def count(rounds: Sequence[Round], tree: StaticTree) -> Acceptance:
    """Count the accepted nodes of all rounds with drafts of ``tree``."""
    widths = _widths(tree)
    tried = np.zeros((tree.max_depth, max(tree.widths)), int)
    accepted = np.zeros_like(tried)
    for round_ in rounds:
        for depth in range(len(round_.path) + 1):
            tried[depth : depth + 1, : widths.get(round_.path[:depth], 0)] += 1
        accepted[np.arange(len(round_.path)), list(round_.path)] += 1
    return Acceptance(tried, accepted)


def extended(recording: Recording, tree: StaticTree, random: np.random.Generator) -> Recording:
    """Continue paths that reached a leaf of the recorded tree with ranks drawn by their chances."""
    chances, widths = recording.acceptance.chances, _widths(tree)

    def continued(round_: Round) -> Round:
        path = list(round_.path)
        reached_leaf = round_.drafted and not widths.get(round_.path, 0)
        while reached_leaf and len(path) < len(chances):
            cumulative = np.cumsum(chances[len(path)])
            rank = int(np.searchsorted(cumulative, random.random(), side="right"))
            if rank == len(cumulative):
                break
            path.append(rank)
        return Round(tuple(path), round_.drafted)

    prompts = [[continued(round_) for round_ in prompt] for prompt in recording.prompts]
    return dataclasses.replace(recording, prompts=prompts)


def accepted_by(tree: StaticTree, path: Sequence[int]) -> int:
    """Return how many nodes of ``path`` the tree contains, from the root down."""
    widths, length = _widths(tree), 0
    while length < len(path) and path[length] < widths.get(tuple(path[:length]), 0):
        length += 1
    return length


def _path(
    tree: StaticTree | None, tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]
) -> tuple[int, ...]:
    """Return the ranks of the nodes that hold the longest prefix of ``text``."""
    children = {(parents[i], tokens[i]): i for i in range(1, len(tokens)) if tokens[i] >= 0}
    node, path = 0, []
    for token in text:
        node = children.get((node, token))
        if node is None:
            break
        path.append(0 if tree is None else tree.ranks[node])
    return tuple(path)


@functools.lru_cache(maxsize=256)
def _widths(tree: StaticTree) -> dict[tuple[int, ...], int]:
    return dict(zip(((), *tree.paths), tree.widths, strict=True))
