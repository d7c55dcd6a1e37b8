"""One case of ``jspec bench``: its contenders in turns, and the figures of each."""

import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from jspec.api.build import Build
from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.engine.batch import SequenceParams, start
from jspec.engine.loading import LoadedModel
from jspec.tools.bench.contenders import (
    PEER_MODES,
    PLAIN,
    Case,
    Ours,
    Theirs,
    filled,
    peer_settings,
    sum_of,
)
from jspec.tools.bench.names import names_of, portable
from jspec.tools.bench.peer import PeerError
from jspec.tools.bench.settings import Settings
from jspec.tools.bench.split import split
from jspec.tools.bench.timing import Contender, Sample, race, ratios, spread


class CaseTable:
    """One case: its contenders, their samples, and the rows made of them."""

    def __init__(self, target: LoadedModel, settings: Settings, case: Case, requests, peer):
        self._settings, self._case = settings, case
        self._questions = {name: len(some) for name, some in requests.items()}
        self._requests = {name: filled(some, case.batch_size) for name, some in requests.items()}
        self._target, self._peer = target, peer
        self.failed: dict[str, str] = {}  # those of the peer that could not, and why
        self._builds: dict[str, tuple[dict | None, Build]] = {}
        self._first: dict[str, tuple[float, Sample]] = {}
        self._field: list[Contender] = []
        self._parts: dict[str, dict[str, Any]] = {}

    def run(self, on_step: Callable[[str], None]) -> None:
        """Warms everybody up and races them."""
        for name, run in self._contenders():
            on_step(f"{self._case.words}: compiling {name}")
            begin = time.perf_counter()
            try:
                run()
            except PeerError as error:
                self.failed[name] = str(error)
                continue
            first = time.perf_counter() - begin
            self._first[name] = first, run()
            self._field.append(Contender(name, run))
        on_step(f"{self._case.words}: measuring")
        race(self._field, self._settings.repeats, self._settings.patience)
        for each in self._field:
            if each.name in self._builds:
                on_step(f"{self._case.words}: taking {each.name} apart")
                made = self._builds[each.name][1]
                self._parts[each.name] = self._apart(each.run, made)

    def _contenders(self):
        configs = self._settings.configs
        for given, name in zip((None, *configs), (PLAIN, *names_of(configs)), strict=True):
            llm = LLM(
                self._target,
                given,
                dtype=self._settings.dtype,
                max_num_seqs=self._case.batch_size,
            )
            while name in self._builds:
                name += "'"
            self._builds[name] = given, llm.build  # its own: no network is opened twice
            yield name, Ours(llm, self._case, self._requests)
        for mode, name in PEER_MODES.items() if self._peer else ():
            same = peer_settings(mode, self._settings.configs)
            if same is None or (mode == "assisted" and self._settings.draft_folder is None):
                continue
            if mode == "eager" or self._case.batch_size == 1:  # all that transformers can
                eos = self._target.eos_token_ids
                yield name, Theirs(self._peer, mode, self._case, self._requests, same, eos)

    def rows(self) -> list[dict[str, Any]]:
        """One for each contender that has a sample; none where plain decoding has not."""
        field = [each for each in self._field if each.samples]
        if not field or field[0].name != PLAIN:
            return []
        return [self._row(each, field[0]) for each in field]

    def _row(self, each: Contender, plain: Contender) -> dict[str, Any]:
        first_call, sample = self._first[each.name]
        given, made = self._builds.get(each.name, (None, None))
        row: dict[str, Any] = {
            "batch_size": self._case.batch_size,
            "temperature": self._case.temperature,
            "name": each.name,
            "config": given and portable(given, self._settings.configs),
            "tokens_per_second": spread([s.num_tokens / s.seconds for s in each.kept]),
            "speedup": spread(ratios(each, plain)),
            "categories": self._categories(each, plain),
            "distinct_tokens": statistics.mean(len(set(text)) for text in sample.tokens),
            "first_call_seconds": first_call,
            "seconds": [s.seconds for s in each.samples],
            "quiet_samples": sum(s.quiet(each.limit) for s in each.samples),
        }
        if self._case.temperature == 0:
            pairs = zip(sample.tokens, self._first[PLAIN][1].tokens, strict=True)
            row["texts_equal_to_plain"] = sum(ours == theirs for ours, theirs in pairs)
            row["texts"] = len(sample.tokens)
        if made is None:
            return row | {"config": dict(each.run.settings)}
        counts = sum_of(list(each.run.counts.values()))
        row |= {
            "acceptance_length": counts.tokens_per_pass,
            "mean_acceptance_length": counts.mean_acceptance_length,
            "acceptance_per_position": list(counts.acceptance_per_pos),
        }
        for name, some in each.run.counts.items():
            row["categories"][name]["acceptance_length"] = some.tokens_per_pass
        return row | self._parts.get(each.name, {})

    def _categories(self, each: Contender, plain: Contender) -> dict[str, dict[str, Any]]:
        found = {}
        for name, some in self._requests.items():
            part = lambda contender, name=name: dataclasses.replace(
                contender, samples=[sample.parts[name] for sample in contender.samples]
            )
            own = part(each)
            found[name] = {
                "questions": self._questions[name],
                "requests": len(some),
                "tokens_per_second": own.median,
                "speedup": statistics.median(ratios(own, part(plain))),
            }
        return found

    def _apart(self, run: Ours, made: Build) -> dict[str, Any]:
        """Where the time goes, and what memory it takes; of the first questions."""
        some = [each for part in self._requests.values() for each in part][: self._case.batch_size]
        rows = [
            SequenceParams(
                each.token_ids,
                self._case.max_tokens,
                temperature=self._case.temperature,
                seed=self._case.seed + index,
                stream=0,
            )
            for index, each in enumerate(some)
        ]
        asked = [
            SamplingParams(
                temperature=self._case.temperature,
                max_tokens=self._case.max_tokens,
                ignore_eos=True,
                seed=self._case.seed + index,
                detokenize=False,
            )
            for index in range(len(some))
        ]
        prompts = [{"prompt_token_ids": each.token_ids} for each in some]
        parts = split(
            made.plan,
            made.params,
            rows,
            lambda: run.llm.generate(prompts, asked),
            lambda: run.llm.load_shared(None),
        )
        state = start(made.plan, made.params, rows).state
        return {
            "split_ms": {k: 1e3 * v for k, v in dataclasses.asdict(parts).items()},
            "memory_bytes": {
                "target": _bytes(made.params.target),
                "drafter": _bytes(made.params.drafter),
                "target_cache": _bytes(state.cache),
                "drafter_state": _bytes(state.memory),
                "peak": _peak_bytes(),
            },
        }


def _bytes(tree: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))


def _peak_bytes() -> int:
    """Most that was ever in use: of the device, or of this process where the device is a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
