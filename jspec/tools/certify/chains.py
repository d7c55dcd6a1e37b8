"""Exact laws of the shipped acceptance rules, by enumeration in float64.

A rule sees warped logits, a draft and coins, and nothing else, so its output law is a finite sum:

* over every draft tuple, weighted with the law it was drawn from;
* over every pass/fail cell of its coins, weighted with thresholds that are *measured*: for coin i,
  bisect between 0 and 1 while earlier coins are 0 (they pass if they can) and later ones are 1
  (they fail), and watch whether ``num_accepted`` reaches i. No formula of the rule is repeated;
* for rules whose coins are the target's draws: over every tuple of draws.

Outputs shorter than K+1 tokens are extended by the target, so every law lives on V**(K+1) texts.
Laws that depend on the context are lists of matrices: ``levels[i]`` is [V**i, V], the logits after
each prefix of i tokens, prefixes in lexicographic order.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import sampling, trees
from jspec.core.types import Draft, Sampling
from jspec.tools.certify import exactly
from jspec.verify import RULES, Rule

_BISECTIONS = 64
Levels = list[np.ndarray]


@dataclasses.dataclass
class Case:
    """What is drafted, what it is judged by, and what is recorded.

    Attributes:
      target: raw logits of the target, K+1 levels.
      recorded: raw logits the rule is told the drafts were drawn from, K levels.
      drawn: raw logits they were drawn from, K levels; None for ``recorded``.
      sampling: the warps of target and drafter, for one row; None for plain sampling.
      drawn_sampling: the warps the drafts were drawn under; None for ``sampling``.
      keep: which nodes of the draft tuples [B, K] are valid, bool [B, K]; None for all.
    """

    target: Levels
    recorded: Levels
    drawn: Levels | None = None
    sampling: Sampling | None = None
    drawn_sampling: Sampling | None = None
    keep: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def depth(self) -> int:
        """K."""
        return len(self.recorded)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target[0].shape[1]


@dataclasses.dataclass
class Outcome:
    """What enumeration found."""

    distribution: np.ndarray  # [V**(K+1)], of the first K+1 tokens
    exact: np.ndarray  # [V**(K+1)], the target's
    accepted: np.ndarray  # [K+1], probability of 0..K accepted nodes
    thresholds: np.ndarray | None = None  # [V**K, K], where each coin turns from pass to fail

    @property
    def distance(self) -> float:
        """Total variation between the output law and the target's."""
        return 0.5 * float(np.abs(self.distribution - self.exact).sum())

    def worst_context(self, vocab_size: int) -> float:
        """Total variation of the next token's law, largest over all texts that may come before."""
        found, wanted, worst = self.distribution, self.exact, 0.0
        while len(found) > 1:
            found, wanted = found.reshape(-1, vocab_size), wanted.reshape(-1, vocab_size)
            before, certain = found.sum(1, keepdims=True), wanted.sum(1, keepdims=True)
            met = (certain > 0)[:, 0] & (before > 0)[:, 0]
            gap = np.abs(found[met] / before[met] - wanted[met] / certain[met])
            worst = max(worst, 0.5 * float(gap.sum(1).max(initial=0)))
            found, wanted = before[:, 0], certain[:, 0]
        return worst

    @property
    def mean_accepted(self) -> float:
        """E[num_accepted]."""
        return float(self.accepted @ np.arange(len(self.accepted)))


def context_free(distribution: list[float] | np.ndarray, count: int) -> Levels:
    """``count`` levels of the same law, as logits."""
    with np.errstate(divide="ignore"):
        row = np.log(np.asarray(distribution, np.float64))
    return [np.tile(row, (len(row) ** level, 1)) for level in range(count)]


def context_dependent(seed: int, vocab_size: int, count: int, scale: float = 1.5) -> Levels:
    """``count`` levels of random logits, another law after every prefix."""
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=(vocab_size**level, vocab_size)) for level in range(count)]


def outcome(rule: str | Rule | Callable, case: Case, *, redraw: bool = False) -> Outcome:
    """The exact output law of a rule, or of a walk that is judged by round coins.

    ``redraw`` is a mutation of rules judged by the target's draws: the next token is drawn afresh
    from the law at the path's end, in place of the draw that ended the path.
    """
    with exactly.float64():
        rule = RULES[rule] if isinstance(rule, str) else rule
        if not isinstance(rule, Rule):
            return _outcome_of_uniforms(rule, case)
        if rule.uniforms == "target":
            return _outcome_of_draws(rule.walk, case, redraw)
        return _outcome_of_uniforms(rule.walk, case)


