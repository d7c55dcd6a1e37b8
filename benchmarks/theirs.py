"""transformers as a contender, in a worker process."""

from collections.abc import Sequence

from benchmarks.workload import Case
from jspec.tools.bench.peer import Peer
from jspec.tools.bench.timing import Sample


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
