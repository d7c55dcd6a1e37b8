"""A drafter's draws beside the laws that it recorded of them, in rounds of the shipped loop.

A rule is exact for drafts that were drawn from what was recorded, with noise of their own. So every
draw must be uniform in its law (``watching``), and tell nothing of what else is drawn: not of the
draws before it, of the verifier's coins, or of the round after.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jspec.buckets import bucket
from jspec.certify.report import Finding, worst
from jspec.certify.statistics import excess
from jspec.certify.watching import CONDITIONS, Watched, observed, watch
from jspec.decode import init_shared
from jspec.generate import start
from jspec.plan import Plan
from jspec.rows import Row
from jspec.types import Params

NUM_DRAFTS = 4096
MOST_ROWS = 64  # at once
_ELEMENTS = 2**25  # of recorded laws at once
_ROUNDS = 2  # in a row: noise that serves twice serves the next round
_BINS, _COARSE = 20, 8  # of a draw's place by itself, and beside another's
_FEW = 100  # draws that say nothing
# Rounding of sums of float32: of masses, and of log-weights with their noise.
_ROUNDED = (2e-5, 2e-4)
_KNOWN = 0.5  # missed so much less than by chance, noise is that of jspec.sampling


def drafts(
    plan: Plan, params: Params, rows: Sequence[Row], *, num_drafts: int = NUM_DRAFTS, seed: int = 0
) -> Iterator[Finding]:
    """Drafts behind the prompts of ``rows`` and a round later, and what is wrong with the draws.

    Args:
      plan: target, drafter and rule, as they run.
      params: weights.
      rows: what is continued, each with noise of many seeds; all at a temperature above 0.
      num_drafts: rounds in all, of which half follow another.
      seed: of the noise.

    Yields:
      Of the check "drafter": whether drafts are what ``Draft`` says; and where tokens are drawn,
      whether the recorded law is that of the draws, and their noise nobody else's.

    Raises:
      ValueError: a row does not fit the model, or an argument is out of range.
    """
    if not isinstance(num_drafts, int) or isinstance(num_drafts, bool) or num_drafts < _FEW:
        raise ValueError(f"num_drafts={num_drafts!r} must be a whole number of at least {_FEW}.")
    name = type(plan.drafter).__name__
    try:
        rounds = _watched(plan, params, rows, num_drafts, seed)
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        note = f"it raises {type(error).__name__}: {words}"
        yield Finding("drafter", f"{name}: drafts", float("nan"), 1.0, note)
        return
    yield _conditions(name, rounds)
    if np.isnan(rounds[0].places).all() and np.isnan(rounds[1].places).all():
        return
    yield _law(name, rounds)
    yield from _replayed(name, rounds)
    yield _noise(name, rounds)


def draws_tokens(plan: Plan) -> bool:
    """Whether the rule reads laws of the drafter's draws: then there is something to compare."""
    return plan.drafter.proposal not in ("point", "pruned") and plan.drafter.noise == "own"


