"""The contenders of jspec: an ``LLM`` and its requests under the clock."""

import dataclasses
import functools
import itertools
import operator
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.api.metrics import Counts
from jspec.api.sampling_params import SamplingParams
from jspec.tools.bench.questions import Request
from jspec.tools.bench.timing import Sample, joined

PLAIN = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings that all contenders of a table share."""

    batch_size: int  # requests that run together
    temperature: float  # 0 is greedy
    max_tokens: int  # most tokens of an answer
    seed: int = 0  # seed of all noise

    @property
    def title(self) -> str:
        """The case in a few words."""
        return title_of(self.batch_size, self.temperature)

    def sampling_params(self, index: int, **settings: Any) -> SamplingParams:
        """Return the settings of the request ``index``, which has a seed of its own."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed + index,
            detokenize=False,
            **settings,
        )


def title_of(batch_size: int, temperature: float) -> str:
    """Return the title of a table."""
    return f"batch {batch_size}, " + (f"temperature {temperature:g}" if temperature else "greedy")


def filled(requests: Sequence[Request], batch_size: int, least: int = 0) -> list[Request]:
    """Repeat requests until there are ``least``, and enough to run together.

    No others are asked twice: methods that learn from answers would recite the first one.
    """
    count = max(len(requests), least, batch_size)
    return list(itertools.islice(itertools.cycle(requests), count))


def by_category(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Return the requests of each category."""
    categories = defaultdict(list)
    for request in requests:
        categories[request.category].append(request)
    return dict(categories)


@dataclasses.dataclass(eq=False)
class Ours:
    """An ``LLM`` that answers all requests through its public API."""

    llm: LLM  # ``max_num_seqs`` is the case's batch size
    case: Case  # the settings
    requests: dict[str, list[Request]]  # by category
    # answers of the last run, by category
    counts: dict[str, Counts] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Sample:
        """Answer all requests, category by category, with no memory of earlier runs."""
        self.llm.load_shared(None)
        parts = {name: self._category(name, some) for name, some in self.requests.items()}
        return of_categories(parts)

    def _category(self, name: str, requests: list[Request]) -> Sample:
        prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
        params = [self.case.sampling_params(index) for index in range(len(prompts))]
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(prompts, params)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        answers = [output.outputs[0] for output in outputs]
        self.counts[name] = functools.reduce(
            operator.add,
            [counts_of(each.speculative_decoding_stats, len(each.token_ids)) for each in answers],
        )
        tokens = [each.token_ids for each in answers]
        return Sample(seconds, cpu, tokens, self.counts[name].num_passes)


def of_categories(parts: dict[str, Sample]) -> Sample:
    """Return the sample that the samples of all categories add up to."""
    return dataclasses.replace(joined(list(parts.values())), parts=parts)


def counts_of(stats: dict[str, Any], num_tokens: int) -> Counts:
    """Return the counts in one text's statistics."""
    histogram = stats["acceptance_histogram"]
    accepted = tuple(histogram.get(str(n), 0) for n in range(stats["num_spec_tokens"] + 1))
    # A pass emits the accepted tokens and one more.
    passes = num_tokens - stats["num_accepted_draft_tokens"]
    return Counts(accepted, stats["num_draft_tokens"], passes, num_tokens)
