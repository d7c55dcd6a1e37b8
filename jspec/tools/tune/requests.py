"""The prompts of a batch size, how they run in groups, and what was said to them."""

import dataclasses
from collections.abc import Sequence

from jspec.core.types import Params, Shared
from jspec.engine import loading
from jspec.engine.batch import (
    Answer,
    Batch,
    SequenceParams,
    advance,
    filters_of,
    groups,
    read,
    start,
)
from jspec.engine.costs import CostTable
from jspec.engine.loading import LoadedModel
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.tools.bench.contenders import Case, filled
from jspec.tools.bench.questions import Request

_DRAWN_ANSWERS = 16


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts that fill whole groups of a batch size.

    Attributes:
      case: what is done with them.
      prompts: token ids; given again with other seeds, if there are too few.
      ends: ids that end a text.
    """

    case: Case
    prompts: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]

    @property
    def requests(self) -> list[Request]:
        """For ``jspec.tools.bench.contenders.Ours``, which gives the i-th the seed i after the case's."""
        return [Request("all", prompt) for prompt in self.prompts]

    def rows(self, said: Sequence[Sequence[int]] | None = None) -> list[SequenceParams]:
        """The rows as ``LLM`` makes them; with what was ``said`` of each answer behind the prompt.

        Texts end where they would have ended.
        """
        said = [()] * len(self.prompts) if said is None else said
        return [
            SequenceParams(
                (*prompt, *(int(token) for token in begun)),
                self.case.max_tokens - len(begun),
                temperature=self.case.temperature,
                stop_token_ids=self.ends,
                seed=self.case.seed + index,
            )
            for index, (prompt, begun) in enumerate(zip(self.prompts, said, strict=True))
        ]

    @property
    def groups(self) -> list[list[int]]:
        """Indices of those that run together, as ``LLM`` groups them."""
        return list(groups(self.rows(), self.case.batch_size))

    @property
    def middle(self) -> list[int]:
        """The group whose prompts are nearest to the mean length."""
        mean = sum(map(len, self.prompts)) / len(self.prompts)
        length = lambda group: sum(len(self.prompts[i]) for i in group) / len(group)
        return min(self.groups, key=lambda group: abs(length(group) - mean))


def workload(case: Case, made: Sequence[Request], target: LoadedModel, least: int = 0) -> Workload:
    """The prompts of ``made``, and as many of them once more as the last group lacks.

    ``least`` is how many there are to be. Where answers are drawn at random there are a few in any
    case, lest a single one decide.
    """
    least = max(least, _DRAWN_ANSWERS if case.temperature else 0)
    prompts = (request.token_ids for request in filled(made, case.batch_size, least))
    return Workload(case, tuple(prompts), loading.text_ends(target))


def generate(plan: Plan, params: Params, work: Workload) -> tuple[list[Answer], Shared]:
    """Every row's answer, and what a drafter has learnt of them that knew nothing before."""
    answers: dict[int, Answer] = {}
    rows, shared, costs = work.rows(), init_shared(plan), CostTable()
    for group in work.groups:
        batch = begun(plan, params, [rows[index] for index in group], rows, costs, shared)
        batch = advance(plan, params, batch)
        shared = batch.shared
        answers |= dict(zip(group, read(batch), strict=True))
    return [answers[index] for index in range(len(rows))], shared


def begun(
    plan: Plan,
    params: Params,
    some: Sequence[SequenceParams],
    rows: Sequence[SequenceParams],
    costs: CostTable,
    shared: Shared,
) -> Batch:
    """``some`` of the ``rows``, prompts taken in; priced, where the plan chooses by costs."""
    batch = start(plan, params, some, filters=filters_of(rows)).replace(shared=shared)
    return batch.replace(shared=costs.price(plan, params, batch))