# ------------------------------------------------------------------------------ rules with coins


def _outcome_of_uniforms(walk: Callable, case: Case) -> Outcome:
    distributions = _Distributions(case)
    cells = np.array(list(itertools.product([True, False], repeat=case.depth)), bool)
    run = _tiled(walk, distributions, len(cells))
    thresholds = _thresholds(run, len(distributions.tuples), case.depth, len(cells))
    limit = thresholds[:, None, :]
    # Strictly inside a cell, where rounding cannot matter.
    num_accepted, next_distribution = run(np.where(cells, limit / 2, (1 + limit) / 2))
    weight = distributions.weights[:, None] * np.where(cells, limit, 1 - limit).prod(-1)
    distribution, accepted = distributions.collect(weight, num_accepted, next_distribution)
    return Outcome(distribution, distributions.exact, accepted, thresholds)


def _thresholds(run: Callable, batch: int, depth: int, num_cells: int) -> np.ndarray:
    """Where each coin turns from pass to fail, [B, K]. Coin i is bisected in column i."""
    index = np.arange(depth)
    uniforms = np.where(index < np.arange(num_cells)[:, None], 0.0, 1.0)  # [cells, K]
    uniforms = np.broadcast_to(uniforms, (batch, *uniforms.shape)).copy()
    low, high = np.zeros((batch, depth)), np.ones((batch, depth))
    for _ in range(_BISECTIONS if depth else 0):
        middle = (low + high) / 2
        uniforms[:, index, index] = middle
        passes = run(uniforms)[0][:, :depth] > index
        low, high = np.where(passes, middle, low), np.where(passes, high, middle)
    return (low + high) / 2


