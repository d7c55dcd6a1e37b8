"""The engines that run the requests of an ``LLM``, and the state that outlives them."""

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from jspec.api import metrics, requests
from jspec.api.requests import GenerationRequest
from jspec.core.logprobs import Mode, Scoring
from jspec.core.types import Params
from jspec.engine.engine import Engine, Ticket
from jspec.engine.loop import init_shared
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.programs import Programs
from jspec.engine.sequences import SequenceParams


class Runtime:
    """The engines of a plan, the drafter's shared state, and the counts of all requests.

    Several threads may use it; they take turns.

    Args:
      plan: static.
      params: weights.
      pool: pages of the KV caches, if they have any.
      profile: what the first programs are compiled for.
      mode: of the scores that requests ask for.
      max_logprobs: most scored tokens of a position.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        *,
        pool: Pool | None,
        profile: Profile,
        mode: Mode,
        max_logprobs: int,
    ):
        self.plan, self.pool = plan, pool
        self.profile = profile  # of the engines so far: those of other sizes need few programs more
        self._params, self._mode, self._max_logprobs = params, mode, max_logprobs
        self._lock = threading.Lock()
        self._shared = init_shared(plan)
        self._engines: dict[tuple[int, int], Engine] = {}
        self._counts = metrics.Counts.none(plan.drafter.max_depth)
        self._seconds = 0.0
        self._num_prompt_tokens = self._num_preemptions = 0

    def engine(self, num_slots: int, capacity: int, **options: Any) -> Engine:
        """Return a new engine with ``options`` of ``Engine``; its shared state is the runtime's."""
        options = dict(profile=self.profile, pool=self.pool) | options
        size = dict(num_slots=num_slots, capacity=capacity)
        return Engine(self.plan, self._params, shared=(), **size, **options)

    def submit(
        self,
        batch: Sequence[GenerationRequest],
        *,
        num_slots: int | None = None,
        capacity: int | None = None,
        engine: Engine | None = None,
        rounds: int | None = None,
        priority: int = 0,
    ) -> tuple[Engine, list[Ticket]]:
        """Submit all texts of a batch to ``engine``, or else to one of a certain size.

        ``rounds`` and ``priority`` are those of ``Engine.submit``. Idle engines of other sizes are
        dropped. If a text is refused, those before it are aborted.

        Raises:
          queue.Full: too many sequences wait in the engine.
          ValueError: a sequence does not fit the engine.
        """
        scoring, tickets = self.scoring_of(batch), []
        with self._lock:
            if engine is None:
                engine = self._engine_of(num_slots, capacity)
            try:
                for request in batch:
                    for sequence, text in zip(request.sequences, request.transcripts, strict=True):
                        options = dict(rounds=rounds, scoring=scoring, priority=priority)
                        options |= dict(listener=text.read, cache_salt=request.prompt.cache_salt)
                        tickets.append(engine.submit(sequence, **options))
            except BaseException:
                for ticket in tickets:
                    engine.abort(ticket)
                raise
            self.profile = engine.profile.without_functions()
            self._num_prompt_tokens += sum(len(request.prompt.token_ids) for request in batch)
        return engine, tickets

    def scoring_of(self, batch: Sequence[GenerationRequest]) -> Scoring | None:
        """Return the scores that a batch needs; None for none."""
        vocab_size = self.plan.target.vocab_size
        return requests.scoring_of(batch, vocab_size, self._max_logprobs, self._mode)

    def warm_up(
        self,
        engine: Engine,
        programs: Programs,
        sequence: SequenceParams,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Compile and run what a sequence needs: nothing is counted, and nothing is learned.

        The KV cache has pages for all slots of the engine from then on, if memory permits. No other
        request may run. ``on_progress`` is that of ``Programs.compile``.
        """
        pool = self.pool
        with self._lock:
            if pool is not None:
                pool.fix(engine.num_slots * pool.table.pages_of(engine.capacity) + 1)
            counted = None if pool is None else (pool.queries, pool.hits)
            on_launch, engine.on_launch = engine.on_launch, None
            programs.compile([sequence], on_progress=on_progress)
            engine.shared = init_shared(self.plan)
            engine.warm_up([sequence], cache_salt="warm-up")
            engine.on_launch = on_launch
            if pool is not None:
                pool.queries, pool.hits = counted
            self.profile = engine.profile.without_functions()

    def step(self, engine: Engine) -> None:
        """Run a step of an engine, which serves the requests of all threads."""
        self._run_on(engine, engine.step)

    def leave(
        self, engine: Engine, batch: Sequence[GenerationRequest], tickets: Sequence[Ticket]
    ) -> None:
        """Abort what still runs of a batch, and count what all of it did."""

        def end() -> None:
            for ticket in tickets:
                engine.abort(ticket)  # if the reader of a stream has left
            engine.settle()

        self._run_on(engine, end)
        texts = [text for request in batch for text in request.transcripts]
        answers = [text.answer for text in texts if text.answer is not None]
        with self._lock:
            self._counts = sum(map(metrics.Counts.of, answers), self._counts)
            self._num_preemptions += sum(ticket.num_preemptions for ticket in tickets)

    def run_alone(
        self, batch: Sequence[GenerationRequest], run: Callable[..., Any], **options: Any
    ) -> Any:
        """Run a batch through ``run``, a loop of its own; see ``LLM.run_one``."""
        with self._lock:
            begin = perf_counter()
            state = self.plan, self._params, self._shared
            result, counts, self._shared = run(batch, *state, **options)
            self._seconds += perf_counter() - begin
            self._counts += counts
            self._num_prompt_tokens += sum(len(request.prompt.token_ids) for request in batch)
        return result

    def get_metrics(self, model: str) -> list[metrics.Metric]:
        """Return the counts of all requests that have ended, under vLLM's names."""
        labels = {"model_name": model, "engine": "0"}
        counted = {
            "prompt_tokens": self._num_prompt_tokens,
            "num_preemptions": self._num_preemptions,
            "prefix_cache_queries": 0 if self.pool is None else self.pool.queries,
            "prefix_cache_hits": 0 if self.pool is None else self.pool.hits,
        }
        counters = [
            metrics.Counter(f"vllm:{name}", labels, value) for name, value in counted.items()
        ]
        used = 0.0 if self.pool is None else self.pool.usage
        usage = metrics.Gauge("vllm:kv_cache_usage_perc", labels, used)
        return [*metrics.entries(self._counts, self._seconds, labels), *counters, usage]

    def reset_prefix_cache(self) -> None:
        """Forget the KV cache of past prompts."""
        with self._lock:
            if self.pool is not None:
                self.pool.table.forget()

    def use_shared(self, use: Callable[[Any], Any]) -> None:
        """Replace the drafter's shared state by what ``use`` returns for it; None keeps it."""
        with self._lock:
            fresh = use(self._shared)
            self._shared = self._shared if fresh is None else fresh

    def _engine_of(self, num_slots: int, capacity: int) -> Engine:
        size = num_slots, capacity
        self._engines = {
            other: engine
            for other, engine in self._engines.items()
            if other == size or not engine.is_idle
        }
        if size not in self._engines:
            self._engines[size] = self.engine(*size)
        return self._engines[size]

    def _run_on(self, engine: Engine, act: Callable[[], None]) -> None:
        with self._lock:
            begin = perf_counter()
            engine.shared = self._shared
            try:
                act()
            finally:  # after Ctrl-C too: a launch has consumed the state before it
                self._shared = engine.shared
            self._seconds += perf_counter() - begin
