"""jspec and transformers as contenders of ``benchmarks.latency``."""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.workload import Case
from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import loading
from jspec.tools.bench.peer import Peer
from jspec.tools.bench.timing import Sample


class Ours:
    """The loaded models of one dtype, and an ``LLM`` for each method and K.

    Programs compile at a case's first call.
    """

    def __init__(self, model: Path, draft: Path, dtype: str):
        self.target = loading.load(model, dtype)
        self.draft = loading.load(draft, dtype)
        self._llms: dict[tuple, LLM] = {}

    def generate(
        self, case: Case, prompts: list[list[int]], max_new_tokens: int, seed: int
    ) -> Sample:
        """Time the generation of all prompts, ``case.batch`` at a time."""
        llm = self._llm(case)
        settings = [
            SamplingParams(
                temperature=case.temperature,
                seed=seed + index,
                max_tokens=max_new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        wrapped = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = []
        start, cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(prompts), case.batch):
            part = slice(first, first + case.batch)
            outputs += llm.generate(wrapped[part], settings[part])
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        answers = [output.outputs[0] for output in outputs]
        tokens = [answer.token_ids for answer in answers]
        # A pass emits the accepted tokens and one more.
        accepted = sum(
            answer.speculative_decoding_stats["num_accepted_draft_tokens"] for answer in answers
        )
        return Sample(seconds, cpu, tokens, passes=sum(map(len, tokens)) - accepted)

    def _llm(self, case: Case) -> LLM:
        key = case.method, case.num_speculative_tokens, case.ngram_max
        if key not in self._llms:
            self._llms[key] = LLM(self.target, self._speculative_config(case))
        return self._llms[key]

    def _speculative_config(self, case: Case) -> dict | None:
        if case.method == "autoregressive":
            return None
        config = {"method": case.method, "num_speculative_tokens": case.num_speculative_tokens}
        if case.method == "draft_model":
            return config | {"model": self.draft}
        return config | {"prompt_lookup_min": 1, "prompt_lookup_max": case.ngram_max}


class Theirs:
    """A peer process for one dtype, and its settings.

    Attributes:
      threads: numbers of threads to try; the better one counts.
    """

    def __init__(self, peer: Peer, threads: Sequence[int], cpp_wrapper: bool):
        self.threads = tuple(threads)
        self._peer = peer
        self._cpp_wrapper = cpp_wrapper

    def generate(
        self,
        case: Case,
        mode: str,
        threads: int,
        prompts: list[list[int]],
        max_new_tokens: int,
        seed: int,
        count_passes: bool = False,
    ) -> Sample:
        """Generate all prompts, ``case.batch`` at a time; seconds are those inside the worker."""
        total = Sample(0.0, 0.0, [], passes=0 if count_passes else None)
        for first in range(0, len(prompts), case.batch):
            answer = self._peer.generate(
                mode,
                prompts[first : first + case.batch],
                max_new_tokens=max_new_tokens,
                temperature=case.temperature,
                seed=seed + first,
                threads=threads,
                num_speculative_tokens=case.num_speculative_tokens,
                ngram_max=case.ngram_max,
                cpp_wrapper=self._cpp_wrapper,
                count_passes=count_passes,
            )
            total.seconds += answer["seconds"]
            total.cpu_seconds += answer["cpu_seconds"]
            total.tokens += answer["tokens"]
            if count_passes:
                total.passes += answer["passes"] * len(answer["tokens"])
        return total
