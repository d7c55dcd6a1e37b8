"""Exact laws of the shipped rules on drafted trees, by enumeration in float64.

The same sum as in ``chains.py``, over trees: over every draft that a law of drawing can give
(``drafts``, an independent account of what the proposals mean), and over every pass/fail cell of
the coins, whose thresholds are measured: node v's coin is bisected while its ancestors' are 0 (they
pass if they can) and all others' infinite (they fail), and v is watched for being on the path.

Laws that depend on the context are levels, as in ``chains.py``.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jspec.core import trees
from jspec.core.types import Draft
from jspec.tools.certify import exactly
from jspec.tools.certify.chains import Levels, Outcome, softmax

NUM_NODES, DEPTH = 7, 3  # of every tree, filled up with nodes that are not valid
_BISECTIONS = 46
_CHUNK = 256


@dataclasses.dataclass
class TreeCase:
    """What is drafted, by what law, and what it is judged by.

    Attributes:
      parents: of the tree, -1 at the root; at most ``NUM_NODES``, at most ``DEPTH`` edges deep.
      proposal: the law of a node's children, one of ``CHILDREN``; or one a node.
      target: raw logits of the target, DEPTH + 1 levels.
      drafter: raw logits of the drafter, DEPTH levels, over its own vocabulary.
      vocabulary: target ids of the drafter's vocabulary; None for the same.
      exists: bool [N], False for nodes that are never drafted; None for all.
      altered: changes the drafts before they are judged (a mutation): takes and gives ``Draft``.
      static: whether the parents are known when tracing, and no node is filled in.
    """

    parents: tuple[int, ...]
    proposal: str | tuple[str, ...]
    target: Levels
    drafter: Levels
    vocabulary: tuple[int, ...] | None = None
    exists: tuple[bool, ...] | None = None
    altered: Callable[[Draft], Draft] | None = None
    static: bool = False

    @property
    def size(self) -> int:
        """Nodes of a draft as it is judged."""
        return len(self.parents) if self.static else NUM_NODES

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target[0].shape[1]

    def proposal_of(self, node: int) -> str:
        """The law of the children of ``node``."""
        return self.proposal if isinstance(self.proposal, str) else self.proposal[node]


# ------------------------------------------------------------------------------ laws of drawing
#
# Each takes the law of a row [V] and the number of children, and gives every possible outcome:
# tokens (None: not valid, since nothing was left to draw), which are drawn, and the probability.

Children = tuple[tuple[int | None, ...], tuple[bool, ...], float]


def point(distribution: np.ndarray, count: int) -> Iterator[Children]:
    """The likeliest tokens."""
    yield tuple(np.argsort(-distribution, kind="stable")[:count].tolist()), (False,) * count, 1.0


def iid(distribution: np.ndarray, count: int) -> Iterator[Children]:
    """Draws with replacement."""
    for drawn in itertools.product(range(len(distribution)), repeat=count):
        yield drawn, (True,) * count, float(distribution[list(drawn)].prod())


def without_replacement(distribution: np.ndarray, count: int) -> Iterator[Children]:
    """Successive draws, each from what those before it left."""
    if count == 0:
        yield (), (), 1.0
    elif distribution.sum() == 0:
        yield (None,) * count, (True,) * count, 1.0
    else:
        for token in range(len(distribution)):
            left = np.where(np.arange(len(distribution)) == token, 0, distribution)
            for tokens, drawn, weight in without_replacement(left, count - 1):
                yield (
                    (token, *tokens),
                    (True, *drawn),
                    weight * distribution[token] / distribution.sum(),
                )


def top_plus_one(distribution: np.ndarray, count: int) -> Iterator[Children]:
    """The likeliest, and one draw from the rest."""
    if count == 0:
        yield (), (), 1.0
        return
    top = np.argsort(-distribution, kind="stable")[: count - 1]
    fixed = tuple(int(token) if distribution[token] > 0 else None for token in top)
    left = distribution.copy()
    left[top] = 0
    for token, _, weight in without_replacement(left, 1):
        yield (*fixed, *token), (False,) * (count - 1) + (True,), weight


def points_last(distribution: np.ndarray, count: int) -> Iterator[Children]:
    """Successive draws, and then the token that is likeliest before any draw, unless drawn."""
    if count == 0:
        yield (), (), 1.0
        return
    fixed = int(np.argmax(distribution))
    for tokens, drawn, weight in without_replacement(distribution, count - 1):
        yield (*tokens, None if fixed in tokens else fixed), (*drawn, False), weight


CHILDREN = {
    "point": point,
    "chain": iid,
    "iid": iid,
    "without_replacement": without_replacement,
    "top_plus_one": top_plus_one,
    "points_last": points_last,
}


@dataclasses.dataclass
class Drafts:
    """Every draft of a case."""

    tokens: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N]
    sampled: np.ndarray  # [T, N]
    weights: np.ndarray  # [T]
    context: np.ndarray  # [T, N], the number of a node's prefix among those of its length


def drafts(case: TreeCase) -> Drafts:
    """Draws every node's children in every way there is."""
    distributions = [softmax(level) for level in case.drafter]
    vocabulary = case.vocabulary or tuple(range(case.vocab_size))
    parents, size = case.parents, len(case.parents)
    families = [[c for c in range(size) if parents[c] == node] for node in range(size)]
    exists = case.exists or (True,) * size
    found = []

    def grow(node: int, tokens: dict, drawn: dict, context: dict, weight: float) -> None:
        """Draws the children of ``node`` and goes on with the next node."""
        if node == size:
            found.append((dict(tokens), dict(drawn), dict(context), weight))
            return
        family = [child for child in families[node] if exists[child]]
        if not family or node not in tokens:
            grow(node + 1, tokens, drawn, context, weight)
            return
        level, number = context[node]
        outcomes = CHILDREN[case.proposal_of(node)](distributions[level][number], len(family))
        for ids, flags, chance in outcomes:
            if chance == 0:
                continue
            alive = [
                (c, vocabulary[i], f)
                for c, i, f in zip(family, ids, flags, strict=True)
                if i is not None
            ]
            grow(
                node + 1,
                tokens | {child: token for child, token, _ in alive},
                drawn | {child: flag for child, _, flag in alive},
                context
                | {
                    child: (level + 1, number * case.vocab_size + token)
                    for child, token, _ in alive
                },
                weight * chance,
            )

    grow(0, {0: 0}, {0: False}, {0: (0, 0)}, 1.0)
    column = lambda part, pick, fill: np.array(
        [
            [pick(row[part][n]) if n in row[part] else fill for n in range(case.size)]
            for row in found
        ]
    )
    return Drafts(
        tokens=column(0, int, 0).astype(np.int32),
        valid=column(0, lambda _: True, False),
        sampled=column(1, bool, False),
        weights=np.array([row[3] for row in found]),
        context=column(2, lambda place: place[1], 0),
    )


