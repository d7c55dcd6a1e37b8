"""A drafter's draws beside the laws that it recorded of them, in rounds of the shipped loop.

A rule is exact for drafts that were drawn from what was recorded, with noise of their own. So every
draw must be uniform in its law (``watching``), and tell nothing of what else is drawn: not of the
draws before it, of the verifier's coins, or of the round after.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jspec.core.types import Params
from jspec.engine.batch import start
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify.report import Finding, worst
from jspec.tools.certify.statistics import excess
from jspec.tools.certify.watching import CONDITIONS, Watched, observed, watch
from jspec.util.buckets import bucket

NUM_DRAFTS = 4096
MOST_ROWS = 64  # at once
_ELEMENTS = 2**25  # of recorded laws at once
_ROUNDS = 2  # in a row: noise that serves twice serves the next round
_BINS, _COARSE = 20, 8  # of a draw's place by itself, and beside another's
_ORDERS = ("the likeliest first", "by id")
_FEW = 100  # draws that say nothing
# Rounding of sums of float32: of masses, and of log-weights with their noise.
_ROUNDED = (2e-5, 2e-4)
_KNOWN = 0.5  # missed so much less than by chance, noise is that of jspec.sampling


def drafts(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    *,
    num_drafts: int = NUM_DRAFTS,
    seed: int = 0,
) -> Iterator[Finding]:
    """Drafts behind the prompts of ``rows`` and a round later, and what is wrong with the draws.

    Args:
      plan: target, drafter and rule, as they run.
      params: weights.
      rows: what is continued, each with noise of many seeds, all at a temperature above 0; the end
        of it, where two rounds more would not fit the model.
      num_drafts: rounds in all, of which half follow another.
      seed: of the noise.

    Yields:
      Of the check "drafter": whether drafts are what ``Draft`` says; and where tokens are drawn,
      whether the recorded law is that of the draws, and their noise nobody else's. That a drafter
      raises is a finding as well: then the only one, and measured NaN.

    Raises:
      ValueError: ``num_drafts`` is out of range.
    """
    check_number(num_drafts)
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
    yield _distribution(name, rounds)
    yield from _replayed(name, rounds)
    yield _noise(name, rounds)


def check_number(num_drafts: int) -> None:
    """Raises ValueError where so many drafts would tell nothing."""
    if not isinstance(num_drafts, int) or isinstance(num_drafts, bool) or num_drafts < _FEW:
        raise ValueError(f"num_drafts={num_drafts!r} must be a whole number of at least {_FEW}.")


def draws_tokens(plan: Plan) -> bool:
    """Whether the rule reads laws of the drafter's draws: then there is something to compare."""
    return plan.drafter.proposal not in ("point", "pruned") and plan.drafter.noise == "own"


def _watched(
    plan: Plan, params: Params, rows: Sequence[SequenceParams], num_drafts: int, seed: int
) -> list[Watched]:
    """What the first and the second round of each batch showed, batches joined."""
    looking = observed(plan)
    elements = plan.drafter.tree_size * plan.target.vocab_size
    batch = int(np.clip(_ELEMENTS // elements, 1, MOST_ROWS))
    batch = bucket(min(batch, -(-num_drafts // _ROUNDS)) // 2 + 1, smallest=1)
    needed = _ROUNDS * (plan.drafter.max_depth + 1) + 1
    own = [
        dataclasses.replace(
            row,
            prompt=row.prompt[-(plan.target.max_positions - needed) :],
            max_tokens=needed,
            stop_token_ids=(),
        )
        for row in rows[:MOST_ROWS]
    ]
    rows = [
        dataclasses.replace(own[index % len(own)], stream=index)
        for index in range(max(batch, len(own)))
    ]
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


def _distribution(name: str, rounds: list[Watched]) -> Finding:
    """Whether draws are uniform in the recorded law: of each node, and of all together."""
    places = np.concatenate([each.places for each in rounds])
    uniform = np.full(_BINS, 1 / _BINS)
    tried = []
    for order, by in enumerate(_ORDERS):
        each = places[..., order]
        columns = {f"node {node}": column for node, column in enumerate(each.T)}
        for words, column in {"all nodes": each.ravel(), **columns}.items():
            column = column[~np.isnan(column)]
            if len(column) >= _FEW:
                observed = np.bincount((column * _BINS).astype(int), minlength=_BINS)
                note = f"worst of {words}, draws by their place in the law, {by}"
                tried.append(Finding("", "", excess(observed, uniform), 1.0, note))
    count = int((~np.isnan(places[..., 0])).sum())
    subject = f"{name}: {count} draws are from the law recorded"
    if not tried:
        return Finding("drafter", subject, float("nan"), 1.0, "too few draws to tell")
    found = worst(tried)
    return Finding("drafter", subject, found.measured, 1.0, found.note)


def _replayed(name: str, rounds: list[Watched]) -> Iterator[Finding]:
    """Where draws follow the noise of ``jspec.core.sampling``, whether each is what the record gives.

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Event:
    """Something that was drawn, or left out, in every round that was watched."""

    words: str
    turn: tuple[int, int, int]  # round; a node of the draft or a coin of the verifier; its number
    values: np.ndarray  # [n] in [0, 1), NaN where it did not happen
    uniform: bool  # whether it must be, whatever happened before


def _events(turn: int, seen: Watched) -> Iterator[_Event]:
    """What happened in one round, in the order of ``turn``."""
    for node in range(seen.valid.shape[1]):
        valid, places = seen.valid[:, node], seen.places[:, node, 1]
        if valid.any() and not valid.all():
            values = np.where(valid, 0.25, 0.75)
            yield _Event(f"whether node {node} is valid", (turn, 0, node), values, False)
        if (~np.isnan(places)).sum() >= _FEW:
            yield _Event(f"the draw of node {node}", (turn, 0, node), places, True)
    last = seen.uniforms.shape[1] - 1
    for uniform in range(1, last + 1):  # nobody asks the root's: it is committed
        words = "the residual's coin" if uniform == last else f"the coin of node {uniform}"
        yield _Event(words, (turn, 1, uniform), seen.uniforms[:, uniform], True)


def _noise(name: str, rounds: list[Watched]) -> Finding:
    """Whether what is drawn later is uniform whatever was drawn, or left out, before."""
    events = [event for turn, seen in enumerate(rounds) for event in _events(turn, seen)]
    counts = _pairs([event.values for event in events])
    tried = []
    for (i, first), (j, second) in itertools.permutations(enumerate(events), 2):
        table = counts[i, :, j]
        if second.uniform and first.turn < second.turn and table.sum() >= _FEW:
            distribution = table.sum(1, keepdims=True) / table.sum() / _COARSE
            found = excess(table.ravel(), np.repeat(distribution, _COARSE, 1).ravel())
            later = " a round later" * (first.turn[0] < second.turn[0])
            tried.append((found, f"worst: {first.words}, then {second.words}{later}"))
    measured, note = max(tried)
    subject = f"{name}: what is drawn is not told by what was drawn before"
    return Finding("drafter", subject, measured, 1.0, note)


def _pairs(columns: list[np.ndarray]) -> np.ndarray:
    """Counts of each two columns in coarse bins, of rows that have both: [C, 8, C, 8]."""
    values = np.stack(columns, 1)  # [n, C]
    bins = np.where(np.isnan(values), -1, values * _COARSE).astype(int)
    hot = (bins[..., None] == np.arange(_COARSE)).astype(np.float32)
    hot = hot.reshape(len(hot), -1)
    size = len(columns)
    return (hot.T @ hot).reshape(size, _COARSE, size, _COARSE)