def _tiled(walk: Callable, distributions: "_Distributions", copies: int) -> Callable:
    """The rule on ``copies`` of every draft: coins [B, copies, K] to num_accepted, next law."""
    tile = lambda x: jnp.asarray(np.repeat(x, copies, 0))
    processed, tokens, valid = (
        tile(distributions.processed),
        tile(distributions.tokens),
        tile(distributions.valid),
    )
    recorded = tile(distributions.recorded)
    batch = len(distributions.tuples)

    def run(uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = uniforms.reshape(batch * copies, -1)
        flat = jnp.asarray(np.pad(flat, ((0, 0), (1, 0)), constant_values=0.5))
        num_accepted, logits = judge(walk, processed, tokens, valid, recorded, flat)
        logits = np.asarray(logits)
        return (
            np.asarray(num_accepted).reshape(batch, copies),
            softmax(logits).reshape(batch, copies, -1),
        )

    return run


# A proof needs the same operations, not fast ones: half the time would go into optimising them.
@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def judge(walk, processed, tokens, valid, recorded, uniforms):
    """The rule itself, on chains: num_accepted [B] and next_logits [B, V]."""
    depth = tokens.shape[1] - 1
    tree = trees.broadcast(trees.from_parents(trees.chain(depth), depth), tokens.shape[0])
    draft = Draft(tokens, trees.chain(depth), valid, recorded, max_depth=depth)
    path, num_accepted, next_logits = walk(processed, draft, tree, uniforms)
    del path  # of a chain: nodes 0..K
    return num_accepted, next_logits


def is_constant_in_cells(rule: str, case: Case, seed: int = 0) -> bool:
    """Whether random coins give what the cell they fall in gives: that thresholds tell all."""
    walk = RULES[rule].walk
    copies = 2**case.depth
    with exactly.float64():
        distributions = _Distributions(case)
        run = _tiled(walk, distributions, copies)
        limit = _thresholds(run, len(distributions.tuples), case.depth, copies)[:, None, :]
        uniforms = np.random.default_rng(seed).random(
            (len(distributions.tuples), copies, case.depth)
        )
        found = run(uniforms)
        inside = run(np.where(uniforms < limit, limit / 2, (1 + limit) / 2))
    return np.array_equal(found[0], inside[0]) and np.allclose(found[1], inside[1], atol=1e-12)


# ------------------------------------------------------------------- rules with the target's draws


def _outcome_of_draws(walk: Callable, case: Case, redraw: bool) -> Outcome:
    distributions = _Distributions(case)
    draws = _all_tuples(case.vocab_size, case.depth + 1)
    batch, copies = len(distributions.tuples), len(draws)
    tile = lambda x: jnp.asarray(np.repeat(x, copies, 0))
    num_accepted, _ = judge(
        walk,
        tile(distributions.processed),
        tile(distributions.tokens),
        tile(distributions.valid),
        tile(distributions.recorded),
        jnp.asarray(np.tile(draws, (batch, 1)), jnp.int32),
    )
    num_accepted = np.asarray(num_accepted).reshape(batch, copies)
    at_end = np.take_along_axis(softmax(distributions.processed), num_accepted[..., None], 1)
    probs = softmax(distributions.processed)[
        :, None, np.arange(case.depth + 1), draws
    ]  # [B, copies, K+1]
    weight = distributions.weights[:, None] * probs.reshape(batch, copies, -1).prod(-1)
    emitted = np.take_along_axis(draws[None], num_accepted[..., None], 2)[..., 0]
    next_distribution = at_end if redraw else np.eye(case.vocab_size)[emitted]
    distribution, accepted = distributions.collect(weight, num_accepted, next_distribution)
    return Outcome(distribution, distributions.exact, accepted)


# ---------------------------------------------------------------------------------------- the sum


class _Distributions:
    """Everything about a case, gathered for all V**K draft tuples."""

    def __init__(self, case: Case):
        depth, vocab = case.depth, case.vocab_size
        self.vocab_size = vocab
        target = level_filters(case.target, case.sampling)
        recorded = level_filters(case.recorded, case.sampling)
        drawn = level_filters(case.drawn or case.recorded, case.drawn_sampling or case.sampling)
        self.levels = [softmax(level) for level in target]
        self.tuples = _all_tuples(vocab, depth)
        index = _prefix_index(self.tuples, vocab)  # [B, K+1]
        rows = lambda levels: [level[index[:, i]] for i, level in enumerate(levels)]
        self.processed = np.stack(rows(target), 1)
        leaf = np.zeros((len(self.tuples), vocab))
        self.recorded = np.stack([*rows(recorded), leaf], 1)
        at_tokens = [
            np.take_along_axis(softmax(distribution), self.tuples[:, i, None], 1)[:, 0]
            for i, distribution in enumerate(rows(drawn))
        ]
        self.weights = np.prod([np.ones(len(self.tuples)), *at_tokens], axis=0)
        keep = np.ones(self.tuples.shape, bool) if case.keep is None else case.keep(self.tuples)
        self.valid = np.pad(keep, ((0, 0), (1, 0)), constant_values=True)
        self.tokens = np.pad(np.where(keep, self.tuples, 0), ((0, 0), (1, 0))).astype(np.int32)
        self.index = index
        self.exact = np.ones(1)
        for level in self.levels:
            self.exact = (self.exact[:, None] * level).ravel()

    def collect(self, weight, num_accepted, next_distribution) -> tuple[np.ndarray, np.ndarray]:
        """Sums weighted outcomes [B, C] into the law of K+1 tokens, and that of num_accepted."""
        distribution, accepted = np.zeros(1), []
        for count, level in enumerate(self.levels):
            ends = np.zeros((self.vocab_size**count, self.vocab_size))
            here = np.where(num_accepted == count, weight, 0)
            mass = (here[..., None] * next_distribution).sum(1)  # [B, V]
            np.add.at(ends, self.index[:, count], mass)
            distribution = (distribution[:, None] * level).ravel() * (count > 0) + ends.ravel()
            accepted.append(here.sum())
        return distribution, np.array(accepted)


def _all_tuples(vocab_size: int, count: int) -> np.ndarray:
    """Every tuple of ``count`` tokens, in lexicographic order: int32 [V**count, count]."""
    tuples = list(itertools.product(range(vocab_size), repeat=count))
    return np.array(tuples, np.int32).reshape(vocab_size**count, count)


def _prefix_index(tuples: np.ndarray, vocab_size: int) -> np.ndarray:
    """The number of every prefix of every tuple among prefixes of its length: [B, K+1]."""
    columns = [np.zeros(len(tuples), np.int64)]
    for column in tuples.T:
        columns.append(columns[-1] * vocab_size + column)
    return np.stack(columns, 1)


def level_filters(levels: Levels, settings: Sampling | None) -> Levels:
    """The shipped warp in float64, one set of settings for all rows."""
    if settings is None or not levels:
        return levels
    settings = Sampling(
        settings.temperature[:1],
        settings.min_p[:1],
        settings.top_k[:1],
        settings.top_p[:1],
        names=settings.names,
    )
    with exactly.float64():
        rows = jnp.asarray(np.concatenate(levels))[None]
        processed = np.asarray(_jitted_process(rows, settings))[0]
    return np.split(processed, np.cumsum([len(level) for level in levels])[:-1])


_jitted_process = jax.jit(sampling.process_logits)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of logits [..., V]."""
    peak = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
    return weights / weights.sum(-1, keepdims=True)
