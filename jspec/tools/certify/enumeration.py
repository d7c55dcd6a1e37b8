"""The exact output distribution of a rule, by enumeration of the shipped code in float64.

A rule sees processed logits, a draft and randomness, and nothing else. Its output distribution is a
finite sum:

* over every draft (``drawing``), weighted with its probability;
* over every pass/fail cell of the uniforms, weighted with thresholds that are *measured*: the
  uniform of node v is bisected while its ancestors' are 0 (they pass if they can) and all others'
  infinite (they fail), and v is watched on the path. No formula of the rule is repeated;
* for a rule with randomness "target", over every tuple of the target's draws instead.

The target extends outputs of fewer than K+1 tokens, so every distribution is over V**(K+1) texts.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable

import jax
import numpy as np

from jspec.core import trees
from jspec.tools.certify.conditionals import float64, softmax
from jspec.tools.certify.drawing import Case, Drafts, as_draft, drafts, rows
from jspec.verify import Rule

_BISECTIONS = 46
_CHUNK = 256  # rows of a batch
_CHUNK_OF_DRAWS = 1024


@dataclasses.dataclass
class Outcome:
    """An enumerated output distribution."""

    probs: np.ndarray  # [V**(K+1)], of the first K+1 tokens
    target_probs: np.ndarray  # [V**(K+1)]
    accepted: np.ndarray  # [K+1], probability of 0..K accepted nodes
    thresholds: np.ndarray | None = None  # [T, N-1], where each uniform turns from pass to fail

    @property
    def distance(self) -> float:
        """Total variation between the output distribution and the target's."""
        return 0.5 * float(np.abs(self.probs - self.target_probs).sum())

    def worst_context(self, vocab_size: int) -> float:
        """Return the total variation of the next token, largest over all preceding texts."""
        probs, target_probs, worst = self.probs, self.target_probs, 0.0
        while len(probs) > 1:
            probs = probs.reshape(-1, vocab_size)
            target_probs = target_probs.reshape(-1, vocab_size)
            before, target_before = probs.sum(1), target_probs.sum(1)
            here = (target_before > 0) & (before > 0)
            gap = probs[here] / before[here, None]
            gap = np.abs(gap - target_probs[here] / target_before[here, None])
            worst = max(worst, 0.5 * float(gap.sum(1).max(initial=0)))
            probs, target_probs = before, target_before
        return worst

    @property
    def mean_accepted(self) -> float:
        """E[num_accepted]."""
        return float(self.accepted @ np.arange(len(self.accepted)))


def outcome(rule: Rule | Callable, case: Case, *, redraw: bool = False) -> Outcome:
    """Return the exact output distribution of a rule, or of a walk that is judged by uniforms.

    ``redraw`` is a mutation of rules judged by the target's draws: the next token is drawn again
    from the distribution at the path's end.
    """
    walk = rule.walk if isinstance(rule, Rule) else rule
    by_draws = isinstance(rule, Rule) and rule.randomness == "target"
    with float64():
        return _by_draws(walk, case, redraw) if by_draws else _by_uniforms(walk, case)


# ----------------------------------------------------------------------------------- by uniforms


def _by_uniforms(walk: Callable, case: Case) -> Outcome:
    every, count = drafts(case), len(case.parents) - 1
    run = runner(walk, case, every)
    limit = thresholds(run, case, every)
    cells = np.array(list(itertools.product([True, False], repeat=count)), bool)
    path, num_accepted, next_probs = run(inside(cells, limit, case))
    weights = np.where(cells, limit[:, None], 1 - limit[:, None]).prod(-1)
    weights *= every.weights[:, None]
    end = np.take_along_axis(path, num_accepted[..., None], -1)[..., 0]
    return Outcome(*_collect(case, every, weights, end, num_accepted, next_probs), limit)


