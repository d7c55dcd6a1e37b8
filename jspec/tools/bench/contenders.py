"""Who is measured: ``LLM``s of jspec, and transformers where it is installed."""

import dataclasses
import importlib.util
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.api import config
from jspec.api.llm import LLM
from jspec.api.metrics import Counts
from jspec.api.sampling_params import SamplingParams
from jspec.tools.bench.peer import Peer
from jspec.tools.bench.questions import Request
from jspec.tools.bench.timing import Sample

PLAIN = "autoregressive"
PEER_MODES = {
    "eager": "transformers",
    "assisted": "transformers, assisted",
    "prompt_lookup": "transformers, prompt lookup",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What all contenders of a table do.

    Attributes:
      batch_size: requests that run together.
      temperature: 0 is greedy.
      max_tokens: most tokens of an answer.
      seed: of all noise.
    """

    batch_size: int
    temperature: float
    max_tokens: int
    seed: int = 0

    @property
    def words(self) -> str:
        """The case in a few words."""
        drawn = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"batch {self.batch_size}, {drawn}"


def filled(requests: Sequence[Request], batch_size: int, least: int = 0) -> list[Request]:
    """At least so many requests, and as many of them once more as the last group lacks."""
    count = -(-max(len(requests), least) // batch_size) * batch_size
    return list(itertools.islice(itertools.cycle(requests), count))


def by_category(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """The requests of each category."""
    found = defaultdict(list)
    for request in requests:
        found[request.category].append(request)
    return dict(found)


@dataclasses.dataclass(eq=False)
class Ours:
    """An ``LLM`` through the door that its users take.

    Attributes:
      llm: with ``max_num_seqs`` of the case's batch.
      case: what is done.
      requests: by category.
      counts: of the last run, by category.
    """

    llm: LLM
    case: Case
    requests: dict[str, list[Request]]
    counts: dict[str, Counts] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Sample:
        """All requests, category by category, under the clock; nothing is known of a run before."""
        self.llm.load_shared(None)
        parts = {name: self._category(name, some) for name, some in self.requests.items()}
        return _whole(parts)

    def _category(self, name: str, requests: list[Request]) -> Sample:
        prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
        asked = [
            SamplingParams(
                temperature=self.case.temperature,
                max_tokens=self.case.max_tokens,
                seed=self.case.seed + index,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(prompts, asked)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        answers = [output.outputs[0] for output in outputs]
        self.counts[name] = sum_of(
            [_counts(each.speculative_decoding_stats, len(each.token_ids)) for each in answers]
        )
        return Sample(
            seconds, cpu, [each.token_ids for each in answers], self.counts[name].num_passes
        )


@dataclasses.dataclass(eq=False)
class Theirs:
    """transformers in a process of its own.

    Attributes:
      peer: with the target loaded.
      mode: one of ``PEER_MODES``.
      case: what is done.
      requests: by category.
      settings: of modes that speculate, as the worker's protocol has them.
      eos_token_ids: that end an answer.
    """

    peer: Peer
    mode: str
    case: Case
    requests: dict[str, list[Request]]
    settings: dict[str, int]
    eos_token_ids: tuple[int, ...]

    def __call__(self) -> Sample:
        """All requests under the clock; seconds are those inside the worker."""
        return _whole({name: self._category(some) for name, some in self.requests.items()})

    def _category(self, requests: list[Request]) -> Sample:
        total = Sample(0.0, 0.0, [[] for _ in requests])
        ordered = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))
        for first in range(0, len(ordered), self.case.batch_size):
            some = ordered[first : first + self.case.batch_size]
            answer = self.peer.generate(
                self.mode,
                [list(requests[index].token_ids) for index in some],
                max_new_tokens=self.case.max_tokens,
                temperature=self.case.temperature,
                seed=self.case.seed + first,
                eos_token_ids=list(self.eos_token_ids),
                threads=os.cpu_count(),
                **self.settings,
            )
            total.seconds += answer["seconds"]
            total.cpu_seconds += answer["cpu_seconds"]
            for index, tokens in zip(some, answer["tokens"], strict=True):
                total.tokens[index] = tokens
        return total


def peer_settings(mode: str, configs: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """What a mode of the peer is to do as the first of ours that does the same; None: none does."""
    method = {"assisted": "draft_model", "prompt_lookup": "ngram"}.get(mode)
    if method is None:
        return {}
    given = next((each for each in configs if each.get("method") == method), None)
    if given is None:
        return None
    ours = config.read(given).settings
    same = {"num_speculative_tokens": ours["num_speculative_tokens"]}
    return same | ({"ngram_max": ours["prompt_lookup_max"]} if method == "ngram" else {})


def peer_refusal(model: Any, dtype: str) -> str | None:
    """Why transformers cannot be measured beside, in the target's ``dtype``; None where it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if not isinstance(model, str | os.PathLike) or not Path(model).is_dir():
        return "the model is no local directory"
    return None if dtype in ("float32", "bfloat16") else f"it is not measured in {dtype}"


def sum_of(counts: Sequence[Counts]) -> Counts:
    """All counts together."""
    total = Counts.none(len(counts[0].accepted) - 1)
    for each in counts:
        total += each
    return total


def _counts(stats: dict[str, Any], num_tokens: int) -> Counts:
    """What one text's statistics count."""
    histogram = stats["acceptance_histogram"]
    accepted = tuple(histogram.get(str(n), 0) for n in range(stats["num_spec_tokens"] + 1))
    # A pass emits what it accepted and one token more.
    passes = num_tokens - stats["num_accepted_draft_tokens"]
    return Counts(accepted, stats["num_draft_tokens"], passes, num_tokens)


def _whole(parts: dict[str, Sample]) -> Sample:
    """The parts added up."""
    seconds = sum(part.seconds for part in parts.values())
    cpu = sum(part.cpu_seconds for part in parts.values())
    tokens = [row for part in parts.values() for row in part.tokens]
    counted = [part.passes for part in parts.values() if part.passes is not None]
    passes = sum(counted) if counted else None
    return Sample(seconds, cpu, tokens, passes, parts=parts)
