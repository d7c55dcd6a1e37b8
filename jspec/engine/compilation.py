"""The programs of a worker, compiled before their first use from the shapes of what they take.

JAX keeps a program with its function, its settings and the shapes. So a call finds what was
compiled here, in whichever thread. Nothing runs on the device, and no buffer is allocated.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jspec import sharding
from jspec.core import token_fsm
from jspec.core.logprobs import Scoring
from jspec.core.types import Request, Shared
from jspec.engine import block_table, chunks, slots
from jspec.engine.loop import DecodeState, cancel, init_shared, launch, prefill
from jspec.engine.masked_round import draft_alone, verify_alone
from jspec.engine.profile import Profile, request_of
from jspec.engine.program_memory import RELEASES
from jspec.engine.speculation import launch_plans
from jspec.engine.worker import Worker
from jspec.grammar.followed import num_words
from jspec.sharding import mesh as mesh_lib

_MOST_THREADS = 4  # threads that compile at a time: each takes memory

Lowering = Callable[[], jax.stages.Lowered]
OnProgress = Callable[[int, int], None]  # called with the number of programs done, and of all


class Compilation:
    """Compiles what a worker lacks for a profile. Of several processes each has one.

    All of them compile the same in the same order: on GPUs they measure kernels together.

    Args:
      worker: that runs the programs.
      num_slots: most sequences that run together.
      capacity: longest history, prompt included.
      mesh: the devices of the weights; None for one.
    """

    def __init__(self, worker: Worker, *, num_slots: int, capacity: int, mesh: Mesh | None):
        self._worker, self._mesh = worker, mesh
        self._num_slots, self._capacity = num_slots, capacity
        self._known: set[Any] = set()  # functions, settings and shapes of programs
        self._releases = RELEASES.total()  # after which no program exists any more

    def may_lack(self, scoring: Scoring | None) -> bool:
        """Return whether programs were released, or none score prompts as ``scoring`` asks for."""
        if self._releases != RELEASES.total():
            return True
        return bool(scoring and scoring.prompt) and ("prefill", scoring) not in self._known

    def compile(
        self,
        profiles: Sequence[Profile],
        scoring: Scoring | None,
        on_progress: OnProgress = lambda *_: None,
    ) -> None:
        """Compile what is missing of the programs of profiles."""
        if self._releases != RELEASES.total():
            self._releases = RELEASES.total()
            self._known.clear()
        with mesh_lib.on(self._mesh):
            every = self._every(profiles, scoring)
            missing = {key: lowering for key, lowering in every if key not in self._known}
            _compile(list(missing.values()), on_progress)
        self._known |= missing.keys() | {("prefill", scoring)}

    def _every(
        self, profiles: Sequence[Profile], scoring: Scoring | None
    ) -> Iterator[tuple[Any, Lowering]]:
        """Yield the programs of profiles; the slow ones come first."""
        alone = [without_followers(profile) for profile in profiles]
        for profile in alone:
            yield from self._launches(profile)
        for profile in profiles:
            if profile.follows:
                yield from self._rounds(profile)
        yield from self._prefills(scoring)
        for profile in alone:
            yield from self._writes(profile)

    def _launches(self, profile: Profile) -> Iterator[tuple[Any, Lowering]]:
        """Yield the launches of a profile, of every draft length."""
        request, shared, state, tables = self._shapes(profile)
        for chosen in launch_plans(self._worker.plan, self._num_slots):
            lower = functools.partial(
                launch.lower,
                chosen.plan,
                profile,
                self._worker.params,
                request,
                shared,
                state,
                np.int32(1),  # number of rounds
                np.zeros(self._num_slots, bool),  # watched rows
                tables,
                chosen.budget,
            )
            yield ("launch", chosen.plan, profile), lower

    def _writes(self, profile: Profile) -> Iterator[tuple[Any, Lowering]]:
        """Yield the small programs that write the settings of a profile, and end rows."""
        worker, rows = self._worker, np.zeros(self._num_slots, bool)
        request, streams = self._words(profile)
        keyed, shared, state, _ = self._shapes(profile)
        state = state.replace(pools=())
        seat = functools.partial(
            slots.seat.lower,
            worker.plan,
            worker.params,
            state,
            request,
            streams,
            slot=np.int32(0),
            text=np.zeros(slots.buffer_size(worker.plan, self._capacity), np.int32),
            cached=np.int32(0),
            ready=np.bool_(False),
            has_pages=worker.pool is not None,
            keeps=worker.keeps,
        )
        form = _form(keyed)
        yield ("seat", form), seat
        yield ("with_keys", form), functools.partial(slots.with_keys.lower, request, streams)
        cancelled = functools.partial(cancel.lower, worker.plan, keyed, shared, state, rows)
        yield ("cancel", form), cancelled

    def _rounds(self, profile: Profile) -> Iterator[tuple[Any, Lowering]]:
        """Yield the two programs of a round between which the host follows grammars."""
        request, shared, state, tables = self._shapes(profile)
        for chosen in launch_plans(self._worker.plan, self._num_slots):
            plan, inputs = chosen.plan, (self._worker.params, request, shared, state)
            lower = functools.partial(draft_alone.lower, plan, *inputs, tables)
            yield ("draft", plan, _form(request)), lower
            state_after, halfway = draft_alone.eval_shape(plan, *inputs, tables)
            state_after, halfway = state_after.settled(), sharding.whole(halfway)
            shape = *halfway.draft.tokens.shape, num_words(self._vocab_size)
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
        scoring = scoring if scoring and scoring.prompt else None
        _, _, state, tables = self._shapes(Profile())
        for size in chunks.sizes(self._num_slots, scoring):
            if size.width > chunks.TOTALS[0] and size.width // 2 >= self._capacity:
                continue  # no prompt is as long
            arrays = chunks.assemble([], [], size)
            lower = functools.partial(
                prefill.lower,
                self._worker.plan,
                self._worker.params,
                state,
                *arrays,
                np.zeros(size.rows, np.int32),
                scoring,
                tables,
            )
            yield ("prefill", size, scoring), lower

    def _words(self, profile: Profile) -> tuple[Request, np.ndarray]:
        """Return a request of empty slots before its keys are derived, and streams."""
        return request_of([None] * self._num_slots, profile, self._vocab_size)

    @property
    def _vocab_size(self) -> int:
        return self._worker.plan.target.vocab_size

    def _shapes(self, profile: Profile) -> tuple[Request, Shared, DecodeState, Any]:
        """Return the shapes of request, shared state and state, and empty tables of pages."""
        worker, pool = self._worker, self._worker.pool
        request = slots.with_keys.eval_shape(*self._words(profile))
        state = slots.allocate.eval_shape(
            worker.plan,
            worker.params,
            self._num_slots,
            slots.buffer_size(worker.plan, self._capacity),
            has_pages=pool is not None,
            keeps=worker.keeps,
        )
        states = token_fsm.first_state(request.sampling.automaton)
        state = state.replace(history=state.history.replace(state=states))
        if pool is not None:
            pools = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pool.buffers)
            state = state.replace(pools=pools)
        shared = jax.eval_shape(functools.partial(init_shared, worker.plan))
        request, shared = sharding.whole((request, shared))
        blocks = None if pool is None else pool.blocks
        tables = block_table.rows_of([None] * self._num_slots, blocks, self._capacity)
        return request, shared, state.settled(), tables


def without_followers(profile: Profile) -> Profile:
    """Return a profile whose rounds are in one program."""
    return dataclasses.replace(profile, follows=False)


def _compile(lowerings: Sequence[Lowering], on_progress: OnProgress) -> None:
    """Compile programs, some at a time."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        # Lowering is Python, of which one thread runs at a time.
        compiling = [threads.submit(mesh_lib.bound(lower().compile)) for lower in lowerings]
        for done, each in enumerate(compiling):
            on_progress(done, len(compiling))
            each.result()
    on_progress(len(lowerings), len(lowerings))


def _form(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
