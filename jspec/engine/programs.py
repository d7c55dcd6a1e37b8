"""Programs of an engine, compiled before their first use from the shapes of what they take.

JAX keeps a program with its function, its settings and the shapes. So a call finds what was
compiled here, in whichever thread. Nothing runs on the device, and no buffer is allocated.
"""

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import platformdirs
from jax.sharding import Mesh

from jspec import sharding
from jspec.core import token_fsm
from jspec.core.logprobs import Scoring
from jspec.core.types import Request, Shared
from jspec.engine import block_table, chunks, slots
from jspec.engine.engine import Engine
from jspec.engine.loop import DecodeState, cancel, init_shared, launch, prefill
from jspec.engine.masked_round import draft_alone, verify_alone
from jspec.engine.profile import Profile, request_of
from jspec.engine.program_memory import RELEASES
from jspec.engine.sequences import SequenceParams
from jspec.grammar.followed import num_words
from jspec.sharding import mesh as mesh_lib

_MOST_THREADS = 4  # threads that compile at a time: each takes memory

Lowering = Callable[[], jax.stages.Lowered]


class Programs:
    """Compiles the programs that an engine lacks for a sequence.

    From then on the engine has no reason to compile while others run: see ``Profiles``.

    Args:
      engine: which runs on the devices of ``mesh``.
      mesh: the devices of the weights; None for one.
    """

    def __init__(self, engine: Engine, mesh: Mesh | None = None):
        self._engine, self._mesh = engine, mesh
        # Several processes compile as they run: on GPUs they measure kernels together.
        self._is_alone = engine.runner.worker.channel is None
        engine.runner.request.profiles.are_compiled_ahead = self._is_alone
        self._lock = threading.Lock()
        self._known: set[Any] = set()  # functions, settings and shapes of programs
        self._releases = RELEASES.total()  # after which no program exists any more

    def may_lack(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> bool:
        """Return whether ``compile`` would find anything; this is quick.

        Functions of users are compiled only while they run, and are left to the engine.
        """
        if sequences[0].logits_processors or not self._is_alone:
            return False
        if self._releases != RELEASES.total() or not self._scores_prompts(scoring):
            return True
        return not self._engine.runner.request.profiles.suit(self._needed(sequences, scoring))

    def may_run(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> bool:
        """Return whether sequences may join those of the engine, and nothing will compile."""
        if sequences[0].logits_processors or not self._is_alone:
            return True
        return self._engine.runner.request.profiles.cover(self._needed(sequences, scoring))

    def compile(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> None:
        """Compile what runs ``sequences`` with those of the engine; several threads may call.

        Args:
          sequences: whose settings the profile will have; prompts do not count.
          scoring: scores of tokens; None for none.
        """
        with self._lock, mesh_lib.on(self._mesh):  # whoever finds nothing missing may go on
            if self.may_lack(sequences, scoring):
                needed = self._needed(sequences, scoring)
                # What is wide has one program, for greedy sequences too.
                profile = needed.numeric() if needed.wide else needed
                self._compile([profile], scoring)

    def compile_basic(self, on_progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Compile what runs sequences of all numeric settings, and prompts of all lengths.

        ``on_progress`` is called with the number of programs that are done, and of all.
        """
        if self._is_alone:
            greedy = self._engine.runner.request.profiles.needed(())
            with self._lock, mesh_lib.on(self._mesh):
                self._compile([greedy, greedy.numeric()], None, on_progress)

    def _needed(self, sequences: Sequence[SequenceParams], scoring: Scoring | None) -> Profile:
        """Return the profile for the sequences and all of the engine."""
        running = self._engine.scheduler.sequences
        every = [*sequences, *(each.params for each in running)]
        return self._engine.runner.request.profiles.needed(
            every, [scoring, *(each.scoring for each in running)]
        )

    def _scores_prompts(self, scoring: Scoring | None) -> bool:
        """Return whether there are programs that score prompts, if ``scoring`` has these scored."""
        return not (scoring and scoring.prompt) or ("prefill", scoring) in self._known

    def _compile(
        self,
        profiles: Sequence[Profile],
        scoring: Scoring | None,
        on_progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Compile what is missing of the programs of profiles."""
        if self._releases != RELEASES.total():
            self._releases = RELEASES.total()
            self._known.clear()
        alone = [dataclasses.replace(profile, follows=False) for profile in profiles]
        every = [each for profile in alone for each in self._launches(profile)]
        every += [each for profile in profiles if profile.follows for each in self._rounds(profile)]
        every += self._prefills(scoring)
        every += [each for profile in alone for each in self._writes(profile)]
        missing = {key: lowering for key, lowering in every if key not in self._known}
        _compile(list(missing.values()), on_progress)
        self._known |= missing.keys() | {("prefill", scoring)}
        for profile in (*alone, *profiles):
            self._engine.runner.request.profiles.add(profile)

    def _launches(self, profile: Profile) -> Iterator[tuple[Any, Lowering]]:
        """Yield the launches of a profile, of every draft length."""
        engine, (request, shared, state, tables) = self._engine, self._shapes(profile)
        for chosen in engine.runner.launch_plans(engine.num_slots):
            lower = functools.partial(
                launch.lower,
                chosen.plan,
                profile,
                engine.params,
                request,
                shared,
                state,
                np.int32(1),  # number of rounds
                np.zeros(engine.num_slots, bool),  # watched rows
                tables,
                chosen.budget,
            )
            yield ("launch", chosen.plan, profile), lower

    def _writes(self, profile: Profile) -> Iterator[tuple[Any, Lowering]]:
        """Yield the small programs that write the settings of a profile, and end rows."""
        engine, size = self._engine, slots.buffer_size(self._engine.plan, self._engine.capacity)
        request, streams = self._words(profile)
        keyed, shared, state, _ = self._shapes(profile)
        state = state.replace(pools=())
        seat = functools.partial(
            slots.seat.lower,
            engine.plan,
            engine.params,
            state,
            request,
            streams,
            slot=np.int32(0),
            text=np.zeros(size, np.int32),
            cached=np.int32(0),
            ready=np.bool_(False),
            has_pages=engine.pool is not None,
            keeps=engine.runner.worker.keeps,
        )
        form = _form(keyed)
        yield ("seat", form), seat
        yield ("with_keys", form), functools.partial(slots.with_keys.lower, request, streams)
        rows = np.zeros(engine.num_slots, bool)
        cancelled = functools.partial(cancel.lower, engine.plan, keyed, shared, state, rows)
        yield ("cancel", form), cancelled

    def _rounds(self, profile: Profile) -> Iterator[tuple[Any, Lowering]]:
        """Yield the two programs of a round between which the host follows grammars."""
        engine, (request, shared, state, tables) = self._engine, self._shapes(profile)
        for chosen in engine.runner.launch_plans(engine.num_slots):
            plan, inputs = chosen.plan, (engine.params, request, shared, state)
            lower = functools.partial(draft_alone.lower, plan, *inputs, tables)
            yield ("draft", plan, _form(request)), lower
            state_after, halfway = draft_alone.eval_shape(plan, *inputs, tables)
            state_after, halfway = state_after.settled(), sharding.whole(halfway)
            shape = *halfway.draft.tokens.shape, num_words(engine.plan.target.vocab_size)
            lower = functools.partial(
                verify_alone.lower,
                plan,
                profile,
                *inputs[:3],
                state_after,
                halfway,
                np.zeros(shape, np.uint32),
                np.zeros(shape[0], bool),
                tables,
            )
            yield ("verify", plan, profile), lower

    def _prefills(self, scoring: Scoring | None) -> Iterator[tuple[Any, Lowering]]:
        engine, scoring = self._engine, scoring if scoring and scoring.prompt else None
        _, _, state, tables = self._shapes(Profile())
        for size in chunks.sizes(engine.num_slots, scoring):
            if size.width > chunks.TOTALS[0] and size.width // 2 >= engine.capacity:
                continue  # no prompt is as long
            arrays = chunks.assemble([], [], size)
            lower = functools.partial(
                prefill.lower,
                engine.plan,
                engine.params,
                state,
                *arrays,
                np.zeros(size.rows, np.int32),
                scoring,
                tables,
            )
            yield ("prefill", size, scoring), lower

    def _words(self, profile: Profile) -> tuple[Request, np.ndarray]:
        """Return a request of empty slots before its keys are derived, and streams."""
        return request_of([None] * self._engine.num_slots, profile, self._vocab_size)

    @property
    def _vocab_size(self) -> int:
        return self._engine.plan.target.vocab_size

    def _shapes(self, profile: Profile) -> tuple[Request, Shared, DecodeState, Any]:
        """Return the shapes of request, shared state and state, and empty tables of pages."""
        engine, rows = self._engine, [None] * self._engine.num_slots
        request = slots.with_keys.eval_shape(*self._words(profile))
        capacity = slots.buffer_size(engine.plan, engine.capacity)
        state = slots.allocate.eval_shape(
            engine.plan,
            engine.params,
            len(rows),
            capacity,
            has_pages=engine.pool is not None,
            keeps=engine.runner.worker.keeps,
        )
        states = token_fsm.first_state(request.sampling.automaton)
        state = state.replace(history=state.history.replace(state=states))
        if engine.pool is not None:
            pools = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), engine.pool.buffers
            )
            state = state.replace(pools=pools)
        shared = jax.eval_shape(functools.partial(init_shared, engine.plan))
        request, shared = sharding.whole((request, shared))
        tables = block_table.rows_of(rows, engine.scheduler.pool, engine.capacity)
        return request, shared, state.settled(), tables


def _compile(lowerings: Sequence[Lowering], on_progress: Callable[[int, int], None]) -> None:
    """Compile programs, some at a time; the slow ones come first."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        # Lowering is Python, of which one thread runs at a time.
        compiling = [threads.submit(lower().compile) for lower in lowerings]
        for done, each in enumerate(compiling):
            on_progress(done, len(compiling))
            each.result()
    on_progress(len(lowerings), len(lowerings))


def _form(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def keep_compiled_programs() -> None:
    """Turn on JAX's persistent compilation cache, unless the user has configured it."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        directory = platformdirs.user_cache_path("jspec") / "xla"
        jax.config.update("jax_compilation_cache_dir", str(directory))
        # Small programs too: the first call runs dozens, which add up to seconds.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