def thresholds(run: Callable, case: Case, every: Drafts) -> np.ndarray:
    """Return where each node's uniform turns from pass to fail, by bisection: [T, N-1]."""
    count, size = len(every.weights), len(case.parents)
    tree = trees.from_parents(case.padded_parents, case.depth)
    ancestors = trees.unpack_bits(tree.ancestors, case.size) & ~np.eye(case.size, dtype=bool)
    uniforms = np.where(ancestors[1:size], 0.0, np.inf)[None].repeat(count, 0)  # [T, N-1, N]
    watched = np.arange(size - 1)
    low, high = np.zeros((count, size - 1)), np.ones((count, size - 1))
    for _ in range(_BISECTIONS if size > 1 else 0):
        middle = (low + high) / 2
        uniforms[:, watched, watched + 1] = middle
        path, _, _ = run(uniforms)
        reached = (path == watched[None, :, None] + 1).any(-1)
        low, high = np.where(reached, middle, low), np.where(reached, high, middle)
    return (low + high) / 2


def inside(cells: np.ndarray, limit: np.ndarray, case: Case) -> np.ndarray:
    """Return uniforms [T, C, N] strictly inside pass/fail ``cells`` [..., N-1], safe to round."""
    limit = limit[:, None]
    cells = np.broadcast_to(cells, (len(limit), *cells.shape[-2:]))
    uniforms = np.ones((*cells.shape[:2], case.size))
    uniforms[:, :, 1 : len(case.parents)] = np.where(cells, limit / 2, (1 + limit) / 2)
    return uniforms


def accepts_the_impossible(walk: Callable, case: Case) -> bool:
    """Return whether uniforms of exactly 0 accept a token of target probability 0.

    This has probability zero on paper, and one in millions with float32 uniforms: no sum shows it.
    """
    with float64():
        every, parents, depth = drafts(case), np.maximum(case.padded_parents, 0), case.depths
        path, _, _ = runner(walk, case, every)(np.zeros((len(every.weights), 1, case.size)))
    columns = [
        softmax(case.target[depth[up]])[every.context[:, up], every.tokens[:, node]]
        for node, up in enumerate(parents)
    ]
    accepted = path[:, 0, 1:]
    p = np.take_along_axis(np.stack(columns, 1), np.maximum(accepted, 0), 1)
    return bool(((accepted > 0) & (p == 0)).any())


# -------------------------------------------------------------------------- by the target's draws


def _by_draws(walk: Callable, case: Case, redraw: bool) -> Outcome:
    every, draws, path, num_accepted, next_probs = _run_draws(walk, case)
    end = np.take_along_axis(path, num_accepted[..., None], -1)[..., 0]
    if not redraw:
        emitted = np.take_along_axis(draws[None], end[..., None], 2)[..., 0]
        next_probs = np.eye(case.vocab_size)[emitted]
    weights = _draw_probs(case, every, draws) * every.weights[:, None]
    return Outcome(*_collect(case, every, weights, end, num_accepted, next_probs))


def disagreement(walk: Callable, case: Case) -> float:
    """Return the probability that the text is not that of plain sampling, for the worst draft.

    A rule that is judged by the target's draws emits these draws, so more is asked of it than a
    distribution: for every draft by itself, the text must be that of plain sampling with the same
    draws. Then drafts may even share the target's noise, as for rule ``coupled``. The result bounds
    the total variation between the output distribution and the target's.
    """
    with float64():
        every, draws, path, num_accepted, _ = _run_draws(walk, case)
    # The token of step i must be the draw after the node of step i - 1, its parent.
    parent, node = path[..., :-1], path[..., 1:]
    at = lambda x, index: np.take_along_axis(x, np.maximum(index, 0), 2)
    follows = at(every.valid[:, None], node) & (case.padded_parents[np.maximum(node, 0)] == parent)
    follows &= at(every.tokens[:, None], node) == at(draws[None], parent)
    used = np.arange(1, path.shape[-1]) <= num_accepted[..., None]
    agrees = (follows | ~used).all(-1) & (path[..., 0] == 0)
    return float((_draw_probs(case, every, draws) * ~agrees).sum(1).max())


def _run_draws(walk: Callable, case: Case):
    """Every draft, every tuple of draws [C, N], and the results of each pair: [T, C, ...]."""
    every, size = drafts(case), len(case.parents)
    draws = np.array(list(itertools.product(range(case.vocab_size), repeat=size)), np.int32)
    draws = np.pad(draws, ((0, 0), (0, case.size - size)))
    run = runner(walk, case, every, _CHUNK_OF_DRAWS)
    return every, draws, *run(np.broadcast_to(draws, (len(every.weights), *draws.shape)))


