"""The search at one batch size: predict, measure the rounds of the most promising, predict again.

What was not measured yet is taken to be as cheap as it can be. So shapes are measured in the order
of what they may bring, and the search ends when the two best have been measured: nothing else can
be better, by the predictions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec.api.build import Build
from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.core.types import Params, Shared, Sharing
from jspec.engine.plan import Plan
from jspec.tools.bench.contenders import Ours
from jspec.tools.tune import clocks, prediction
from jspec.tools.tune.acceptance import Acceptance, Recorded, Round, extended
from jspec.tools.tune.clocks import Clock
from jspec.tools.tune.costs import Costs, RoundTime
from jspec.tools.tune.families import Candidate, Family, tree_sizes
from jspec.tools.tune.prediction import Passes
from jspec.tools.tune.requests import Workload, generate
from jspec.tools.tune.settings import Settings
from jspec.tools.tune.trees import best_trees

_ROWS_OF_TABLE = 12  # of the candidates that results name


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """What was recorded of a family.

    Attributes:
      rows: of each prompt.
      acceptance: where drafts have a shape.
    """

    rows: Sequence[Recorded]
    acceptance: Acceptance | None

    @property
    def is_enough(self) -> bool:
        """Whether any draft fitted into an answer: without one nothing can be predicted."""
        return any(row.rounds for row in self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A candidate in the search: its size, and the passes that it is expected to take."""

    candidate: Candidate
    depth: int
    size: int
    passes: Passes