# -------------------------------------------------------------------------------------- the sum


def outcome(walk: Callable, case: TreeCase) -> Outcome:
    """The exact output law of a rule judged by one coin a node."""
    with exactly.float64():
        return _outcome(walk, case)


def _outcome(walk: Callable, case: TreeCase) -> Outcome:
    every = drafts(case)
    count, size = len(every.weights), len(case.parents)
    run = runner(walk, case, every)
    tree = trees.from_parents(padded(case), DEPTH)
    above = trees.unpack_bits(tree.ancestors, case.size) & ~np.eye(case.size, dtype=bool)

    uniforms = np.where(above[1:size], 0.0, np.inf)[None].repeat(count, 0)  # [T, size-1, N]
    watched = np.arange(size - 1)
    low, high = np.zeros((count, size - 1)), np.ones((count, size - 1))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        uniforms[:, watched, watched + 1] = middle
        path, _, _ = run(uniforms)
        reached = (path == watched[None, :, None] + 1).any(-1)
        low, high = np.where(reached, middle, low), np.where(reached, high, middle)
    limit = (low + high) / 2

    cells = np.array(list(itertools.product([True, False], repeat=size - 1)), bool)
    uniforms = np.ones((count, len(cells), case.size))
    # Strictly inside a cell, where rounding cannot matter.
    uniforms[:, :, 1:size] = np.where(cells, limit[:, None] / 2, (1 + limit[:, None]) / 2)
    path, num_accepted, next_distribution = run(uniforms)
    weight = np.where(cells, limit[:, None], 1 - limit[:, None]).prod(-1)
    weight *= every.weights[:, None]
    end = np.take_along_axis(path, num_accepted[..., None], -1)[..., 0]
    return Outcome(*_collect(case, every, weight, end, num_accepted, next_distribution), limit)


