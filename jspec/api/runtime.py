"""The engines of an ``LLM``, which serve all of its callers, and the counts of their requests."""

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from jspec.api import metrics, requests
from jspec.api.requests import GenerationRequest
from jspec.core.logprobs import Mode, Scoring
from jspec.core.types import Params
from jspec.engine.launches import Launch
from jspec.engine.pages import Pool
from jspec.engine.replicas import ReplicaPrograms, Replicas
from jspec.engine.sequence import EngineSequence
from jspec.engine.sequences import SequenceParams
from jspec.util.interrupts import Uninterrupted

_log = logging.getLogger(__name__)

OnLaunch = Callable[[Launch], None]


class Runtime:
    """The engines of a plan, and the counts of all requests.

    Several threads may use it. They take turns, and a step serves the sequences of all of them.

    Args:
      replicas: the engines.
      mode: of the scores that requests ask for.
      max_logprobs: most scored tokens of a position.
    """

    def __init__(self, replicas: Replicas, *, mode: Mode, max_logprobs: int):
        self.plan, self._replicas = replicas.plan, replicas
        self._mode, self._max_logprobs = mode, max_logprobs
        # Locks in C: Ctrl-C never comes between taking one and the block that releases it.
        self._lock = threading.Lock()  # guards the engines
        self._line = threading.Lock()  # of those that go before the next step
        self._num_steps = 0
        self._observers: list[OnLaunch] = []
        self._num_pins = 0
        for engine in replicas.engines:
            engine.on_launch = self._see
        self._counting = threading.Lock()
        self._counts = metrics.Counts.none(self.plan.drafter.max_depth)
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
        """Submit all sequences of a batch, or none if one is refused.

        Args:
          batch: its requests, which a resolver has checked, get their ``tickets``.
          rounds: as of ``Engine.submit``.
          priority: as of ``Engine.submit``.

        Raises:
          ValueError: a sequence does not fit the engine.
        """
        scoring = self.scoring_of(batch)
        every = [(each, one.prompt.cache_salt) for one in batch for each in one.sequences]
        with self._line, self._lock, Uninterrupted():
            tickets = self._replicas.submit(
                every, rounds=rounds, scoring=scoring, priority=priority
            )
            begin = 0
            for request in batch:  # only now, as another thread may read the requests
                end = begin + len(request.sequences)
                request.tickets, begin = tickets[begin:end], end
            self._num_prompt_tokens += sum(len(request.prompt.token_ids) for request in batch)

    def scoring_of(self, batch: Sequence[GenerationRequest]) -> Scoring | None:
        """Return the scores that a batch needs; None for none."""
        vocab_size = self.plan.target.vocab_size
        return requests.scoring_of(batch, vocab_size, self._max_logprobs, self._mode)

    def step(self) -> float:
        """Run a step of the engines, or wait for the end of another thread's.

        Return the share of the working engines whose step this thread ran to its end; 0 for none.
        """
        seen, share = self._num_steps, 0.0
        with self._line:  # Threads that step again and again would keep others from the engines.
            pass
        with self._lock, Uninterrupted():
            if self._num_steps == seen:
                try:
                    share = self._timed(self._replicas.step)
                finally:
                    self._num_steps += 1
        return share

    def abort(self, tickets: Sequence[EngineSequence]) -> None:
        """End sequences; their answers keep what was read."""
        if not tickets:
            return
        with self._line, self._lock, Uninterrupted():
            self._timed(functools.partial(self._replicas.abort, tickets))

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
            self._replicas.engines[0].runner.check_alone("a loop of its own, as of jspec trace,")
            alone = functools.partial(run, batch, **options)
            result, counts = self._timed(lambda: self._replicas.run_alone(alone))
            with self._counting:
                self._counts += counts
                self._num_prompt_tokens += sum(len(request.prompt.token_ids) for request in batch)
        return result

    # ------------------------------------------------------------------------------- the engines

    @property
    def num_engines(self) -> int:
        """The number of engines."""
        return len(self._replicas.engines)

    @property
    def pools(self) -> list[Pool]:
        """The pages of every engine; none for caches without pages."""
        return self._replicas.pools

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._replicas.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return self._replicas.num_running

    def pin(self, on_launch: OnLaunch | None) -> None:
        """Use all slots and the whole capacity from now on, until as many calls of ``unpin``.

        So all programs are the same, however many requests run.

        Args:
          on_launch: called with every launch that was read, as NumPy arrays, in the thread that ran
            the step. What it raises is logged.
        """
        with self._line, self._lock, Uninterrupted():
            self._num_pins += 1
            self._replicas.pin(True)
            if on_launch is not None:
                self._observers.append(on_launch)

    def unpin(self, on_launch: OnLaunch | None) -> None:
        """Take back a call of ``pin``."""
        with self._line, self._lock, Uninterrupted():
            self._num_pins -= 1
            self._replicas.pin(self._num_pins > 0)
            if on_launch is not None:
                self._observers.remove(on_launch)

    def warm_up(
        self, sequences: Sequence[SequenceParams], on_progress: Callable[[int, int], None]
    ) -> ReplicaPrograms:
        """Compile and run what is basic; see ``Replicas.warm_up``."""
        with self._line, self._lock, Uninterrupted():
            return self._replicas.warm_up(sequences, on_progress)

    def use_shared(self, use: Callable[[Any], Any]) -> None:
        """Replace the drafter's shared state; see ``Replicas.use_shared``."""
        with self._line, self._lock, Uninterrupted():
            self._replicas.use_shared(use)

    def update_params(self, params: Params) -> Params:
        """Replace the weights, and return those of the first engine."""
        with self._line, self._lock, Uninterrupted():
            self._replicas.update_params(params)
            return self._replicas.params

    def reset_prefix_cache(self) -> None:
        """Drop the KV cache of past prompts."""
        with self._line, self._lock, Uninterrupted():
            for pool in self.pools:
                pool.blocks.clear_cache()

    def get_metrics(self, model: str) -> list[metrics.Metric]:
        """Return the counts of all requests that have ended, of all engines, by vLLM's names."""
        labels = {"model_name": model, "engine": "0"}
        blocks = [pool.blocks for pool in self.pools]
        counted = {
            "prompt_tokens": self._num_prompt_tokens,
            "num_preemptions": self._num_preemptions,
            "prefix_cache_queries": sum(each.queries for each in blocks),
            "prefix_cache_hits": sum(each.hits for each in blocks),
        }
        counters = [
            metrics.Counter(f"vllm:{name}", labels, value) for name, value in counted.items()
        ]
        used = sum(each.usage for each in blocks) / max(len(blocks), 1)
        usage = metrics.Gauge("vllm:kv_cache_usage_perc", labels, used)
        return [*metrics.entries(self._counts, self._seconds, labels), *counters, usage]

    def _see(self, launch: Launch) -> None:
        """Call the observers, which are no part of any request."""
        for observe in self._observers:
            try:
                observe(launch)
            except Exception:
                _log.exception("on_launch failed")

    def _timed(self, act: Callable[[], Any]) -> Any:
        """Use the engines in this thread's turn; return what ``act`` returns."""
        begin = perf_counter()
        try:
            return act()
        finally:
            self._seconds += perf_counter() - begin


def running_of(batch: Iterable[GenerationRequest]) -> list[EngineSequence]:
    """Return the sequences of a batch that the engine has not ended."""
    return [ticket for request in batch for ticket in request.tickets if not ticket.finished]
