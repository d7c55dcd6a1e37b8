"""jspec as a contender."""

import time
from pathlib import Path

from benchmarks.measure import Sample
from benchmarks.workload import Case
from jspec import checkpoint
from jspec.drafters import METHODS
from jspec.generate import Row, generate_rows
from jspec.models.decoder import Decoder
from jspec.plan import Plan
from jspec.types import Params


class Ours:
    """The loaded models of one dtype. Programs compile at a case's first call."""

    def __init__(self, model: Path, draft: Path, dtype: str):
        self.config, self.params, _ = checkpoint.load_pretrained(model, dtype)
        self.draft_config, self.draft_params, _ = checkpoint.load_pretrained(draft, dtype)

    def generate(
        self, case: Case, prompts: list[list[int]], max_new_tokens: int, seed: int
    ) -> Sample:
        """All prompts, ``case.batch`` at a time, under the clock."""
        plan = Plan(Decoder(self.config), self._drafter(case))
        params = Params(self.params, self.draft_params if case.method == "draft_model" else None)
        answers = []
        start, cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(prompts), case.batch):
            rows = [
                Row(
                    tuple(prompt),
                    max_tokens=max_new_tokens,
                    temperature=case.temperature,
                    seed=seed,
                    stream=first + index,
                )
                for index, prompt in enumerate(prompts[first : first + case.batch])
            ]
            answers += generate_rows(plan, params, rows)
        tokens = [answer.tokens.tolist() for answer in answers]
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return Sample(seconds, cpu, tokens, passes=sum(answer.rounds for answer in answers))

    def _drafter(self, case: Case):
        num = case.num_speculative_tokens
        if case.method == "draft_model":
            return METHODS["draft_model"](self.draft_config, num)
        if case.method == "ngram":
            return METHODS["ngram"](num, prompt_lookup_min=1, prompt_lookup_max=case.ngram_max)
        return METHODS["none"]()
