"""Rules that are judged by the target's own draws, by enumeration of all drafts and all draws.

Such a rule emits what the target drew, so more can be asked of it than a law: whatever was drafted,
the text must be the one that plain sampling gives with the same draws. Where this holds for every
draft by itself, drafts may even share the target's noise, as ``coupled`` has them.
"""

import itertools
from collections.abc import Callable

import numpy as np

from jspec.tools.certify import exactly
from jspec.tools.certify.chains import softmax
from jspec.tools.certify.drafted_trees import TreeCase, drafts, padded, runner

_CHUNK = 1024


def disagreement(walk: Callable, case: TreeCase) -> float:
    """The chance that the text is not that of plain sampling, for the draft that is the worst.

    It bounds the total variation between the output law and the target's from above.
    """
    with exactly.float64():
        return _disagreement(walk, case)


def _disagreement(walk: Callable, case: TreeCase) -> float:
    every, parents, size = drafts(case), padded(case), len(case.parents)
    choices = np.array(list(itertools.product(range(case.vocab_size), repeat=size)), np.int32)
    uniforms = np.zeros((len(every.weights), len(choices), case.size), np.int32)
    uniforms[:, :, :size] = choices
    path, num_accepted, _ = runner(walk, case, every, _CHUNK)(uniforms)

    # The token at step i must be the draw after the node at step i - 1, that node's child.
    before, node = path[..., :-1], path[..., 1:]
    tokens = np.take_along_axis(every.tokens[:, None], np.maximum(node, 0), 2)
    valid = np.take_along_axis(every.valid[:, None], np.maximum(node, 0), 2)
    draws = np.take_along_axis(uniforms, np.maximum(before, 0), 2)
    follows = valid & (tokens == draws) & (parents[np.maximum(node, 0)] == before)
    used = np.arange(1, path.shape[-1]) <= num_accepted[..., None]
    agrees = (follows | ~used).all(-1) & (path[..., 0] == 0)
    return float((_chances(case, every, choices) * ~agrees).sum(1).max())


def _chances(case: TreeCase, every, choices: np.ndarray) -> np.ndarray:
    """The probability of all draws after the nodes of each draft: [T, C].

    Nodes that end the same text share one draw, as they share its position.
    """
    chances = np.ones((len(every.weights), len(choices)))
    depth = [0]
    for up in case.parents[1:]:
        depth.append(depth[up] + 1)
    for node, level in enumerate(depth):
        distribution = softmax(case.target[level])[every.context[:, node]]  # [T, V]
        same = [other for other in range(node) if depth[other] == level]
        repeats = np.zeros(len(chances), bool)
        for other in same:
            twin = every.context[:, other] == every.context[:, node]
            twin &= every.valid[:, other] & every.valid[:, node]
            chances *= ~twin[:, None] | (choices[:, node] == choices[:, other])
            repeats |= twin
        chances *= np.where(repeats[:, None], 1, distribution[:, choices[:, node]])
    return chances
