"""The check "text": texts with and without speculation, compared token for token.

Both texts come from the same loop; plain decoding is its case without a draft. Texts may diverge by
rounding, since passes over one token and over several sum in different orders, or by an error.
``rounding`` separates the two.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from jspec.core.types import Params
from jspec.drafters.none import NoDrafter
from jspec.engine.functional import Answer, generate_sequences, generate_sharing
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify.report import Finding
from jspec.tools.certify.rounding import gap, plausible, scored
from jspec.util.values import bucket

_MOST_ROWS = 8  # rows of a pass that measures rounding
_SHOWN = 4  # divergences in words


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The point where a text leaves that of plain decoding."""

    row: int  # index of the prompt
    position: int  # tokens of the text before it
    plain: int | None  # the token of plain decoding, None if it ends here
    speculative: int | None  # the other token, None if that text ends here
    # logits of the two, by a plain pass token by token
    logits: tuple[float, float] = (float("nan"), float("nan"))
    gap: float = float("inf")  # the change of logits with which the target would choose either
    noise: float = 0.0  # the change of logits between plain passes of different shapes
    most: float = 0.0  # the largest change that rounding can explain
    drawn: bool = False  # whether the two were drawn, not the likeliest
    sides: tuple[str, str] = ("plain", "speculative")  # what the two texts are

    @property
    def ratio(self) -> float:
        """The gap in units of the noise; infinite without noise, or if it is no rounding."""
        return self.gap / self.noise if 0 < self.noise <= self.most else float("inf")

    @property
    def is_near_tie(self) -> bool:
        """True if rounding explains the divergence."""
        return self.ratio < 1

    def words(self, name: Callable[[int], str]) -> str:
        """Describe the divergence in one line; ``name`` shows a token."""
        if self.plain is None or self.speculative is None:
            longer = self.sides[self.plain is None]
            return f"prompt {self.row}: only the {longer} text goes on after token {self.position}"
        verdict = "a near-tie" if self.is_near_tie else "an ERROR"
        if self.noise > self.most:
            verdict = (
                f"an ERROR: plain passes of several shapes differ by more than {self.most:.2g}"
            )
        sign = "<" if self.gap < self.noise else "not <"
        drawn = " with the noise of the draw" * self.drawn
        return (
            f"prompt {self.row}, token {self.position}: {self.sides[0]} {name(self.plain)} (logit "
            f"{self.logits[0]:.5g}), {self.sides[1]} {name(self.speculative)} "
            f"({self.logits[1]:.5g}), "
            f"gap{drawn} {self.gap:.2g} {sign} {self.noise:.2g} of rounding: {verdict}"
        )


def texts(
    plan: Plan, params: Params, rows: Sequence[SequenceParams], *, name: Callable[[int], str] = str
) -> Finding:
    """Compare texts with plain decoding, of greedy rows or of a rule that promises equal texts.

    The finding measures the largest gap at which two texts diverge, in units of the noise, or 0.
    The rest of a diverging row is not compared. ``name`` shows a token to people.

    Raises:
      ValueError: a row does not fit the model.
    """
    plain_plan = Plan(plan.target, NoDrafter(), node_buckets=(1,))
    plain = generate_sequences(plain_plan, Params(params.target), rows)
    speculative, _ = generate_sharing(plan, params, rows, init_shared(plan))
    return compared(plan, params, rows, (plain, speculative), ("plain", "speculative"), name)


def compared(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    answers: tuple[Sequence[Answer], Sequence[Answer]],
    sides: tuple[str, str],
    name: Callable[[int], str] = str,
    check: str = "text",
) -> Finding:
    """Return the finding on two answers to each row; ``sides`` are their names."""
    broken = [index for index, each in enumerate(answers[0]) if each.finish_reason == "error"]
    pairs = list(zip(*answers, strict=True))
    divergences = [] if broken else list(_divergences(plan, params, rows, pairs, sides))
    total = sum(len(answer.tokens) for answer in answers[0])
    not_compared = sum(len(answers[0][each.row].tokens) - each.position for each in divergences)
    temperature = max(row.temperature for row in rows)
    how = f"temperature={temperature:g}" if temperature else "greedy"
    how, those = (how, "of plain decoding") if check == "text" else (f"{how}, {sides[1]}", "alone")
    rule = plan.rule if isinstance(plan.rule, str) else plan.rule.name
    subject = (
        f"{rule}, {how}: {total - not_compared} of {total} tokens behind {len(rows)} prompts are "
        f"those {those}"
    )
    if broken:
        note = f"plain decoding of prompt {broken[0]} finds no possible token: is a weight NaN?"
        return Finding(check, subject, float("nan"), 1.0, note)
    divergences.sort(key=lambda each: each.ratio, reverse=True)
    notes = [each.words(name) for each in divergences[:_SHOWN]]
    if len(divergences) > _SHOWN:
        ties = sum(each.is_near_tie for each in divergences[_SHOWN:])
        notes.append(f"{len(divergences) - _SHOWN} more, {ties} of them near-ties")
    largest = divergences[0].ratio if divergences else 0.0
    return Finding(check, subject, largest, 1.0, "\n".join(notes))


def _divergences(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    answers: Sequence[tuple[Answer, Answer]],
    sides: tuple[str, str],
) -> Iterator[Divergence]:
    batch = bucket(min(max(len(rows), 2), _MOST_ROWS), smallest=2)
    for index, (row, (plain, speculative)) in enumerate(zip(rows, answers, strict=True)):
        pairs = itertools.zip_longest(plain.tokens.tolist(), speculative.tokens.tolist())
        differing = ((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        position, pair = next(differing, (0, None))
        if pair is None:
            continue
        if None in pair:
            yield Divergence(index, position, *pair, sides=sides)
            continue
        size = plan.drafter.tree_size
        logits, noise = scored(plan.target, params, row, plain.tokens, size, batch)
        here = logits[position]
        both = tuple(float(here[token]) for token in pair)
        change, most = gap(row, position, here, pair), plausible(logits, params)
        drawn = row.temperature > 0
        yield Divergence(index, position, *pair, both, change, noise, most, drawn, sides)


def with_target_noise(plan: Plan) -> tuple[Plan, str]:
    """Return the plan under a rule that gives the text of plain sampling at any temperature.

    The plan keeps its own rule if that promises the text. Otherwise it has ``coupled``, or
    ``match`` if the drafter cannot share noise; the second value remarks on that.
    """
    if plan.effective_rule.randomness == "target":
        return plan, ""
    fields = {field.name for field in dataclasses.fields(plan.drafter)}
    name = type(plan.drafter).__name__
    if plan.drafter.proposal == "deterministic" or "noise" in fields:
        return dataclasses.replace(plan, rule="coupled"), ""
    remark = (
        f"{name} has no field noise, so rule 'coupled' cannot set the target's noise: "
        "sampled texts were compared under 'match', which accepts less."
    )
    return dataclasses.replace(plan, rule="match"), remark
