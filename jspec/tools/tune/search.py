"""The search at one batch size: measure candidates until no neighbour of the best is faster.

Every method begins with a chain in the middle. From the fastest method on, each that is not much
slower is searched along three lines: K of the chain, the nodes of the best tree, and K of that
tree. A line is left as soon as a step is not faster. The best two and plain decoding then run in
turns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.api.llm import LLM
from jspec.tools.bench.contenders import Case, Ours, filled
from jspec.tools.bench.names import portable
from jspec.tools.bench.questions import Request
from jspec.tools.bench.run import acceptance_of, row_of
from jspec.tools.bench.timing import Contender, race
from jspec.tools.tune.families import Candidate, Family
from jspec.tools.tune.settings import SAMPLED_ANSWERS, TREE_STEP, Settings
from jspec.tools.tune.trees import best_trees

_FIRST_K = 4  # K of every method's first chain
_PROMISING = 0.7  # share of the best speed; a slower first chain ends a method's search
_SECONDS = 2.0  # a candidate is measured in as many turns as plain decoding needs for them


class Search:
    """The candidates of one batch size, and the samples of those that were measured."""

    def __init__(
        self,
        families: Sequence[Family],
        chances: Mapping[Family, np.ndarray],
        requests: Sequence[Request],
        case: Case,
        settings: Settings,
        on_step: Callable[[str], None],
    ):
        self._families, self._chances, self._case = families[1:], chances, case
        self._requests = {"all": prompts_of(requests, case)}
        self._settings = settings
        self._on_step = lambda words: on_step(f"{case.title}: {words}")
        self._plain = Candidate(families[0])
        # Of the fastest two candidates, besides plain decoding; programs take memory.
        self._runs: dict[Candidate, Ours] = {}
        self._rows: dict[Candidate, dict[str, Any]] = {}
        self._ended_early = False

    def run(self) -> dict[str, Any]:
        """Search, compare the best in turns, and return the results of the batch size for JSON.

        Raises:
          KeyboardInterrupt: some finalist has no sample yet.
        """
        self._on_step("compiling plain decoding")
        self._plain_run = self._compiled(self._plain)
        self._turns = math.ceil(_SECONDS / self._plain_run().seconds)
        first = {family: self._first(family) for family in self._families}
        for family in sorted(self._families, key=lambda each: -self._speed(first[each])):
            if self._speed(first[family]) >= _PROMISING * max(
                map(_speedup_of, self._rows.values())
            ):
                self._climb(family, first[family])
        interrupted, field = False, self._finalists()
        self._on_step("running the best two in turns")
        try:
            race([*field.values()], self._settings.repeats, self._settings.patience)
        except KeyboardInterrupt:
            if not all(each.samples for each in field.values()):
                raise
            interrupted = True
        rows = [self._row(candidate, each, field[self._plain]) for candidate, each in field.items()]
        rows.sort(key=_speed_of, reverse=True)
        return {
            "batch_size": self._case.batch_size,
            "temperature": self._case.temperature,
            "prompts": len(self._requests["all"]),
            "speculative_config": rows[0]["speculative_config"],
            "winner": rows[0]["name"],
            "rows": rows,
            "candidates": sorted(self._rows.values(), key=_speedup_of, reverse=True),
            "ended_early": self._ended_early,
            "interrupted": interrupted,
        }

    def _first(self, family: Family) -> Candidate:
        """Return the candidate that a family begins with: the config as it is, or a chain."""
        if family.max_k is None:
            return Candidate(family)
        return family.chain(min(family.max_k, _FIRST_K))

    def _climb(self, family: Family, first: Candidate) -> None:
        """Measure the chains and trees of a family while they become faster."""
        if family.max_k is None:
            return
        depths = range(1, family.max_k + 1)
        chain = self._walk([family.chain(depth) for depth in depths], first)
        if family not in self._chances:
            return
        depth = chain.tree.max_depth
        largest = self._settings.max_tree_size
        sizes = [*range(TREE_STEP, largest, TREE_STEP), largest]
        trees = [self._tree(family, max(depth, 2), size) for size in sizes if size > depth + 1]
        best = self._walk([chain, *filter(None, trees)], chain)
        if best != chain:
            size = best.tree.size
            trees = [self._tree(family, depth, size) for depth in depths[1:]]
            self._walk([*dict.fromkeys(filter(None, trees))], best)

    def _walk(self, line: Sequence[Candidate], first: Candidate) -> Candidate:
        """Return the candidate where the speed along a line stops to grow, from ``first`` on."""
        best = line.index(first)
        for step in (1, -1):
            while 0 <= best + step < len(line):
                if self._speed(line[best + step]) <= self._speed(line[best]):
                    break
                best += step
        return line[best]

    def _tree(self, family: Family, depth: int, size: int) -> Candidate | None:
        """Return the best tree of that many nodes and at most that depth, if there is one."""
        best = best_trees(self._chances[family][:depth], size)
        return family.tree(best.of_size(size)) if np.isfinite(best.tokens[size]) else None

    def _speed(self, candidate: Candidate) -> float:
        """Return the speed-up of a candidate, measured at the first call; 0 after the last one."""
        if candidate not in self._rows:
            if len(self._rows) == self._settings.max_programs:
                self._ended_early = True
                return 0.0
            self._on_step(f"measuring {candidate.name}")
            run = self._runs[candidate] = self._compiled(candidate)
            plain = Contender(self._plain.name, self._plain_run)
            contender = Contender(candidate.name, run)
            race([plain, contender], min(self._turns, self._settings.repeats), 1)
            self._rows[candidate] = self._row(candidate, contender, plain)
            self._runs = {each: self._runs[each] for each in self._ranked()[:2]}
        return _speedup_of(self._rows[candidate])

    def _ranked(self) -> list[Candidate]:
        return sorted(self._runs, key=lambda each: -_speedup_of(self._rows[each]))

    def _finalists(self) -> dict[Candidate, Contender]:
        runs = {each: self._runs[each] for each in self._ranked()}
        runs[self._plain] = self._plain_run
        return {each: Contender(each.name, run) for each, run in runs.items()}

    def _compiled(self, candidate: Candidate) -> Ours:
        family = candidate.family
        config = {**candidate.config, **family.opened}
        llm = LLM(
            family.target,
            config,
            dtype=family.dtype,
            max_num_seqs=self._case.batch_size,
            **self._settings.split,
        )
        run = Ours(llm, self._case, self._requests)
        run()
        return run

    def _row(self, candidate: Candidate, each: Contender, plain: Contender) -> dict[str, Any]:
        row = row_of(self._case, each, plain, {"all": len(self._requests["all"])})
        row |= acceptance_of(each.run, row["categories"])
        return row | {
            "speculative_config": candidate.config,
            "config": portable(candidate.config, self._settings.configs),
        }


def prompts_of(requests: Sequence[Request], case: Case) -> list[Request]:
    """Repeat requests until there is a full batch; a single random answer must not decide."""
    return filled(requests, case.batch_size, SAMPLED_ANSWERS if case.temperature else 0)


def _speed_of(row: dict[str, Any]) -> float:
    return row["tokens_per_second"]["median"]


def _speedup_of(row: dict[str, Any]) -> float:
    return row["speedup"]["median"]
