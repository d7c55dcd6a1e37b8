"""Replicas: engines side by side in one process, which share the requests (data parallelism).

Each engine has devices, weights, slots, pages, a prefix cache and launches of its own, as the
engines of vLLM's ``data_parallel_size``. So a row never waits for a launch of another engine. A
text does not depend on its batch, and so not on the number of engines.
"""

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jspec.core.logprobs import Scoring
from jspec.core.types import Params
from jspec.engine import faults
from jspec.engine.block_table import BlockTable
from jspec.engine.engine import Engine
from jspec.engine.loop import init_shared
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.programs import Programs
from jspec.engine.sequence import EngineSequence
from jspec.engine.sequences import SequenceParams
from jspec.sharding import mesh as mesh_lib

_log = logging.getLogger(__name__)
_POLL_SECONDS = 1e-4  # between two looks at launches, when all engines have two of them
_MOST_UNREAD = 2  # launches of an engine: one that runs, and one behind it


class EngineReplica(NamedTuple):
    """An engine on the devices of a mesh; None for JAX's first device."""

    engine: Engine
    mesh: Mesh | None

    @property
    def is_done(self) -> bool:
        """True if ``Engine.read`` would wait for no launch."""
        unread = list(self.engine.unread)
        if self.engine.scheduler.ready:
            unread = unread[:-1]
        return not unread or unread[-1].launch.rounds.is_ready()


class Replicas:
    """Engines of one plan that share the requests. Several threads may not use it at once.

    Args:
      plan: static.
      params: weights, on the devices of the first mesh; the other engines get copies.
      meshes: the devices of each engine; None for JAX's first device.
      make_pool: returns the pages of an engine for its weights, or None; called on its devices.
      num_slots: most sequences that run together in an engine.
      capacity: longest history, prompt included.
      profile: settings that all launches have.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        *,
        meshes: Sequence[Mesh | None],
        make_pool: Callable[[Params], Pool | None],
        num_slots: int,
        capacity: int,
        profile: Profile,
    ):
        self.plan = plan
        self._replicas: list[EngineReplica] = []
        self._engine_of: weakref.WeakKeyDictionary[EngineSequence, Engine] = (
            weakref.WeakKeyDictionary()
        )
        for mesh in meshes:
            weights = mesh_lib.moved(params, mesh) if self._replicas else params
            with mesh_lib.on(mesh):
                engine = Engine(
                    plan,
                    weights,
                    num_slots=num_slots,
                    capacity=capacity,
                    profile=profile,
                    pool=make_pool(weights),
                    is_pinned=False,
                )
            self._replicas.append(EngineReplica(engine, mesh))

    @property
    def engines(self) -> list[Engine]:
        """The engines, in the order of their devices."""
        return [each.engine for each in self._replicas]

    @property
    def pools(self) -> list[Pool]:
        """The pages of every engine; none for caches without pages."""
        return [engine.pool for engine in self.engines if engine.pool is not None]

    @property
    def is_idle(self) -> bool:
        """True if no sequence waits or runs."""
        return all(engine.is_idle for engine in self.engines)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return sum(engine.num_waiting for engine in self.engines)

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return sum(engine.num_running for engine in self.engines)

    # ----------------------------------------------------------------------------------- sequences

    def submit(
        self,
        batch: Sequence[tuple[SequenceParams, str]],
        *,
        rounds: int | None,
        scoring: Scoring | None,
        priority: int,
    ) -> list[EngineSequence]:
        """Queue sequences, all or none, each at the engine that has the fewest.

        Among engines with as few, it is the one whose prefix cache has most of the prompt.

        Args:
          batch: sequences that ``check_fit`` has passed, each with its ``cache_salt``.
          rounds: as of ``Engine.submit``, like the others.

        Raises:
          ValueError: a sequence does not fit the engines.
        """
        tickets: list[EngineSequence] = []
        engines = self.engines
        loads = [engine.num_waiting + engine.num_running for engine in engines]
        try:
            for sequence, cache_salt in batch:
                index = self._choose(loads, sequence, cache_salt)
                ticket = engines[index].submit(
                    sequence,
                    rounds=rounds,
                    scoring=scoring,
                    priority=priority,
                    cache_salt=cache_salt,
                    is_checked=True,
                )
                loads[index] += 1
                tickets.append(ticket)
                self._engine_of[ticket] = engines[index]
        except BaseException:
            for ticket in tickets:
                self._engine_of[ticket].abort(ticket)
            raise
        return tickets

    def abort(self, tickets: Sequence[EngineSequence]) -> None:
        """End sequences that wait or run; their answers keep what was read."""
        for ticket in tickets:
            self._engine_of[ticket].abort(ticket)
        for each in self._replicas:
            self._run(each, each.engine.settle)

    def step(self) -> float:
        """Dispatch on all engines, then read the launches that are done, at least one.

        An engine has one launch ahead of the one that runs, so its device works while the host
        waits for others. Return the share of the working engines whose step has ended.
        """
        working = [each for each in self._replicas if each.engine.unread or not each.engine.is_idle]
        for each in working:
            if len(each.engine.unread) < _MOST_UNREAD and not each.engine.is_idle:
                self._run(each, each.engine.dispatch)
        done = working
        if len(working) > 1:
            while not (done := [each for each in working if each.is_done]):
                time.sleep(_POLL_SECONDS)
        for each in done:
            self._run(each, each.engine.read)
        return len(done) / max(len(working), 1)

    def _choose(self, loads: Sequence[int], sequence: SequenceParams, cache_salt: str) -> int:
        """Return the index of the engine for a sequence."""
        least = [index for index, load in enumerate(loads) if load == min(loads)]
        if len(least) == 1:
            return least[0]
        text = np.asarray(sequence.prompt, np.int32)

        def num_cached(index: int) -> int:
            table = BlockTable(self.engines[index].scheduler.pool, cache_salt)
            return table.num_cached_pages(text)

        return max(least, key=num_cached)

    def _run(self, replica: EngineReplica, act: Callable[[], None]) -> None:
        """Run a part of an engine's step; its failure ends the sequences of no other engine."""
        try:
            with mesh_lib.on(replica.mesh):
                act()
        except faults.INTERRUPTIONS:
            raise
        except BaseException as error:  # panics of Rust are no Exception
            if len(self._replicas) == 1:
                raise
            _log.error("a step of an engine failed", exc_info=error)
            scheduler = replica.engine.scheduler
            for sequence in scheduler.sequences:
                scheduler.fail(sequence, faults.of_sequence(error))

    # ------------------------------------------------------------------------------ of all engines

    def pin(self, is_pinned: bool) -> None:
        """Set whether batches always have all slots; see ``Engine``."""
        for engine in self.engines:
            engine.admission.is_pinned = is_pinned

    def warm_up(
        self, sequences: Sequence[SequenceParams], on_progress: Callable[[int, int], None]
    ) -> "ReplicaPrograms":
        """Compile all basic programs and run some: nothing is counted, and nothing is learned.

        Caches have pages for all slots from then on, if memory permits. What runs ends first.
        ``on_progress`` is that of ``Programs.compile_basic``.
        """
        while not self.is_idle:
            self.step()
        every = []
        for index, each in enumerate(self._replicas):

            def progress(done: int, count: int, before: int = index) -> None:
                on_progress(before * count + done, len(self._replicas) * count)

            with mesh_lib.on(each.mesh):
                every.append(_warmed_up(each, sequences, progress))
        return ReplicaPrograms(every)

    @property
    def params(self) -> Params:
        """The weights of the first engine."""
        return self.engines[0].params

    def update_params(self, params: Params) -> None:
        """Replace the weights of all engines; see ``updates.replace_params``."""
        for index, each in enumerate(self._replicas):
            weights = mesh_lib.moved(self.params, each.mesh) if index else params
            with mesh_lib.on(each.mesh):
                each.engine.params = weights

    def use_shared(self, use: Callable[[Any], Any]) -> None:
        """Replace the drafter's shared state in every engine by what ``use`` returns for it.

        None keeps it.
        """
        for each in self._replicas:
            with mesh_lib.on(each.mesh):
                fresh = use(each.engine.shared)
                if fresh is not None:
                    each.engine.shared = fresh

    def run_alone(
        self, run: Callable[[Plan, Params, Any], tuple[Any, Any, Any]]
    ) -> tuple[Any, Any]:
        """Call ``run`` on the devices of the first engine, with its weights and shared state.

        It returns two results, which are returned, and the shared state, which is consumed.
        """
        engine, mesh = self._replicas[0]
        with mesh_lib.on(mesh):
            result, counts, engine.shared = run(self.plan, engine.params, engine.shared)
        return result, counts


