"""The check "drafter": a drafter's draws against the distributions that it recorded of them.

A rule is exact for drafts that were drawn from the recorded distributions, with noise of their own.
So every draw must be uniform in its distribution (``watching``), and independent of everything else
that is drawn: of earlier draws, of the verifier's uniforms, and of the next round.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jspec.core.types import Params
from jspec.engine.functional import start
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify.report import Finding, raised
from jspec.tools.certify.statistics import excess
from jspec.tools.certify.watching import CONDITIONS, Observation, observed, watch
from jspec.util.values import bucket, is_whole

NUM_DRAFTS = 4096
_MOST_ROWS = 64  # at once
_ELEMENTS = 2**25  # numbers of recorded distributions at once
_ROUNDS = 2  # consecutive rounds: noise that is used twice shows in the next round
_BINS, _COARSE_BINS = 20, 8  # bins of a quantile by itself, and of pairs
_ORDERS = ("the likeliest first", "by id")
_FEW = 100  # fewer draws show nothing
_TOLERANCE = 2e-4  # rounding of log-weights and their noise in float32
_RECOGNISED = 0.5  # below this share of the misses by chance, the noise is jspec.core.sampling's


def drafts(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    *,
    num_drafts: int = NUM_DRAFTS,
    seed: int = 0,
) -> Iterator[Finding]:
    """Draft behind the prompts of ``rows`` and a round later, and test the draws.

    Each prompt is continued with noise of many seeds, at a temperature above 0. A prompt that
    leaves no room for two rounds keeps its end only. Half of the rounds follow another.

    Yields:
      Findings of the check "drafter": that drafts are well formed; and where tokens are drawn, that
      they follow the recorded distribution and that their noise is independent. If the drafter
      raises, that is the only finding, with a measurement of NaN.

    Raises:
      ValueError: ``num_drafts`` is out of range.
    """
    check_number(num_drafts)
    name = type(plan.drafter).__name__
    try:
        rounds = _observe(plan, params, rows, num_drafts, seed)
    except Exception as error:
        yield Finding("drafter", f"{name}: drafts", float("nan"), 1.0, raised(error))
        return
    yield _conditions(name, rounds)
    if all(np.isnan(each.quantiles).all() for each in rounds):
        return
    yield _distribution(name, rounds)
    yield from _replayed(name, rounds)
    yield _noise(name, rounds)


def check_number(num_drafts: int) -> None:
    """Raise ValueError for a number of drafts that is too small to show anything."""
    if not is_whole(num_drafts, _FEW):
        raise ValueError(f"num_drafts={num_drafts!r} must be a whole number of at least {_FEW}.")


def draws_tokens(plan: Plan) -> bool:
    """Return whether the rule reads distributions of the drafter's draws, which can be tested."""
    return plan.drafter.proposal != "deterministic" and plan.drafter.noise == "own"


