"""The engine of an ``LLM``, which serves all of its callers, and the counts of their requests."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from jax.sharding import Mesh

from jspec.api import metrics, requests
from jspec.api.requests import GenerationRequest
from jspec.core.logprobs import Mode, Scoring
from jspec.core.types import Params
from jspec.engine.engine import Engine
from jspec.engine.launches import Launch
from jspec.engine.loop import init_shared
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.programs import Programs
from jspec.engine.sequence import EngineSequence
from jspec.engine.sequences import SequenceParams
from jspec.sharding import mesh as mesh_lib
from jspec.util.interrupts import Uninterrupted

_log = logging.getLogger(__name__)

OnLaunch = Callable[[Launch], None]


class Runtime:
    """The engine of a plan, and the counts of all requests.

    Several threads may use it. They take turns, and a step serves the sequences of all of them.

    Args:
      plan: static.
      params: weights.
      num_slots: sequences that run together.
      capacity: longest sequence, prompt included.
      pool: pages of the KV caches, if they have any.
      profile: what the first programs are compiled for.
      mode: of the scores that requests ask for.
      max_logprobs: most scored tokens of a position.
      mesh: the devices of the weights; None for one.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        *,
        num_slots: int,
        capacity: int,
        pool: Pool | None,
        profile: Profile,
        mode: Mode,
        max_logprobs: int,
        mesh: Mesh | None = None,
    ):
        self.plan, self.pool, self._mesh = plan, pool, mesh
        self._mode, self._max_logprobs = mode, max_logprobs
        # Locks in C: Ctrl-C never comes between taking one and the block that releases it.
        self._lock = threading.Lock()  # guards the engine
        self._line = threading.Lock()  # of those that go before the next step
        self._num_steps = 0
        self._observers: list[OnLaunch] = []
        self._num_pins = 0
        with mesh_lib.on(mesh):
            self._engine = Engine(
                plan,
                params,
                num_slots=num_slots,
                capacity=capacity,
                profile=profile,
                pool=pool,
                on_launch=self._see,
                is_pinned=False,
            )
        self._counting = threading.Lock()
        self._counts = metrics.Counts.none(plan.drafter.max_depth)
        self._seconds = 0.0
        self._num_prompt_tokens = self._num_preemptions = 0

    # ------------------------------------------------------------------------ requests of callers

    def submit(
        self,
        batch: Sequence[GenerationRequest],
        *,
        rounds: int | None = None,
        priority: int = 0,
    ) -> None:
        """Submit all sequences of a batch; if one is refused, those before it are aborted.

        Args:
          batch: its requests get their ``tickets``.
          rounds: as of ``Engine.submit``.
          priority: as of ``Engine.submit``.

        Raises:
          ValueError: a sequence does not fit the engine.
        """
        scoring, tickets = self.scoring_of(batch), []
        with self._line, self._lock, Uninterrupted():
            engine = self._engine
            try:
                for request in batch:
                    for sequence in request.sequences:
                        ticket = engine.submit(
                            sequence,
                            rounds=rounds,
                            scoring=scoring,
                            priority=priority,
                            cache_salt=request.prompt.cache_salt,
                            is_checked=True,  # by the resolver, in a thread of its own
                        )
                        tickets.append(ticket)
            except BaseException:
                for ticket in tickets:
                    engine.abort(ticket)
                raise
            begin = 0
            for request in batch:  # only now, as another thread may read the requests
                end = begin + len(request.sequences)
                request.tickets, begin = tickets[begin:end], end
            self._num_prompt_tokens += sum(len(request.prompt.token_ids) for request in batch)

    def scoring_of(self, batch: Sequence[GenerationRequest]) -> Scoring | None:
        """Return the scores that a batch needs; None for none."""
        vocab_size = self.plan.target.vocab_size
        return requests.scoring_of(batch, vocab_size, self._max_logprobs, self._mode)

    def step(self) -> bool:
        """Run a step of the engine, or wait for the end of another thread's.

        Return whether this thread ran it.
        """
        seen = self._num_steps
        with self._line:  # Threads that step again and again would keep others from the engine.
            pass
        with self._lock, Uninterrupted():
            if self._num_steps != seen:
                return False
            try:
                self._run(self._engine.step)
            finally:
                self._num_steps += 1
        return True

    def abort(self, tickets: Sequence[EngineSequence]) -> None:
        """End sequences; their answers keep what was read."""
        if not tickets:
            return
        with self._line, self._lock, Uninterrupted():
            for ticket in tickets:
                self._engine.abort(ticket)
            self._run(self._engine.settle)

    def leave(self, batch: Sequence[GenerationRequest]) -> None:
        """Abort what still runs of a batch, and count what all of it did."""
        self.abort(running_of(batch))
        self.count(batch)

    def count(self, batch: Sequence[GenerationRequest]) -> None:
        """Count what the requests of a batch did. Each is counted once, at its end."""
        texts = [text for request in batch for text in request.transcripts]
        answers = [text.answer for text in texts if text.answer is not None]
        with self._counting:
            self._counts = sum(map(metrics.Counts.of, answers), self._counts)
            self._num_preemptions += sum(
                ticket.num_preemptions for request in batch for ticket in request.tickets
            )

    def run_alone(
        self, batch: Sequence[GenerationRequest], run: Callable[..., Any], **options: Any
    ) -> Any:
        """Run a batch through ``run``, a loop of its own; see ``LLM.run_one``."""
        with self._line, self._lock, Uninterrupted():
            begin = perf_counter()
            with mesh_lib.on(self._mesh):
                result, counts, self._engine.shared = run(
                    batch, self.plan, self._engine.params, self.shared, **options
                )
            with self._counting:
                self._seconds += perf_counter() - begin
                self._counts += counts
                self._num_prompt_tokens += sum(len(request.prompt.token_ids) for request in batch)
        return result

    # -------------------------------------------------------------------------------- the engine

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._engine.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return self._engine.num_running

    def pin(self, on_launch: OnLaunch | None) -> None:
        """Use all slots and the whole capacity from now on, until as many calls of ``unpin``.

        So all programs are the same, however many requests run.

        Args:
          on_launch: called with every launch that was read, as NumPy arrays, in the thread that ran
            the step. What it raises is logged.
        """
        with self._line, self._lock, Uninterrupted():
            self._num_pins += 1
            self._engine.admission.is_pinned = True
            if on_launch is not None:
                self._observers.append(on_launch)

    def unpin(self, on_launch: OnLaunch | None) -> None:
        """Take back a call of ``pin``."""
        with self._line, self._lock, Uninterrupted():
            self._num_pins -= 1
            self._engine.admission.is_pinned = self._num_pins > 0
            if on_launch is not None:
                self._observers.remove(on_launch)

    def warm_up(
        self, sequences: Sequence[SequenceParams], on_progress: Callable[[int, int], None]
    ) -> Programs:
        """Compile all basic programs and run some: nothing is counted, and nothing is learned.

        The KV cache has pages for all slots of the engine from then on, if memory permits. What
        runs ends first. ``on_progress`` is that of ``Programs.compile_basic``.
        """
        pool = self.pool
        with self._line, self._lock, Uninterrupted(), mesh_lib.on(self._mesh):
            engine = self._engine
            self._drain()
            if pool is not None:
                pool.fix(engine.num_slots * pool.blocks.pages_of(engine.capacity) + 1)
            counted = None if pool is None else (pool.blocks.queries, pool.blocks.hits)
            programs, shared = Programs(engine, self._mesh), engine.shared
            programs.compile_basic(on_progress)
            engine.on_launch, engine.shared = None, init_shared(self.plan)
            try:
                for sequence in sequences:
                    engine.warm_up([sequence], cache_salt="warm-up")
            finally:
                engine.on_launch, engine.shared = self._see, shared
            if pool is not None:
                pool.blocks.queries, pool.blocks.hits = counted
        return programs

    @property
    def shared(self) -> Any:
        """The drafter's state that outlives requests."""
        return self._engine.shared

    def use_shared(self, use: Callable[[Any], Any]) -> None:
        """Replace the drafter's shared state by what ``use`` returns for it; None keeps it."""
        with self._line, self._lock, Uninterrupted(), mesh_lib.on(self._mesh):
            fresh = use(self.shared)
            if fresh is not None:
                self._engine.shared = fresh

    def update_params(self, params: Params) -> Params:
        """Replace the weights, and return them on their devices; see ``jspec.engine.updates``."""
        with self._line, self._lock, Uninterrupted():
            self._engine.params = params
            return self._engine.params

    def reset_prefix_cache(self) -> None:
        """Drop the KV cache of past prompts."""
        with self._line, self._lock, Uninterrupted():
            if self.pool is not None:
                self.pool.blocks.clear_cache()

    def get_metrics(self, model: str) -> list[metrics.Metric]:
        """Return the counts of all requests that have ended, under vLLM's names."""
        labels = {"model_name": model, "engine": "0"}
        counted = {
            "prompt_tokens": self._num_prompt_tokens,
            "num_preemptions": self._num_preemptions,
            "prefix_cache_queries": 0 if self.pool is None else self.pool.blocks.queries,
            "prefix_cache_hits": 0 if self.pool is None else self.pool.blocks.hits,
        }
        counters = [
            metrics.Counter(f"vllm:{name}", labels, value) for name, value in counted.items()
        ]
        used = 0.0 if self.pool is None else self.pool.blocks.usage
        usage = metrics.Gauge("vllm:kv_cache_usage_perc", labels, used)
        return [*metrics.entries(self._counts, self._seconds, labels), *counters, usage]

    def _drain(self) -> None:
        while not self._engine.is_idle:
            self._run(self._engine.step)

    def _see(self, launch: Launch) -> None:
        """Call the observers, which are no part of any request."""
        for observe in self._observers:
            try:
                observe(launch)
            except Exception:
                _log.exception("on_launch failed")

    def _run(self, act: Callable[[], None]) -> None:
        """Use the engine in this thread's turn."""
        begin = perf_counter()
        try:
            with mesh_lib.on(self._mesh):
                act()
        finally:
            self._seconds += perf_counter() - begin


def running_of(batch: Iterable[GenerationRequest]) -> list[EngineSequence]:
    """Return the sequences of a batch that the engine has not ended."""
    return [ticket for request in batch for ticket in request.tickets if not ticket.finished]
