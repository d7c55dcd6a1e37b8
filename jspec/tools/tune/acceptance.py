"""Acceptance of drafted nodes by depth and rank, recorded with a wide tree.

Every rule but ``block`` judges node by node, from the root down, in rank order. A smaller tree thus
accepts the longest prefix of the accepted path that it contains.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jspec.checkpoints import loading
from jspec.core.static_trees import StaticTree
from jspec.engine.functional import Answer, generate_sequences
from jspec.engine.profile import Profile
from jspec.engine.sequences import SequenceParams
from jspec.sharding import mesh as mesh_lib
from jspec.tools.bench.contenders import Case
from jspec.tools.bench.questions import Request
from jspec.tools.tune.families import Family

_PRIOR_TRIALS = 8.0  # weight of a rank's mean over all depths against the counts of one depth


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


def record(family: Family, requests: Sequence[Request], case: Case) -> Acceptance:
    """Answer all requests with the family's widest tree, and count what is accepted."""
    build, tree = family.build(family.probe.config), family.probe.tree
    sequences = [
        SequenceParams(
            request.token_ids,
            case.max_tokens,
            temperature=case.temperature,
            stop_token_ids=loading.text_ends(family.target),
            seed=case.seed + index,
        )
        for index, request in enumerate(requests)
    ]
    with mesh_lib.on(family.mesh):
        answers = generate_sequences(
            build.plan,
            build.params,
            sequences,
            max_num_seqs=case.batch_size,
            profile=Profile(nodes=True),
        )
    return count((path for answer in answers for path in paths_of(answer, tree)), tree)


def paths_of(answer: Answer, tree: StaticTree) -> Iterator[tuple[int, ...]]:
    """Yield the accepted path of each round: ranks of the nodes, from the root down.

    Rounds whose draft could pass the end of the text are left out, because the limit cut them
    short.
    """
    depth, text, begin = len(answer.accepted) - 1, answer.tokens.tolist(), 0
    for accepted, tokens, parents in zip(*(part.tolist() for part in answer.trace), strict=True):
        if begin + depth + 1 <= len(text):
            yield _path(tree, tokens, parents, text[begin : begin + accepted])
        begin += accepted + 1


def count(paths: Iterable[tuple[int, ...]], tree: StaticTree) -> Acceptance:
    """Count the accepted nodes of all rounds with drafts of ``tree``."""
    widths = dict(zip(((), *tree.paths), tree.widths, strict=True))
    tried = np.zeros((tree.max_depth, max(tree.widths)), int)
    accepted = np.zeros_like(tried)
    for path in paths:
        for depth in range(len(path) + 1):
            tried[depth : depth + 1, : widths.get(path[:depth], 0)] += 1
        accepted[np.arange(len(path)), list(path)] += 1
    return Acceptance(tried, accepted)


def _path(
    tree: StaticTree, tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]
) -> tuple[int, ...]:
    """Return the ranks of the nodes that hold the longest prefix of ``text``."""
    children = {(parents[i], tokens[i]): i for i in range(1, len(tokens)) if tokens[i] >= 0}
    node, path = 0, []
    for token in text:
        node = children.get((node, token))
        if node is None:
            break
        path.append(tree.ranks[node])
    return tuple(path)