def _observe(
    plan: Plan, params: Params, rows: Sequence[SequenceParams], num_drafts: int, seed: int
) -> list[Observation]:
    watched, rows = observed(plan), _repeated(plan, rows, num_drafts)
    batch = start(plan, params, rows)
    first_shared, rng = init_shared(plan), np.random.default_rng(seed)
    rounds: list[list[Observation]] = [[] for _ in range(_ROUNDS)]
    for repeat in range(-(-num_drafts // (_ROUNDS * len(rows)))):
        fold = jax.vmap(jax.random.fold_in, (0, None))
        request = batch.request.replace(keys=fold(batch.request.keys, seed + repeat))
        shared, state = first_shared, batch.state
        for observations in rounds:
            shape = (len(batch.state.done), plan.drafter.tree_size, 2)
            share = rng.random(shape, np.float32)
            shared, state, seen = watch(watched, params, request, shared, state, share)
            observations.append(jax.tree.map(lambda x: x[: len(rows)], jax.device_get(seen)))
    return [jax.tree.map(lambda *x: np.concatenate(x), *parts) for parts in rounds]


def _repeated(plan: Plan, rows: Sequence[SequenceParams], num_drafts: int) -> list[SequenceParams]:
    """The prompts as rows of a full batch, each in a stream of its own."""
    elements = plan.drafter.tree_size * plan.target.vocab_size
    batch = int(np.clip(_ELEMENTS // elements, 1, _MOST_ROWS))
    batch = bucket(min(batch, -(-num_drafts // _ROUNDS)) // 2 + 1, smallest=1)
    needed = _ROUNDS * (plan.drafter.max_depth + 1) + 1
    room = plan.target.max_positions - needed
    rows = [
        dataclasses.replace(row, prompt=row.prompt[-room:], max_tokens=needed, stop_token_ids=())
        for row in rows[:_MOST_ROWS]
    ]
    return [
        dataclasses.replace(rows[index % len(rows)], stream=index)
        for index in range(max(batch, len(rows)))
    ]


def _conditions(name: str, rounds: list[Observation]) -> Finding:
    broken = np.concatenate([each.broken for each in rounds])
    words = [words for words, count in zip(CONDITIONS, broken.sum(0), strict=True) if count]
    note = f"broken: {'; '.join(words)}" if words else ""
    subject = f"{name}: {len(broken)} drafts are well formed"
    return Finding("drafter", subject, float(broken.any(1).sum()), 1.0, note)


# ------------------------------------------------------------------------------ the distribution


def _distribution(name: str, rounds: list[Observation]) -> Finding:
    """Chi-square of the quantiles: of each node, and of all together."""
    quantiles = np.concatenate([each.quantiles for each in rounds])
    uniform = np.full(_BINS, 1 / _BINS)
    tried = []
    for order, by in enumerate(_ORDERS):
        nodes = quantiles[..., order]
        columns = {f"node {node}": column for node, column in enumerate(nodes.T)}
        for words, column in {"all nodes": nodes.ravel(), **columns}.items():
            column = column[~np.isnan(column)]
            if len(column) >= _FEW:
                counts = np.bincount((column * _BINS).astype(int), minlength=_BINS)
                note = f"worst of {words}, draws by their quantile, {by}"
                tried.append((excess(counts, uniform), note))
    count = int((~np.isnan(quantiles[..., 0])).sum())
    subject = f"{name}: {count} draws follow the recorded distribution"
    no_draws = (float("nan"), "too few draws to tell")
    measured, note = max(tried, key=operator.itemgetter(0), default=no_draws)
    return Finding("drafter", subject, measured, 1.0, note)


def _replayed(name: str, rounds: list[Observation]) -> Iterator[Finding]:
    """Compare each draw with its replay from the record, if its noise is jspec.core.sampling's.

    A distribution that is rounded after the draw changes one draw in thousands, which no count
    would show.
    """
    misses = np.concatenate([each.misses for each in rounds])
    off_token = np.concatenate([1 - each.probability for each in rounds])[..., None]
    drawn = ~np.isnan(misses)
    expected = np.where(drawn, off_token, 0).sum(0)  # [N, 2], misses if the noise were another
    counts = (misses > _TOLERANCE).sum(0)
    recognised = (expected > 20) & (counts < _RECOGNISED * expected)
    if recognised.any():
        fewest = np.where(recognised, counts, np.iinfo(counts.dtype).max).min(1)
        nodes = recognised.any(1)
        total = int(drawn[:, nodes, 0].sum())
        subject = f"{name}: {total} draws are those that the record gives with their noise"
        off = int(fewest[nodes].sum())
        note = f"{off} differ, though their noise is that of jspec.core.sampling" if off else ""
        yield Finding("drafter", subject, float(off), 1.0, note)


# ------------------------------------------------------------------------------------- the noise


@dataclasses.dataclass(frozen=True, eq=False)
class _Event:
    words: str
    time: tuple[int, int, int]  # round; draft or verifier; index of the node or uniform
    values: np.ndarray  # [n] in [0, 1), NaN where it did not happen
    uniform: bool  # whether it must be uniform given everything before it


def _events(index: int, seen: Observation) -> Iterator[_Event]:
    """The events of one round, in the order of ``time``."""
    for node in range(seen.valid.shape[1]):
        valid, quantiles = seen.valid[:, node], seen.quantiles[:, node, 1]
        if valid.any() and not valid.all():
            values = np.where(valid, 0.25, 0.75)
            yield _Event(f"whether node {node} is valid", (index, 0, node), values, False)
        if (~np.isnan(quantiles)).sum() >= _FEW:
            yield _Event(f"the draw of node {node}", (index, 0, node), quantiles, True)
    count = seen.uniforms.shape[1]
    for node in range(1, count):  # the root's uniform is not used
        words = f"the uniform of node {node}"
        yield _Event(words, (index, 1, node), seen.uniforms[:, node], True)
    for node in range(1, count):
        if (~np.isnan(seen.residual[:, node])).sum() >= _FEW:
            words = f"the residual's draw from the distribution of node {node}"
            yield _Event(words, (index, 1, count), seen.residual[:, node], True)


def _noise(name: str, rounds: list[Observation]) -> Finding:
    """Chi-square of every later event given every earlier one."""
    events = [event for index, seen in enumerate(rounds) for event in _events(index, seen)]
    counts = _pair_counts([event.values for event in events])
    tried = []
    for (i, first), (j, second) in itertools.permutations(enumerate(events), 2):
        table = counts[i, :, j]
        if second.uniform and first.time < second.time and table.sum() >= _FEW:
            probs = table.sum(1, keepdims=True) / table.sum() / _COARSE_BINS
            measured = excess(table.ravel(), np.repeat(probs, _COARSE_BINS, 1).ravel())
            later = " a round later" * (first.time[0] < second.time[0])
            tried.append((measured, f"worst: {first.words}, then {second.words}{later}"))
    if not tried:
        raise ValueError(
            f"num_drafts is too small for {name}: no two of its draws were made in {_FEW} rounds; "
            "raise it."
        )
    measured, note = max(tried)
    subject = f"{name}: draws are independent of everything drawn before"
    return Finding("drafter", subject, measured, 1.0, note)


def _pair_counts(columns: list[np.ndarray]) -> np.ndarray:
    """Counts of every two columns in coarse bins, over rows that have both: [C, 8, C, 8]."""
    values = np.stack(columns, 1)  # [n, C]
    bins = np.where(np.isnan(values), -1, values * _COARSE_BINS).astype(int)
    one_hot = (bins[..., None] == np.arange(_COARSE_BINS)).astype(np.float32)
    one_hot = one_hot.reshape(len(one_hot), -1)
    size = len(columns)
    return (one_hot.T @ one_hot).reshape(size, _COARSE_BINS, size, _COARSE_BINS)
