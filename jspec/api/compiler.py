"""Programs that an ``AsyncLLM`` compiles before the engine needs them."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jspec.api.llm import LLM
from jspec.api.requests import GenerationRequest
from jspec.api.sampling_params import SamplingParams
from jspec.core.logprobs import Scoring
from jspec.engine.programs import Programs
from jspec.engine.sequences import SequenceParams
from jspec.util import leaving

_THREADS = 2  # programs that are compiled at a time


class Compiler:
    """Compiles in threads what requests need, so that requests with other needs go on."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._programs: Programs | None = None  # after ``warm_up``
        # At the end of the process a thread in XLA must be waited for, or it aborts the process.
        self._threads = ThreadPoolExecutor(_THREADS, "jspec-compiler")
        self._has_closed = threading.Event()

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile the programs of numeric settings; see ``AsyncLLM.warm_up``."""
        ends = tuple(self._llm.resolver.eos_token_ids) or (0,)
        sequences = [
            SequenceParams((0, 0), max_tokens=2, stop_token_ids=ends, temperature=temperature)
            for temperature in (0.0, 0.7)
        ]
        self._programs = self._llm.runtime.warm_up(sequences, on_progress)

    def prepare(self, sampling_params: SamplingParams) -> Future[None]:
        """Compile in a thread what requests with these settings need, after ``warm_up``.

        Raises:
          RuntimeError: ``warm_up`` was not called.
        """
        if self._programs is None:
            raise RuntimeError("prepare follows warm_up; call warm_up first.")

        def compile() -> None:
            prompt = {"prompt_token_ids": [0]}
            self._compile(self._llm.resolver.resolve(prompt, sampling_params, will_run=False))

        return self._threads.submit(leaving.watched(compile, self._has_closed))

    async def wait_for_programs(self, batch: Sequence[GenerationRequest]) -> None:
        """Compile what a batch needs and no request before it has needed, after ``warm_up``."""
        if self._programs is not None and self._programs.may_lack(*self._settings_of(batch)):
            await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, batch)

    def may_run(self, batch: Sequence[GenerationRequest]) -> bool:
        """Return whether a batch may join what runs, and nothing will compile.

        Others may have joined since its programs were compiled.
        """
        return self._programs is None or self._programs.may_run(*self._settings_of(batch))

    def compile(self, batch: Sequence[GenerationRequest], on_end: Callable[[bool], None]) -> None:
        """Compile in a thread what a batch needs beside what runs.

        Then call ``on_end`` with whether that was possible.
        """

        def end(compiling: Future[None]) -> None:
            on_end(not compiling.cancelled() and compiling.exception() is None)

        self._threads.submit(self._compile, batch).add_done_callback(end)

    def close(self) -> None:
        """End what waits."""
        self._has_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, batch: Sequence[GenerationRequest]) -> None:
        self._programs.compile(*self._settings_of(batch))

    def _settings_of(
        self, batch: Sequence[GenerationRequest]
    ) -> tuple[list[SequenceParams], Scoring | None]:
        """Return a sequence of each request, as the others differ by streams, and the scoring."""
        return [each.sequences[0] for each in batch], self._llm.runtime.scoring_of(batch)
