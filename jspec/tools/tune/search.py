"""The search at one batch size: predict, measure the most promising candidate, predict again.

Unmeasured candidates count as cheap as they can be. The search ends when the two best candidates
are measured, because by the predictions no other can then be faster. These and plain decoding then
run in turns.
"""

import dataclasses
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.api.llm import LLM
from jspec.core import static_trees
from jspec.tools.bench.contenders import Ours
from jspec.tools.bench.names import portable
from jspec.tools.bench.timing import Contender, race, ratios, spread
from jspec.tools.tune import clocks, prediction
from jspec.tools.tune.acceptance import Recording, extended, shares_state
from jspec.tools.tune.costs import Costs
from jspec.tools.tune.families import Candidate, Family
from jspec.tools.tune.prediction import Passes
from jspec.tools.tune.settings import TREE_STEP, Settings
from jspec.tools.tune.trees import best_trees
from jspec.tools.tune.workload import Workload

TOLERANCE = 0.1  # of predictions
_SPEED = "predicted_tokens_per_second"
_LISTED = 12  # unmeasured candidates beyond this rank are not reported


class Search:
    """The candidates of one batch size, with their predicted passes and measured costs."""

    def __init__(
        self,
        families: Sequence[Family],
        recordings: Sequence[Recording],
        work: Workload,
        settings: Settings,
        on_step: Callable[[str], None],
    ):
        self._work, self._settings, self._plain = work, settings, families[0].probe
        self._on_step = lambda words: on_step(f"{work.case.title}: {words}")
        self._on_step("plain decoding")
        llm = self._llm(self._plain)
        self._texts = Ours(llm, work.case, {"all": work.requests})().tokens
        self._lengths = [len(text) for text in self._texts]
        self._passes: dict[Candidate, Passes] = {}
        for family, recording in zip(families, recordings, strict=True):
            self._passes |= self._predicted_passes(family, recording)
        self._measure_plain(llm)

    def run(self) -> dict[str, Any]:
        """Search, verify and return the results of the batch size for JSON."""
        field, clock, interrupted = self._run_in_turns(self._best())
        turns = list(zip(*(each.samples for each in (*field.values(), clock)), strict=False))
        quiet = [turn for turn in turns if all(each.quiet(Contender.limit) for each in turn)]
        *columns, plain = zip(*(quiet or turns), strict=True)  # the same turns for all
        for each, samples in zip(field.values(), columns, strict=True):
            each.samples, each.limit = list(samples), math.inf
        # The speed of the machine may have changed since the rounds were measured.
        drift = statistics.median(each.seconds for each in plain) / self._costs.plain
        rows = self._rows(field, drift)
        return {
            "batch_size": self._work.case.batch_size,
            "temperature": self._work.case.temperature,
            "speculative_config": rows[0]["speculative_config"],
            "winner": rows[0]["name"],
            "predicted_winner": max(rows, key=operator.itemgetter(_SPEED))["name"],
            "within_tolerance": all(abs(row["error"]) <= TOLERANCE for row in rows),
            "rows": rows,
            "turns": len(turns),
            "quiet_turns": len(quiet),
            "interrupted": interrupted,
        } | self._report()

    def _best(self) -> list[Candidate]:
        """Return the predicted best, the runner-up and plain decoding, the fastest first."""
        for _ in range(self._settings.max_programs):
            unmeasured = [each for each in self._ranked()[:2] if each not in self._costs.rounds]
            if not unmeasured:
                break
            self._measure(unmeasured[0])
        ranked = [each for each in self._ranked() if each in self._costs.rounds]
        return [*dict.fromkeys([*ranked[:2], self._plain])]

    def _run_in_turns(
        self, candidates: Sequence[Candidate]
    ) -> tuple[dict[Candidate, Contender], Contender, bool]:
        """Run all prompts with each candidate, and the clock of plain rounds in the same turns.

        Return the samples of both, and whether Ctrl-C ended it.

        Raises:
          KeyboardInterrupt: some candidate has no sample yet.
        """
        field = {}
        for candidate in candidates:
            self._on_step(f"compiling {candidate.name}")
            run = Ours(self._llm(candidate), self._work.case, {"all": self._work.requests})
            run()
            field[candidate] = Contender(candidate.name, run)
        self._on_step("running the best two in turns")
        clock = Contender("plain rounds", self._plain_rounds)
        try:
            race([*field.values(), clock], self._settings.repeats, self._settings.patience)
        except KeyboardInterrupt:
            if not all(each.samples for each in (*field.values(), clock)):
                raise
            return field, clock, True
        return field, clock, False

    def _rows(self, field: Mapping[Candidate, Contender], drift: float) -> list[dict[str, Any]]:
        """Return a row for each candidate, the fastest first.

        Predicted speeds are divided by ``drift``, the time of a plain round now over that then.
        """
        plain_speed = self._prediction(self._plain, drift)[_SPEED]
        rows = []
        for candidate, each in field.items():
            predicted = self._prediction(candidate, drift)
            lengths = [sample.num_tokens / sample.passes for sample in each.usable]
            row = {
                "name": candidate.name,
                "speculative_config": dict(candidate.config),
                "config": portable(candidate.config, self._settings.configs),
                "tokens_per_second": spread(each.speeds),
                "speedup": spread(ratios(each, field[self._plain])),
                "acceptance_length": statistics.median(lengths),
                "predicted_speedup": predicted[_SPEED] / plain_speed,
                "error": predicted[_SPEED] / each.median - 1,
                "seconds": [sample.seconds for sample in each.samples],
            }
            rows.append(row | predicted)
        return sorted(rows, key=lambda row: -row["tokens_per_second"]["median"])

    def _prediction(self, candidate: Candidate, drift: float = 1.0) -> dict[str, float]:
        """Return the predicted speed of ``LLM.generate`` on all prompts, and acceptance length."""
        return {
            _SPEED: sum(self._lengths) / self._seconds(candidate) / drift,
            "predicted_acceptance_length": self._passes[candidate].tokens_per_pass,
        }

    def _report(self) -> dict[str, Any]:
        """Return the measurements and predictions for the results."""
        costs, lines = self._costs, []
        for rank, candidate in enumerate(self._ranked()):
            is_measured = candidate in costs.rounds
            if rank < _LISTED or is_measured:
                round_ms = {"round_ms": 1e3 * self._round_seconds(candidate)}
                line = {"name": candidate.name} | self._prediction(candidate) | round_ms
                lines.append(line | {"round_was_measured": is_measured})
        return {
            "prompts": len(self._work.prompts),
            "answer_tokens": sum(self._lengths),
            "pass_ms": dict(zip(costs.sizes, [1e3 * s for s in costs.passes], strict=True)),
            "plain_round_ms": 1e3 * costs.plain,
            "call_ms": 1e3 * costs.call,
            "candidates": lines,
        }

    def _llm(self, candidate: Candidate) -> LLM:
        family, size = candidate.family, self._work.case.batch_size
        config = {**candidate.config, **family.opened}
        return LLM(family.target, config, dtype=family.dtype, max_num_seqs=size)

    def _measure_plain(self, llm: LLM) -> None:
        """Time a call for one token, prefill, rounds, and passes over 1 to the most nodes."""
        work, build = self._work, self._plain.family.build(self._plain.config)
        batch = work.batch(build.plan, build.params, self._texts, ())
        largest = max(2, *(candidate.size for candidate in self._passes))
        sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest]
        sizes.append(largest)
        self._on_step("measuring plain decoding and passes over 1 to many nodes")
        self._plain_rounds, _ = clocks.rounds(build.plan, build.params, work, self._texts, ())
        one_token = dataclasses.replace(work.case, max_tokens=1)
        requests = [work.requests[index] for index in work.middle]
        runs = [
            clocks.whole(Ours(llm, one_token, {"all": requests})),
            clocks.prefill(build.plan, build.params, work),
            self._plain_rounds,
            *(clocks.passes(build.plan, build.params.target, batch, size) for size in sizes),
        ]
        call, self._plain_prefill, plain_round, *seconds = clocks.timed(runs, self._settings)
        self._costs = Costs(sizes, seconds, plain_round, call - plain_round)
        self._costs.measured(self._plain, plain_round, 0.0)

    def _predicted_passes(self, family: Family, recording: Recording) -> dict[Candidate, Passes]:
        """Return the candidates of a family; none if too little was recorded."""
        if recording.is_empty:
            return {}
        candidates = [family.probe]
        if family.max_k is not None:
            candidates = self._candidates(family, recording.acceptance.chances)
            random = np.random.default_rng(self._settings.seed)
            recording = extended(recording, family.probe.tree, random)
        lengths, slots = self._lengths, self._work.case.batch_size
        replay = lambda tree: prediction.replay(recording, tree, lengths, slots)
        return {candidate: replay(candidate.tree) for candidate in candidates}

    def _candidates(self, family: Family, chances: np.ndarray) -> list[Candidate]:
        """Return every chain, and for each depth and size the best static tree."""
        candidates = [family.chain(depth) for depth in range(1, family.max_k + 1)]
        largest = self._settings.max_tree_size if family.takes_trees else 0
        sizes = [size for size in (*range(TREE_STEP, largest, TREE_STEP), largest) if size]
        for depth in range(2, family.max_k + 1) if sizes else ():
            best = best_trees(chances[:depth], largest)
            candidates += [
                family.tree(static_trees.from_choices(best.of_size(size)))
                for size in sizes
                if np.isfinite(best.tokens[size])
            ]
        return list({each.tree: each for each in candidates}.values())  # a tree may be a chain

    def _measure(self, candidate: Candidate) -> None:
        build, work = candidate.family.build(candidate.config), self._work
        self._on_step(f"compiling and measuring rounds of {candidate.name}")
        shared = ()
        if shares_state(build.plan):  # its state depends on its own earlier drafts
            answers, shared = work.generate(build.plan, build.params)
            self._passes[candidate] = prediction.counted(answers, work.case.batch_size)
        clock, drafted = clocks.rounds(build.plan, build.params, work, self._texts, shared)
        runs = [self._plain_rounds, clock]
        if candidate.family not in self._costs.prefill:
            runs.append(clocks.prefill(build.plan, build.params, work))
        plain, *seconds = clocks.timed(runs, self._settings)
        # Relative to plain rounds of the same minutes: the speed of the machine may have changed.
        seconds, *prefill = [self._costs.plain / plain * each for each in seconds]
        self._costs.measured(candidate, seconds, drafted)
        if prefill:
            self._costs.prefill[candidate.family] = prefill[0] - self._plain_prefill

    def _ranked(self) -> list[Candidate]:
        return sorted(self._passes, key=self._seconds)

    def _seconds(self, candidate: Candidate) -> float:
        passes = self._passes[candidate]
        calls = len(self._work.groups) * self._costs.of_call(candidate.family)
        return calls + (passes.drafted + passes.plain) * self._round_seconds(candidate)

    def _round_seconds(self, candidate: Candidate) -> float:
        passes, seconds = self._passes[candidate], self._costs.of_round(candidate)
        total = passes.drafted * seconds.with_draft + passes.plain * seconds.without
        return total / (passes.drafted + passes.plain)