def accepts_the_impossible(walk: Callable, case: TreeCase) -> bool:
    """Whether coins of exactly 0 let a token through that the target excludes.

    It has probability zero on paper, and one in millions where coins are float32: no sum shows it.
    """
    with exactly.float64():
        every, above = drafts(case), np.maximum(padded(case), 0)
        depth = trees.from_parents(padded(case), DEPTH).depth
        path, _, _ = runner(walk, case, every)(np.zeros((len(every.weights), 1, case.size)))
        chance = np.stack(
            [
                softmax(case.target[depth[up]])[every.context[:, up], every.tokens[:, node]]
                for node, up in enumerate(above)
            ],
            1,
        )
        accepted = path[:, 0, 1:]
        at_path = np.take_along_axis(chance, np.maximum(accepted, 0), 1)
        return bool(((accepted > 0) & (at_path == 0)).any())


def _collect(case, every, weight, end, num_accepted, next_distribution):
    """Sums weighted outcomes [T, C] into the law of DEPTH+1 tokens; the target's; of lengths."""
    distribution, exact, vocab = np.zeros(1), np.ones(1), case.vocab_size
    context = np.take_along_axis(every.context, end, 1)
    for depth, level in enumerate(case.target):
        here = num_accepted == depth
        ends = np.zeros((vocab**depth, vocab))
        np.add.at(ends, context[here], weight[here][:, None] * next_distribution[here])
        distribution = (distribution[:, None] * softmax(level)).ravel() * (depth > 0) + ends.ravel()
        exact = (exact[:, None] * softmax(level)).ravel()
    accepted = np.bincount(num_accepted.ravel(), weight.ravel(), minlength=DEPTH + 1)
    return distribution, exact, accepted


def padded(case: TreeCase) -> np.ndarray:
    """Parents of all nodes that are judged, those filled in included: int32 [N]."""
    return np.pad(case.parents, (0, case.size - len(case.parents))).astype(np.int32)


def runner(walk: Callable, case: TreeCase, every: Drafts, chunk: int = _CHUNK) -> Callable:
    """The rule on every draft: coins [T, C, N] to path (-1 past its end), num_accepted, next law.

    ``chunk`` of them are judged at once.
    """
    depths = trees.from_parents(padded(case), DEPTH).depth

    def rows(levels: Levels) -> np.ndarray:  # of leaves, below the drafter's last level: any
        find = lambda node, depth: levels[depth][every.context[:, node]]
        anything = np.tile(levels[0], (len(every.weights), 1))
        return np.stack(
            [
                find(node, depth) if depth < len(levels) else anything
                for node, depth in enumerate(depths)
            ],
            1,
        )

    draft = Draft(
        tokens=every.tokens,
        parents=np.broadcast_to(padded(case), every.tokens.shape),
        valid=every.valid,
        logits=rows(case.drafter),
        sampled=every.sampled,
        draft_to_target=None if case.vocabulary is None else np.array(case.vocabulary, np.int32),
        max_depth=DEPTH,
    )
    draft = draft if case.altered is None else case.altered(draft)
    processed = rows(case.target)
    static = case.parents if case.static else None

    def run(uniforms: np.ndarray):
        copies = uniforms.shape[1]
        which = np.repeat(np.arange(len(every.weights)), copies)
        flat = uniforms.reshape(len(which), -1)
        parts = []
        for start in range(0, len(which), chunk):
            index = np.resize(which[start : start + chunk], chunk)
            own = np.resize(flat[start : start + chunk], (chunk, flat.shape[1]))
            shared = draft.draft_to_target
            part = jax.tree.map(lambda x: x[index], draft.replace(draft_to_target=None))  # noqa: B023
            part = part.replace(draft_to_target=shared)
            parts.append(jax.device_get(judge(walk, static, processed[index], part, own)))
        joined = [np.concatenate(part)[: len(which)] for part in zip(*parts, strict=True)]
        path, num_accepted, logits = (x.reshape(-1, copies, *x.shape[1:]) for x in joined)
        on_path = np.arange(path.shape[-1]) <= num_accepted[..., None]  # past it: undefined
        return np.where(on_path, path, -1), num_accepted, softmax(logits)

    return run


@functools.partial(
    jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}
)
def judge(walk, parents, processed, draft, uniforms):
    """The rule itself: path, num_accepted and next_logits."""
    if parents is not None:
        draft = draft.replace(parents=np.array(parents, np.int32))
    tree = trees.from_parents(draft.parents, draft.max_depth)
    return walk(processed, draft, trees.broadcast(tree, uniforms.shape[0]), uniforms)
