"""The expected drafts and accepted tokens of every round of a greedy answer, node by node."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Request
from jspec.drafters.trees.tree_settings import BestFirst, Dynamic
from jspec.engine import functional as host
from jspec.engine.plan import Plan
from tests import tiny
from tests.drafters import heads
from tests.fakes import whole

ROWS = [
    host.SequenceParams(prompt, max_tokens=(16, 64)[index], stream=index)
    for index, prompt in enumerate(tiny.prompts((1, 9)))
]


def plan_of(drafter, rule="coupled", **settings):
    """Return a plan for the tiny target that always verifies entire drafts."""
    return whole(tiny.TARGET, drafter, rule, **settings)


@functools.cache
def plain():
    """Return prompts and texts of ``ROWS`` by plain decoding."""
    answers = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), ROWS)
    texts = zip(ROWS, answers, strict=True)
    return [[*row.prompt, *answer.tokens.tolist()] for row, answer in texts]


def compare_all(drafter, params, in_torch, count=2):
    """Compare greedy answers with those of torch, and return the number of accepted tokens.

    ``in_torch(text)`` returns a function of (root's position, path): log-probabilities [V].
    """
    answers = host.generate_sequences(plan_of(drafter), params, ROWS[:count], profile=tiny.NODES)
    total = 0
    for row, text, answer in zip(ROWS[:count], plain(), answers, strict=False):
        log_probs = functools.cache(in_torch(text))
        total += compare(answer, row.prompt, text, drafter.draft_tree, log_probs)
    return total


def draft_after(drafter, params, prompt):
    """Return the draft after ``prompt`` of a row at temperature 1, and the memory before it."""
    row = host.SequenceParams(prompt, max_tokens=20, temperature=1.0)
    batch = host.start(plan_of(drafter, "rejection"), params, [row])
    memory, propose = batch.state.memory, jax.jit(drafter.propose)
    return propose(params, batch.request, (), memory, batch.state.history)[0], memory


def assert_same_distributions(logits, expected):
    """Compare logits with those of torch, whose rows may be shifted; no row is nearly uniform."""
    assert np.ptp(expected, -1).min() > 0.5
    gap = np.asarray(logits) - expected
    np.testing.assert_allclose(gap - gap.mean(-1, keepdims=True), 0, atol=1e-4)


def after_rounds(drafter, params, count=9):
    """Return texts [3, T], lengths [3] and state of rows of unlike temperatures after rounds."""
    rows = [
        host.SequenceParams(prompt, max_tokens=64, temperature=0.4 * index, stream=index)
        for index, prompt in enumerate(tiny.prompts((1, 9, 23)))
    ]
    plan = plan_of(drafter)
    state = host.advance(plan, params, host.start(plan, params, rows), count).state
    texts, lengths = np.asarray(state.history.tokens)[:3], np.asarray(state.history.length)[:3]
    assert len(set(lengths - [1, 9, 23])) > 1  # rows that accepted different numbers of tokens
    return texts, lengths, state


def recomputed(drafter, params, texts, lengths):
    """Return the memory that the drafter has after one pass over the texts."""
    features, _ = heads.hidden_states(texts, drafter.capture_layers)
    zeros = jnp.zeros((len(texts),), jnp.int32)
    keys = jax.random.split(jax.random.key(0), len(texts))
    empty = drafter.init(params, Request(keys, None, zeros[:, None], zeros), texts.shape[1])
    features = tuple(x[:, :-1] for x in features)
    return jax.jit(drafter.prefill)(params, empty, texts, features, np.int32(0), lengths - 1)


def assert_same_rows(cache, other, lengths, atol=2e-4):
    """Compare the first ``lengths`` [B] rows of two caches."""
    assert cache.length[: len(lengths)].tolist() == other.length.tolist() == list(lengths)
    leaves = jax.tree.leaves(cache.layers), jax.tree.leaves(other.layers)
    for left, right in zip(*leaves, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(left[row, :, :length], right[row, :, :length], atol=atol)


def likeliest(scores, count):
    """Return the indices of the ``count`` largest values, ties toward the lower one."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def static_paths(tree, log_probs):
    """Return the paths of a static tree; ``log_probs(path)`` is [V], of the tokens after it."""
    paths = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append((*paths[parent], likeliest(log_probs(paths[parent]), rank + 1)[rank]))
    return paths


def dynamic_paths(budget, log_probs):
    """Return the paths of EAGLE-2's tree."""
    scores = log_probs(())
    looked_at = [((token,), scores[token]) for token in likeliest(scores, budget.top_k)]
    frontier = list(looked_at)
    for _ in range(budget.max_depth - 1):
        children = []
        for path, score in frontier:
            scores = log_probs(path)
            children += [
                ((*path, token), score + scores[token]) for token in likeliest(scores, budget.top_k)
            ]
        looked_at += children
        best = likeliest([score for _, score in children], budget.top_k)
        frontier = [children[i] for i in best]
    best = likeliest([score for _, score in looked_at], budget.size - 1)
    return [(), *(looked_at[i][0] for i in sorted(best))]


def best_first_paths(budget, log_probs):
    """Return the likeliest paths, one after the other; ties go to the lower rank."""
    taken, scored = [()], [((), 0.0)]
    while len(taken) < budget.size:
        scores = {
            (*path, token): above + log_probs(path)[token]
            for path, above in scored
            if len(path) < budget.max_depth
            for token in likeliest(log_probs(path), budget.size)
            if (*path, token) not in taken
        }
        best = max(scores, key=scores.get)
        taken.append(best)
        scored.append((best, scores[best]))
    return taken


def compare(answer, prompt, text, tree, log_probs, first=1):
    """Compare each round of an answer, and return the number of accepted tokens.

    Args:
      answer: of ``generate_sequences``, with its trace.
      prompt: token ids.
      text: token ids of prompt and answer by plain decoding.
      tree: that the drafter drafts.
      log_probs: of (root's position, path) gives the reference's log-probabilities [V].
      first: the first root's position at which there is a draft; a feature comes with the second
        token.
    """
    paths_of = {Dynamic: dynamic_paths, BestFirst: best_first_paths}.get(type(tree), static_paths)
    assert answer.tokens.tolist() == list(text[len(prompt) :])
    root, total = len(prompt) - 1, 0
    for accepted, nodes, parents in zip(*answer.trace, strict=True):
        expected = [()]
        if root >= first:
            expected = paths_of(tree, lambda path: log_probs(root, path))  # noqa: B023
        room = len(text) - 1 - root  # tokens up to the end of the text: deeper nodes are dropped
        paths = {0: ()}
        for node in np.flatnonzero(nodes >= 0)[1:]:
            paths[node] = (*paths[parents[node]], int(nodes[node]))
        drafted, expected = list(paths.values()), [path for path in expected if len(path) < room]
        same_order = not isinstance(tree, BestFirst)  # its nodes are ordered by depth
        assert drafted == expected if same_order else sorted(drafted) == sorted(expected)
        following = list(text[root + 1 :])
        agreeing = [len(p) for p in paths.values() if list(p) == following[: len(p)]]
        assert accepted == max(agreeing)
        root += accepted + 1
        total += accepted
    assert root == len(text) - 1
    return total