class Search:
    """Candidates of one batch size, what is known of them, and the best two."""

    def __init__(
        self,
        families: Sequence[Family],
        known: Sequence[Known],
        work: Workload,
        settings: Settings,
        on_step: Callable[[str], None],
    ):
        self._families, self._known = families, known
        self._work, self._settings = work, settings
        self._words = lambda words: on_step(f"{work.case.words}: {words}")
        self._measured: dict[Candidate, RoundTime] = {}
        self._firsts: dict[int, float] = {}  # of first tokens, beyond the round
        self._learnt: dict[Candidate, Shared] = {}
        self._costs: dict[int, Costs] = {}
        self.entries: list[Entry] = []

    def run(self) -> list[Entry]:
        """The best, the runner-up and plain decoding, the best first, as far as predictions go."""
        self._begin()
        self.entries = [entry for family in self._families for entry in self._entries(family)]
        for _ in range(self._settings.max_programs):
            new = [e for e in self._ranked()[:2] if e.candidate not in self._measured]
            if not new:
                break
            self._measure(new[0])
        ranked = [e for e in self._ranked() if e.candidate in self._measured]
        return [*dict.fromkeys([*ranked[:2], self._plain])]

    def clocks(self, best: Sequence[Entry]) -> list[Clock]:
        """What times a call for one token, and rounds of each of the best."""
        self._last = [clock for entry in best for clock in self._rounds(entry, self._made(entry))]
        return [self._one_call, *self._last]

    def settle(self, best: Sequence[Entry], seconds: Sequence[float]) -> None:
        """Takes in what the ``clocks`` have shown in the same turns in which the best were run.

        All other times are brought to the speed that the machine had then.
        """
        call, *rounds = seconds
        pairs = list(zip(self._last, rounds, strict=True))
        plain = next(each for clock, each in pairs if clock.entry.candidate.family == 0)
        self._rescale(plain / self._costs[0].plain)
        for entry in best:
            self._learn(entry, [pair for pair in pairs if pair[0].entry is entry])
        self._call = call - plain

    def tokens_per_second(self, entry: Entry) -> float:
        """The prediction, of ``LLM.generate`` on all prompts."""
        return sum(self._lengths) / self._seconds(entry)

    def report(self) -> dict[str, Any]:
        """What was measured and predicted, for the results."""
        table = self._costs[0]
        lines = []
        for place, entry in enumerate(self._ranked()):
            measured = self._measured.get(entry.candidate)
            if place >= _ROWS_OF_TABLE and measured is None:
                continue
            lines.append(
                {
                    "name": entry.candidate.name,
                    "predicted_tokens_per_second": self.tokens_per_second(entry),
                    "predicted_acceptance_length": entry.passes.tokens_per_pass,
                    "round_ms": 1e3 * self._round_seconds(entry),
                    "round_was_measured": measured is not None,
                }
            )
        return {
            "prompts": len(self._work.prompts),
            "answer_tokens": sum(self._lengths),
            "pass_ms": dict(zip(table.sizes, [1e3 * s for s in table.passes], strict=True)),
            "plain_round_ms": 1e3 * table.plain,
            "call_ms": 1e3 * self._call,
            "candidates": lines,
        }

    def _begin(self) -> None:
        """Plain decoding: its texts, what a call, its rounds and passes over N nodes take."""
        plain, work, settings = self._families[0], self._work, self._settings
        made = plain.made(plain.given)
        llm = LLM(plain.target, None, dtype=plain.dtype, max_num_seqs=work.case.batch_size)
        self._words("plain decoding")
        self._said = Ours(llm, work.case, {"all": work.requests})().tokens
        self._lengths = [len(text) for text in self._said]
        batch = clocks.halfway(made.plan, made.params, work, self._said, ())
        most = max([2, *(self._largest(family) for family in self._families[1:])])
        sizes = sorted({most, *(2**power for power in range(most.bit_length()) if 2**power < most)})
        self._words("compiling passes over 1 to many nodes")
        passes = [clocks.TargetPasses(made.plan, made.params, batch, size) for size in sizes]
        rounds = clocks.Rounds(made.plan, made.params, work, self._said, ())
        runs = [
            clocks.first_tokens(made.plan, made.params, work, ()),
            clocks.Repeated(self._one_token(llm)),
            rounds,
            *passes,
        ]
        self._words("measuring passes over 1 to many nodes")
        first, call, one, *seconds = clocks.timed(runs, settings.repeats, settings.patience)
        # A call for one token: the prompts, a round, and what the host does.
        self._call, self._firsts[0] = call - one, first - one
        self._one_call = runs[1]
        blank = Costs(sizes, seconds, one, one)
        self._costs = {
            f.number: dataclasses.replace(blank, chains={}, trees={}) for f in self._families
        }
        self._plain_rounds = rounds

    def _one_token(self, llm: LLM) -> Callable[[], Any]:
        """A call of ``LLM.generate`` for one token of every row of the middle group."""
        asked = SamplingParams(
            temperature=self._work.case.temperature,
            max_tokens=1,
            seed=self._work.case.seed,
            detokenize=False,
        )
        some = [{"prompt_token_ids": self._work.prompts[index]} for index in self._work.middle]
        return lambda: llm.generate(some, asked)

    def _largest(self, family: Family) -> int:
        """Nodes of the largest draft of a family."""
        if family.depth is None:
            return family.made(family.given).plan.drafter.tree_size
        trees = self._settings.max_tree_size if family.takes_trees else 0
        return max(family.depth + 1, trees)

    def _entries(self, family: Family) -> list[Entry]:
        """The candidates of a family; none where too little is known of it."""
        if family.number == 0:
            nothing = Recorded([Round((), drafted=False)], by_position=False)
            passes = prediction.play(
                [nothing] * len(self._lengths), None, self._lengths, self._work.groups
            )
            entry = Entry(Candidate(0, family.name, family.given, None), 0, 1, passes)
            plain = self._costs[0].plain
            self._measured[entry.candidate] = RoundTime(plain, plain)
            return [entry]
        known = self._known[family.number]
        if not known.is_enough:
            return []
        rows = known.rows[: len(self._lengths)]
        play = lambda tree: prediction.play(rows, tree, self._lengths, self._work.groups)
        if family.depth is None:
            drafter = family.made(family.given).plan.drafter
            candidate = family.probe
            return [Entry(candidate, drafter.max_depth, drafter.tree_size, play(candidate.tree))]
        chances = known.acceptance.chances
        random = np.random.default_rng(self._settings.seed)
        rows = [extended(row, chances, random) for row in rows]
        found = {depth: family.chain(depth) for depth in range(1, family.depth + 1)}
        shapes = dict.fromkeys(found.values())
        for depth in range(2, family.depth + 1) if family.takes_trees else ():
            trees = best_trees(chances[:depth], self._settings.max_tree_size)
            for size in tree_sizes(self._settings.max_tree_size):
                if trees.tokens[size] > -np.inf:
                    shapes[family.tree(trees.of_size(size))] = None
        return [
            Entry(each, each.tree.max_depth, each.tree.size, play(each.tree)) for each in shapes
        ]

    def _made(self, entry: Entry) -> Build:
        return self._families[entry.candidate.family].made(entry.candidate.config)

    def _measure(self, entry: Entry) -> None:
        """Times rounds of a candidate beside plain ones, and the prompts of its family."""
        candidate, settings, made = entry.candidate, self._settings, self._made(entry)
        self._words(f"compiling and measuring rounds of {candidate.name}")
        if isinstance(made.plan.drafter, Sharing):  # drafts of its own shape teach it other things
            answers, self._learnt[candidate] = generate(made.plan, made.params, self._work)
            passes = prediction.counted(answers, self._work.groups)
            place = self.entries.index(entry)
            entry = self.entries[place] = dataclasses.replace(entry, passes=passes)
        own = self._rounds(entry, made)
        runs = [self._plain_rounds, *own]
        if is_new := candidate.family not in self._firsts:
            shared = self._learnt.get(candidate, ())
            runs.append(clocks.first_tokens(made.plan, made.params, self._work, shared))
        plain, *seconds = clocks.timed(runs, settings.repeats, settings.patience)
        # Beside plain rounds of the same minutes: the machine may have become slower since.
        steady = [self._costs[0].plain / plain * each for each in seconds]
        self._learn(entry, list(zip(own, steady, strict=False)))
        if is_new:
            self._firsts[candidate.family] = steady[-1] - self._measured[candidate].without

    def _rounds(self, entry: Entry, made: Build) -> list["_Clock"]:
        """Its clocks: rounds as they come, and those without a draft.

        A method that learns from answers has learnt from them.
        """
        shared = self._learnt.get(entry.candidate, ())
        # The last round of a text teaches such a method: it takes longer than others.
        both = entry.depth and not isinstance(made.plan.drafter, Sharing)
        return [
            _Clock(made.plan, made.params, self._work, self._said, shared, entry, bare)
            for bare in ((False, True) if both else (False,))
        ]

    def _rescale(self, factor: float) -> None:
        """Brings all that was measured to the speed that the machine has now."""
        for table in self._costs.values():
            table.rescale(factor)
        self._measured = {which: time.scaled(factor) for which, time in self._measured.items()}
        self._firsts = {family: seconds * factor for family, seconds in self._firsts.items()}

    def _learn(self, entry: Entry, pairs: Sequence[tuple["_Clock", float]]) -> None:
        """Takes in the seconds that a candidate's clocks have shown."""
        candidate, table = entry.candidate, self._costs[entry.candidate.family]
        (clock, seconds), *bare = pairs
        if candidate.family == 0:
            self._measured[candidate] = RoundTime(seconds, seconds)
            return
        measured = table.times(seconds, clock.drafted, bare[0][1] if bare else None, entry.size)
        self._measured[candidate] = measured
        table.learn(entry.depth, entry.size, measured)

    @property
    def _plain(self) -> Entry:
        return next(entry for entry in self.entries if entry.candidate.family == 0)

    def _ranked(self) -> list[Entry]:
        return sorted(self.entries, key=self._seconds)

    def _seconds(self, entry: Entry) -> float:
        """What all prompts are predicted to take."""
        more = self._firsts.get(entry.candidate.family, self._firsts[0]) - self._firsts[0]
        # Differences of clocks: what a busy machine makes of them may be less than nothing.
        calls = len(self._work.groups) * max(self._call + more, 0.0)
        times = self._times(entry)
        return calls + entry.passes.drafted * times.with_draft + entry.passes.plain * times.without

    def _times(self, entry: Entry) -> RoundTime:
        """What its rounds take, as far as is known."""
        measured = self._measured.get(entry.candidate)
        if measured is not None:
            return measured
        return self._costs[entry.candidate.family].expected(entry.depth, entry.size)

    def _round_seconds(self, entry: Entry) -> float:
        """Of a round, on average."""
        passes, times = entry.passes, self._times(entry)
        total = passes.drafted + passes.plain
        return (passes.drafted * times.with_draft + passes.plain * times.without) / total


class _Clock(clocks.Rounds):
    """Rounds of an entry."""

    def __init__(
        self,
        plan: Plan,
        params: Params,
        work: Workload,
        said: Sequence,
        shared: Shared,
        entry: Entry,
        bare: bool,
    ):
        super().__init__(plan, params, work, said, shared, bare=bare)
        self.entry = entry
