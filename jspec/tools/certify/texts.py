"""Texts with and without speculation, compared token for token.

Both come of the one loop: plain decoding is its case without a draft. Where they part, rounding may
be to blame, since passes over one token and over several add up in another order, or an error is:
``rounding`` tells the two apart.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from jspec.core.types import Params, Shared
from jspec.drafters import NoDrafter
from jspec.engine.batch import MAX_NUM_SEQS, Answer, generate_sequences, generate_sharing, start
from jspec.engine.costs import CostTable
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify.report import Finding
from jspec.tools.certify.rounding import gap, plausible, scored
from jspec.util.buckets import bucket

_MOST_ROWS = 8  # of a pass that measures rounding
_SHOWN = 4  # partings in words


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where a text leaves that of plain decoding.

    Attributes:
      row: its number.
      place: tokens of the text before it.
      plain: the token of plain decoding, None where it has none.
      speculative: the other, None where there is none.
      logits: of the two, by a plain pass token by token.
      gap: how much the logits would have to change for the target to draw either.
      noise: how much they do change with the shape of a plain pass.
      most: how much rounding can change them at all.
      drawn: whether the two were drawn, not the likeliest.
    """

    row: int
    place: int
    plain: int | None
    speculative: int | None
    logits: tuple[float, float] = (float("nan"), float("nan"))
    gap: float = float("inf")
    noise: float = 0.0
    most: float = 0.0
    drawn: bool = False

    @property
    def ratio(self) -> float:
        """The gap in units of the noise; infinite where there is none, or it is no rounding."""
        return self.gap / self.noise if 0 < self.noise <= self.most else float("inf")

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.ratio < 1

    def words(self, name: Callable[[int], str]) -> str:
        """In one line."""
        if self.plain is None or self.speculative is None:
            longer = "speculative" if self.plain is None else "plain"
            return f"prompt {self.row}: only the {longer} text goes on after token {self.place}"
        verdict = "a near-tie" if self.is_near_tie else "an ERROR"
        if self.noise > self.most:
            verdict = (
                f"an ERROR: plain passes of several shapes differ by more than {self.most:.2g}"
            )
        sign = "<" if self.gap < self.noise else "not <"
        drawn = " with the noise of the draw" * self.drawn
        return (
            f"prompt {self.row}, token {self.place}: plain {name(self.plain)} (logit "
            f"{self.logits[0]:.5g}), speculative {name(self.speculative)} ({self.logits[1]:.5g}), "
            f"gap{drawn} {self.gap:.2g} {sign} {self.noise:.2g} of rounding: {verdict}"
        )


def texts(
    plan: Plan, params: Params, rows: Sequence[SequenceParams], *, name: Callable[[int], str] = str
) -> Finding:
    """Whether texts are those of plain decoding: of greedy rows, or of a rule that promises it.

    Args:
      plan: target, drafter and rule.
      params: weights.
      rows: what to continue, and how.
      name: of a token, for people.

    Returns:
      Of the check "text": the largest gap at which two texts part, in units of the noise; 0 where
      none do. The rest of a row is not compared then.

    Raises:
      ValueError: a row does not fit the model.
    """
    plain = Plan(plan.target, NoDrafter(), node_buckets=(1,))
    wanted = generate_sequences(plain, Params(params.target), rows)
    found, _ = generate_sharing(plan, params, rows, _priced(plan, params, rows))
    broken = [index for index, answer in enumerate(wanted) if answer.finish_reason == "error"]
    partings = [] if broken else list(_partings(plan, params, rows, wanted, found))
    total = sum(len(answer.tokens) for answer in wanted)
    left = sum(len(wanted[each.row].tokens) - each.place for each in partings)
    drawn = max(row.temperature for row in rows)
    how = f"temperature={drawn:g}" if drawn else "greedy"
    rule = plan.rule if isinstance(plan.rule, str) else plan.rule.name
    subject = (
        f"{rule}, {how}: {total - left} of {total} tokens behind {len(rows)} prompts are those of "
        "plain decoding"
    )
    partings.sort(key=lambda each: each.ratio, reverse=True)
    if broken:
        note = f"plain decoding of prompt {broken[0]} gives no token any weight: is a weight NaN?"
        return Finding("text", subject, float("nan"), 1.0, note)
    notes = [each.words(name) for each in partings[:_SHOWN]]
    if len(partings) > _SHOWN:
        ties = sum(each.is_near_tie for each in partings[_SHOWN:])
        notes.append(f"{len(partings) - _SHOWN} more, {ties} of them near-ties")
    worst = partings[0].ratio if partings else 0.0
    return Finding("text", subject, worst, 1.0, "\n".join(notes))


def _priced(plan: Plan, params: Params, rows: Sequence[SequenceParams]) -> Shared:
    """What the drafter keeps for all calls, and the costs by which it chooses lengths, if any."""
    shared = init_shared(plan)
    if not getattr(plan.drafter, "by_costs", False):
        return shared
    batch = start(plan, params, rows[:MAX_NUM_SEQS]).replace(shared=shared)
    return CostTable().price(plan, params, batch)


def _partings(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    wanted: Sequence[Answer],
    found: Sequence[Answer],
) -> Iterator[Parting]:
    """The first place of every row whose texts differ."""
    batch = bucket(min(max(len(rows), 2), _MOST_ROWS), smallest=2)
    for index, (row, plain, other) in enumerate(zip(rows, wanted, found, strict=True)):
        pairs = itertools.zip_longest(plain.tokens.tolist(), other.tokens.tolist())
        place, pair = next(
            ((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]), (0, None)
        )
        if pair is None:
            continue
        if None in pair:
            yield Parting(index, place, *pair)
            continue
        logits, noise = scored(
            plan.target, params, row, plain.tokens, plan.drafter.tree_size, batch
        )
        here = logits[place]
        least = gap(row, place, here, pair)
        heights = tuple(float(here[token]) for token in pair)
        most = plausible(logits, params)
        yield Parting(index, place, *pair, heights, least, noise, most, row.temperature > 0)


def with_the_targets_noise(plan: Plan) -> tuple[Plan, str]:
    """The plan under a rule by which the text at any temperature is that of plain sampling.

    Returns:
      The plan, and a remark if it is not what was asked for: its own where that promises it, else
      ``coupled``, or ``match`` where the drafter cannot share noise.
    """
    if plan.effective_rule.uniforms == "target":
        return plan, ""
    fields = {field.name for field in dataclasses.fields(plan.drafter)}
    name = type(plan.drafter).__name__
    if plan.drafter.proposal == "point" or "noise" in fields:
        return dataclasses.replace(plan, rule="coupled"), ""
    remark = (
        f"{name} has no field noise, so that rule 'coupled' cannot have it draw with the target's "
        "noise: sampled texts were compared under 'match', which accepts less."
    )
    return dataclasses.replace(plan, rule="match"), remark