class ReplicaPrograms:
    """The programs of all engines, with the methods of ``Programs``."""

    def __init__(self, every: Sequence[Programs]):
        self._every = every

    def may_lack(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> bool:
        """Return whether ``compile`` would find anything; this is quick."""
        return any(programs.may_lack(sequences, scoring) for programs in self._every)

    def may_run(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> bool:
        """Return whether sequences may join those of any engine, and nothing will compile."""
        return all(programs.may_run(sequences, scoring) for programs in self._every)

    def compile(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> None:
        """Compile what runs ``sequences`` in any engine; several threads may call."""
        for programs in self._every:
            programs.compile(sequences, scoring)


def _warmed_up(
    replica: EngineReplica,
    sequences: Sequence[SequenceParams],
    on_progress: Callable[[int, int], None],
) -> Programs:
    """Return the programs of an engine that was warmed up on its devices."""
    engine, pool, programs = replica.engine, replica.engine.pool, Programs(*replica)
    if pool is not None:
        pool.fix(engine.num_slots * pool.blocks.pages_of(engine.capacity) + 1)
        queries, hits = pool.blocks.queries, pool.blocks.hits
    programs.compile_basic(on_progress)
    on_launch, shared = engine.on_launch, engine.shared
    engine.on_launch, engine.shared = None, init_shared(engine.plan)
    try:
        for sequence in sequences:
            engine.warm_up([sequence], cache_salt="warm-up")
    finally:
        engine.on_launch, engine.shared = on_launch, shared
    if pool is not None:
        pool.blocks.queries, pool.blocks.hits = queries, hits
    return programs