def _draw_probs(case: Case, every: Drafts, draws: np.ndarray) -> np.ndarray:
    """The probability of all draws after the nodes of each draft: [T, C].

    Nodes with equal paths share one draw, since they share its position.
    """
    probs, depth = np.ones((len(every.weights), len(draws))), case.depths
    for node in range(len(case.parents)):
        p = softmax(case.target[depth[node]])[every.context[:, node]]  # [T, V]
        repeats = np.zeros(len(probs), bool)
        for other in range(node):
            if depth[other] != depth[node]:
                continue
            twin = every.context[:, other] == every.context[:, node]
            twin &= every.valid[:, other] & every.valid[:, node]
            probs *= ~twin[:, None] | (draws[:, node] == draws[:, other])
            repeats |= twin
        probs *= np.where(repeats[:, None], 1, p[:, draws[:, node]])
    return probs


# ------------------------------------------------------------------------------------- the sum


def _collect(case: Case, every: Drafts, weights, end, num_accepted, next_probs):
    """Sum weighted outcomes [T, C] into ``probs``, ``target_probs`` and ``accepted``."""
    probs, target_probs, vocab = np.zeros(1), np.ones(1), case.vocab_size
    context = np.take_along_axis(every.context, end, 1)
    for depth, p in enumerate(map(softmax, case.target)):
        here = num_accepted == depth
        ends = np.zeros((vocab**depth, vocab))
        np.add.at(ends, context[here], weights[here][:, None] * next_probs[here])
        probs = (probs[:, None] * p).ravel() * (depth > 0) + ends.ravel()
        target_probs = (target_probs[:, None] * p).ravel()
    accepted = np.bincount(num_accepted.ravel(), weights.ravel(), minlength=case.depth + 1)
    return probs, target_probs, accepted


def runner(walk: Callable, case: Case, every: Drafts, chunk: int = _CHUNK) -> Callable:
    """Return the rule on every draft, as a function of uniforms or draws [T, C, N].

    It returns path [T, C, K+1] (-1 past its end), num_accepted [T, C] and next probabilities
    [T, C, V]. ``chunk`` rows are judged at once.
    """
    draft, logits = as_draft(case, every), rows(case, every, case.target)
    vocabulary, draft = draft.draft_to_target, draft.replace(draft_to_target=None)
    judge = functools.partial(_judge, walk, case.judged_as, case.parents if case.static else None)

    def run(randomness: np.ndarray):
        copies = randomness.shape[1]
        which = np.repeat(np.arange(len(every.weights)), copies)
        flat = randomness.reshape(len(which), -1)
        parts = []
        for start in range(0, len(which), chunk):
            row = np.resize(np.arange(start, min(start + chunk, len(which))), chunk)
            part = jax.tree.map(operator.itemgetter(which[row]), draft)
            parts.append(judge(logits[which[row]], part, vocabulary, flat[row]))
        joined = [
            np.concatenate(part)[: len(which)] for part in zip(*jax.device_get(parts), strict=True)
        ]
        path, num_accepted, next_logits = (x.reshape(-1, copies, *x.shape[1:]) for x in joined)
        on_path = np.arange(path.shape[-1]) <= num_accepted[..., None]  # past it: undefined
        return np.where(on_path, path, -1), num_accepted, softmax(next_logits)

    return run


# Enumeration runs few programs once each: optimising them would take half of the time.
@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), compiler_options={"xla_backend_optimization_level": 0}
)
def _judge(walk, proposal, parents, processed, draft, vocabulary, randomness):
    draft = draft.replace(draft_to_target=vocabulary)
    if parents is not None:
        draft = draft.replace(parents=np.array(parents, np.int32))
    tree = trees.from_parents(draft.parents, draft.max_depth)
    tree = trees.broadcast(tree, randomness.shape[0])
    return walk(processed, draft, tree, randomness, proposal)
