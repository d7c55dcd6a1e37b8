"""Programs that an ``AsyncLLM`` compiles before the engine needs them."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jspec.api.llm import LLM
from jspec.api.requests import GenerationRequest
from jspec.api.sampling_params import SamplingParams
from jspec.engine.programs import Programs
from jspec.engine.sequences import SequenceParams
from jspec.util import leaving

_THREADS = 2  # programs that are compiled at a time
_TYPICAL = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.02,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
)


class Compiler:
    """Compiles in threads what requests need, so that requests with other needs go on."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._programs: Programs | None = None  # after ``warm_up``
        self._prepared: tuple[SequenceParams, ...] = ()  # with grammars
        # At the end of the process a thread in XLA must be waited for, or it aborts the process.
        self._threads = ThreadPoolExecutor(_THREADS, "jspec-compiler")
        self._has_closed = threading.Event()

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile the programs of numeric settings; see ``AsyncLLM.warm_up``."""
        ends = tuple(self._llm.resolver.eos_token_ids) or (0,)
        options = dict(max_tokens=2, stop_token_ids=ends, **_TYPICAL.parameters)
        sequence = SequenceParams((0, 0), **options)
        self._programs = self._llm.runtime.warm_up(sequence, on_progress)

    def prepare(self, sampling_params: SamplingParams) -> Future[None]:
        """Compile in a thread what requests with these settings need, after ``warm_up``.

        Raises:
          RuntimeError: ``warm_up`` was not called.
        """
        if self._programs is None:
            raise RuntimeError("prepare follows warm_up; call warm_up first.")

        def compile() -> None:
            prompt = {"prompt_token_ids": [0]}
            (request,) = self._llm.resolver.resolve(prompt, sampling_params, will_run=False)
            if request.sequences[0].grammar is not None:
                self._prepared = (*self._prepared, request.sequences[0])
            self._compile([request])

        return self._threads.submit(leaving.watched(compile, self._has_closed))

    async def wait_for_programs(self, batch: Sequence[GenerationRequest]) -> None:
        """Compile what a batch needs and no request before it has needed, after ``warm_up``."""
        if self._programs is None:
            return
        scoring = self._llm.runtime.scoring_of(batch)
        if any(self._programs.may_lack(self.alike(each), scoring) for each in batch):
            await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, batch)

    def alike(self, request: GenerationRequest) -> list[SequenceParams]:
        """Return a sequence of a request, and those prepared that it shares programs with."""
        sequence = request.sequences[0]  # the others differ by streams
        return [sequence, *(self._prepared if sequence.grammar is not None else ())]

    def close(self) -> None:
        """End what waits."""
        self._has_closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, batch: Sequence[GenerationRequest]) -> None:
        scoring = self._llm.runtime.scoring_of(batch)
        for request in batch:
            self._programs.compile(self.alike(request), scoring)
