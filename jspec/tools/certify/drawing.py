"""Every draft of a case with its probability: an independent account of the proposals."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from jspec.core import trees
from jspec.core.types import Draft
from jspec.tools.certify.conditionals import Conditionals, softmax

NUM_NODES, DEPTH = 7, 3  # sizes of trees with traced parents, padded with invalid nodes


@dataclasses.dataclass
class Case:
    """A drafted tree, the distributions it is drawn from, and those it is judged by."""

    # -1 at the root; at most ``NUM_NODES``, at most ``DEPTH`` edges deep
    parents: tuple[int, ...]
    proposal: str | tuple[str, ...]  # a key of ``CHILDREN`` for all nodes, or one per node
    target: Conditionals  # processed logits of the target, depth + 1 conditionals
    # processed logits of the drafter, depth conditionals, over its own vocabulary
    drafter: Conditionals
    # target ids of the drafter's vocabulary; None for the target's vocabulary
    vocabulary: tuple[int, ...] | None = None
    # bool [N], False for nodes that are never drafted; None for all
    exists: tuple[bool, ...] | None = None
    recorded: Conditionals | None = None  # logits that the draft records; None for ``drafter``
    # changes drafts before they are judged, a mutation
    altered: Callable[[Draft], Draft] | None = None
    static: bool = False  # whether parents are static, as for chains; then no node is padded

    @property
    def size(self) -> int:
        """N, padding included."""
        return len(self.parents) if self.static else NUM_NODES

    @property
    def depth(self) -> int:
        """Depth of the deepest node; of padded trees ``DEPTH``."""
        return len(self.target) - 1

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target[0].shape[1]

    @property
    def padded_parents(self) -> np.ndarray:
        """Parents with padding, int32 [N]; -1 at the root."""
        return np.pad(self.parents, (0, self.size - len(self.parents))).astype(np.int32)

    @property
    def depths(self) -> np.ndarray:
        """Depth of every node, padding included: [N]."""
        return trees.from_parents(self.padded_parents, self.depth).depth

    @property
    def judged_as(self) -> str:
        """The proposal that the rule gets."""
        return self.proposal if isinstance(self.proposal, str) else "mixed"

    def proposal_at(self, node: int) -> str:
        """Return the proposal of the children of ``node``."""
        return self.proposal if isinstance(self.proposal, str) else self.proposal[node]


# ---------------------------------------------------------------------------- children of one node
#
# Each function takes the probabilities of a row [V] and a number of children, at least 1. It yields
# every outcome: tokens (None for an invalid child), whether each was drawn, and the probability.

Children = tuple[tuple[int | None, ...], tuple[bool, ...], float]


def deterministic(probs: np.ndarray, count: int) -> Iterator[Children]:
    """Yield the likeliest tokens."""
    yield tuple(np.argsort(-probs, kind="stable")[:count].tolist()), (False,) * count, 1.0


def chain(probs: np.ndarray, count: int) -> Iterator[Children]:
    """Yield independent draws; a chain has one."""
    for drawn in itertools.product(range(len(probs)), repeat=count):
        yield drawn, (True,) * count, float(probs[list(drawn)].prod())


def without_replacement(probs: np.ndarray, count: int) -> Iterator[Children]:
    """Yield successive draws, each without the tokens drawn before it."""
    if count == 0:
        yield (), (), 1.0
    elif probs.sum() == 0:
        yield (None,) * count, (True,) * count, 1.0
    else:
        for token, p in enumerate(probs / probs.sum()):
            rest = np.where(np.arange(len(probs)) == token, 0, probs)
            for tokens, drawn, weight in without_replacement(rest, count - 1):
                yield (token, *tokens), (True, *drawn), weight * p


def top_plus_one(probs: np.ndarray, count: int) -> Iterator[Children]:
    """Yield the likeliest tokens, and one draw from the rest."""
    top = np.argsort(-probs, kind="stable")[: count - 1]
    fixed = tuple(int(token) if probs[token] > 0 else None for token in top)
    rest = probs.copy()
    rest[top] = 0
    for token, _, weight in without_replacement(rest, 1):
        yield (*fixed, *token), (False,) * (count - 1) + (True,), weight


def deterministic_last(probs: np.ndarray, count: int) -> Iterator[Children]:
    """Yield successive draws, then the likeliest token unless it was drawn."""
    fixed = int(np.argmax(probs))
    for tokens, drawn, weight in without_replacement(probs, count - 1):
        yield (*tokens, None if fixed in tokens else fixed), (*drawn, False), weight


CHILDREN = {
    "deterministic": deterministic,
    "chain": chain,
    "without_replacement": without_replacement,
    "top_plus_one": top_plus_one,
    "deterministic_last": deterministic_last,
}


# ------------------------------------------------------------------------------------ entire drafts


@dataclasses.dataclass
class Drafts:
    """Every draft of a case; T of them."""

    tokens: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N]
    sampled: np.ndarray  # [T, N]
    context: np.ndarray  # [T, N], index of a node's prefix among those of its length
    weights: np.ndarray  # [T]


def drafts(case: Case) -> Drafts:
    """Draw every node's children in every possible way."""
    probs = [softmax(logits) for logits in case.drafter]
    vocabulary = case.vocabulary or tuple(range(case.vocab_size))
    parents, exists = case.parents, case.exists or (True,) * len(case.parents)
    depth = case.depths
    root = (0, False, 0)  # token, whether it was drawn, index of its prefix
    partial = [({0: root}, 1.0)]  # the nodes drawn so far, and their probability
    for node in range(len(parents)):
        children = [c for c, up in enumerate(parents) if up == node and exists[c]]
        if not children:
            continue
        grown = [each for each in partial if node not in each[0]]
        for nodes, weight in partial:
            if node not in nodes:
                continue
            context = nodes[node][2]
            row = probs[depth[node]][context]
            for ids, flags, p in CHILDREN[case.proposal_at(node)](row, len(children)):
                tokens = [None if i is None else vocabulary[i] for i in ids]
                drawn = {
                    c: (token, flag, context * case.vocab_size + token)
                    for c, token, flag in zip(children, tokens, flags, strict=True)
                    if token is not None
                }
                grown.append((nodes | drawn, weight * p))
        partial = [each for each in grown if each[1] > 0]
    size = range(case.size)
    table = np.array([[nodes.get(node, root) for node in size] for nodes, _ in partial], np.int64)
    return Drafts(
        tokens=table[..., 0].astype(np.int32),
        valid=np.array([[node in nodes for node in size] for nodes, _ in partial]),
        sampled=table[..., 1].astype(bool),
        context=table[..., 2],
        weights=np.array([weight for _, weight in partial]),
    )


def as_draft(case: Case, every: Drafts) -> Draft:
    """Return all drafts as one batch, with the recorded logits and the mutation of the case."""
    draft = Draft(
        tokens=every.tokens,
        parents=np.broadcast_to(case.padded_parents, every.tokens.shape),
        valid=every.valid,
        logits=rows(case, every, case.recorded or case.drafter),
        sampled=every.sampled,
        draft_to_target=None if case.vocabulary is None else np.array(case.vocabulary, np.int32),
        max_depth=case.depth,
    )
    return draft if case.altered is None else case.altered(draft)


def rows(case: Case, every: Drafts, conditionals: Conditionals) -> np.ndarray:
    """Return the logits after every node [T, N, V]; zeros below the last conditional."""
    vocab_size = len(case.vocabulary or ()) or case.vocab_size
    leaf = np.zeros((len(every.weights), conditionals[0].shape[1] if conditionals else vocab_size))
    columns = [
        conditionals[depth][every.context[:, node]] if depth < len(conditionals) else leaf
        for node, depth in enumerate(case.depths)
    ]
    return np.stack(columns, 1)