def _watched(
    plan: Plan, params: Params, rows: Sequence[Row], num_drafts: int, seed: int
) -> list[Watched]:
    """What the first and the second round of each batch showed, batches joined."""
    looking = observed(plan)
    elements = plan.drafter.tree_size * plan.target.vocab_size
    batch = int(np.clip(_ELEMENTS // elements, 1, MOST_ROWS))
    batch = bucket(min(batch, -(-num_drafts // _ROUNDS)) // 2 + 1, smallest=1)
    needed = _ROUNDS * (plan.drafter.max_depth + 1) + 1
    rows = [
        dataclasses.replace(rows[index % len(rows)], max_tokens=needed, stop_token_ids=(),
                            stream=index)
        for index in range(max(batch, min(len(rows), MOST_ROWS)))
    ]  # fmt: skip
    begun = start(plan, params, rows)
    shared, rng = init_shared(plan), np.random.default_rng(seed)
    found: list[list[Watched]] = [[] for _ in range(_ROUNDS)]
    for repeat in range(-(-num_drafts // (_ROUNDS * len(rows)))):
        keys = jax.vmap(lambda key, n: jax.random.fold_in(key, n), (0, None))(
            begun.request.keys, seed + repeat
        )
        request, kept, state = begun.request.replace(keys=keys), shared, begun.state
        for place in range(_ROUNDS):
            shape = (len(begun.state.done), plan.drafter.tree_size)
            uniform = rng.random(shape, np.float32)
            kept, state, seen = watch(looking, params, request, kept, state, uniform)
            found[place].append(jax.tree.map(lambda x: x[: len(rows)], jax.device_get(seen)))
    return [jax.tree.map(lambda *x: np.concatenate(x), *parts) for parts in found]


# ------------------------------------------------------------------------------------- conditions


def _conditions(name: str, rounds: list[Watched]) -> Finding:
    """How many drafts break a condition."""
    broken = np.concatenate([each.broken for each in rounds])
    which = [words for words, count in zip(CONDITIONS, broken.sum(0), strict=True) if count]
    note = f"not held: {'; '.join(which)}" if which else ""
    subject = f"{name}: {len(broken)} drafts are well formed"
    return Finding("drafter", subject, float(broken.any(1).sum()), 1.0, note)


# -------------------------------------------------------------------------------------------- law


def _law(name: str, rounds: list[Watched]) -> Finding:
    """Whether draws are uniform in the recorded law: of each node, and of all together."""
    places = np.concatenate([each.places for each in rounds])
    uniform = np.full(_BINS, 1 / _BINS)
    tried = []
    for node, column in [("all nodes", places.ravel()), *enumerate(places.T)]:
        column = column[~np.isnan(column)]
        if len(column) >= _FEW:
            observed = np.bincount((column * _BINS).astype(int), minlength=_BINS)
            words = node if isinstance(node, str) else f"node {node}"
            tried.append(Finding("", "", excess(observed, uniform), 1.0, words))
    count = int((~np.isnan(places)).sum())
    subject = f"{name}: {count} draws are from the law recorded"
    if not tried:
        return Finding("drafter", subject, float("nan"), 1.0, "too few draws to tell")
    found = worst(tried)
    note = f"worst of {found.note}, draws by their place in the law, the likeliest first"
    return Finding("drafter", subject, found.measured, 1.0, note)


def _replayed(name: str, rounds: list[Watched]) -> Iterator[Finding]:
    """Where draws follow the noise of ``jspec.sampling``, whether each is what the record gives.

    A law that was rounded after the draw moves one draw in thousands, which no count would show.
    """
    misses = np.concatenate([each.misses for each in rounds])
    chance = np.concatenate([1 - each.probability for each in rounds])[..., None]
    missed = misses > np.array(_ROUNDED)
    drawn = ~np.isnan(misses)
    expected = np.where(drawn, chance, 0).sum(0)  # [N, 2], if the noise were any other
    counts = missed.sum(0)
    known = (expected > 20) & (counts < _KNOWN * expected)
    if known.any():
        best = np.where(known, counts, np.iinfo(counts.dtype).max).min(1)
        nodes = known.any(1)
        total = int(drawn[:, nodes, 0].sum())
        subject = f"{name}: {total} draws are those that the record gives with their noise"
        off = int(best[nodes].sum())
        note = f"{off} are others, though the noise is that of jspec.sampling" if off else ""
        yield Finding("drafter", subject, float(off), 1.0, note)


# ------------------------------------------------------------------------------------------ noise


def _noise(name: str, rounds: list[Watched]) -> Finding:
    """Whether what is drawn later is uniform whatever was drawn, or left out, before."""
    columns, words, turns, later = [], [], [], []
    for turn, each in enumerate(rounds):
        varies = each.valid.any(0) & ~each.valid.all(0)
        for node in np.flatnonzero(varies):
            columns.append(np.where(each.valid[:, node], 0.25, 0.75))
            words.append(f"whether node {node} is valid")
            turns.append((turn, 0, node))
            later.append(False)
        for node in np.flatnonzero((~np.isnan(each.places)).sum(0) >= _FEW):
            columns.append(each.places[:, node])
            words.append(f"the draw of node {node}")
            turns.append((turn, 0, node))
            later.append(True)
        for coin, column in enumerate(each.coins.T):
            if coin == 0:
                continue  # the root is committed: nobody asks its coin
            columns.append(column)
            last = coin == each.coins.shape[1] - 1
            words.append("the residual's coin" if last else f"the coin of node {coin}")
            turns.append((turn, 1, coin))
            later.append(True)
    which = np.array([turn for turn, *_ in turns])
    counts = _pairs(columns)
    subject = f"{name}: what is drawn is not told by what was drawn before"
    most, pair = -float("inf"), ("", "")
    for second in np.flatnonzero(later):
        for first in range(len(columns)):
            if turns[first] >= turns[second]:
                continue
            table = counts[first, :, second]
            if table.sum() >= _FEW:
                law = np.repeat(table.sum(1, keepdims=True), _COARSE, 1) / _COARSE / table.sum()
                found = excess(table.ravel(), law.ravel())
                if found > most:
                    apart = " a round later" if which[first] != which[second] else ""
                    most, pair = found, (words[first], words[second] + apart)
    return Finding("drafter", subject, most, 1.0, f"worst: {pair[0]}, then {pair[1]}")


def _pairs(columns: list[np.ndarray]) -> np.ndarray:
    """Counts of each two columns in coarse bins, of rows that have both: [C, 8, C, 8]."""
    values = np.stack(columns, 1)  # [n, C]
    bins = np.where(np.isnan(values), -1, values * _COARSE).astype(int)
    hot = (bins[..., None] == np.arange(_COARSE)).astype(np.float32)
    hot = hot.reshape(len(hot), -1)
    size = len(columns)
    return (hot.T @ hot).reshape(size, _COARSE, size, _COARSE)
