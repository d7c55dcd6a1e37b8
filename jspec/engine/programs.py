"""Programs of an engine, compiled before their first use from the shapes of what they take.

JAX keeps a program with its function, its settings and the shapes. So a call finds what was
compiled here, in whichever thread. Nothing runs on the device, and no buffer is allocated.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import platformdirs

from jspec.core import token_fsm
from jspec.core.logprobs import Scoring
from jspec.core.types import Request
from jspec.engine import chunks, slots
from jspec.engine.engine import Engine
from jspec.engine.loop import DecodeState, init_shared, launch, prefill
from jspec.engine.masked_round import draft_alone, verify_alone
from jspec.engine.pages import table_of
from jspec.engine.plan import RoundPlan
from jspec.engine.profile import Profile, request_of
from jspec.engine.program_memory import RELEASES
from jspec.engine.sequences import SequenceParams
from jspec.grammar.followed import num_words

_MOST_THREADS = 4  # that compile at a time: each takes memory

Lowering = Callable[[], jax.stages.Lowered]


class Programs:
    """Compiles the programs that an engine lacks for a sequence.

    With weights on several devices it compiles none: how these share a state is known only once
    the state is there.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        leaves = jax.tree.leaves(engine.params)
        self._is_on_one = all(len(x.devices()) == 1 for x in leaves if isinstance(x, jax.Array))
        self._lock = threading.Lock()
        self._known: set[Any] = set()  # functions, settings and shapes of programs
        self._asked: set[Any] = set()  # settings of ``compile``, for a quick answer
        self._releases = RELEASES.total()  # after which nothing is known any more
        # True once the host follows a grammar: any sequence may then share a round with one.
        self._follows = False

    def may_lack(self, sequences: Sequence[SequenceParams], scoring: Scoring | None = None) -> bool:
        """Return whether ``compile`` may find anything; this is quick.

        Functions of users are compiled only while they run, and are left to the engine.
        """
        if not self._is_on_one or sequences[0].logits_processors:
            return False
        grammar = sequences[0].grammar
        has_new = grammar is not None and grammar not in self._engine.grammars
        has_new = has_new or self._releases != RELEASES.total()
        has_new |= sequences[0].followed_grammar is not None and not self._follows
        return has_new or (self._profile(sequences, scoring), scoring) not in self._asked

    def compile(
        self,
        sequences: Sequence[SequenceParams],
        scoring: Scoring | None = None,
        on_progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Compile what runs ``sequences[0]``, unless that was done. Several threads may call.

        Programs are launches of every draft length, without and with the grammars of the engine,
        rounds of grammars that the host follows, and prefills of prompts of all lengths.

        Args:
          sequences: whose settings the engine's profile will have; prompts do not count.
          scoring: scores of tokens; None for none.
          on_progress: called with the number of programs that are done, and of all.
        """
        if not self._is_on_one:
            return
        with self._lock:  # whoever finds nothing missing may go on
            if self._releases != RELEASES.total():
                self._releases = RELEASES.total()
                self._known.clear()
                self._asked.clear()
            self._follows |= sequences[0].followed_grammar is not None
            every = [*self._launches(sequences, scoring), *self._prefills(scoring)]
            missing = {key: lowering for key, lowering in every if key not in self._known}
            _compile(list(missing.values()), on_progress)
            self._known |= missing.keys()
            self._asked.add((self._profile(sequences, scoring), scoring))

    def _profile(self, sequences: Sequence[SequenceParams], scoring: Scoring | None) -> Profile:
        """Return the profile of launches."""
        profile = self._engine.profile.scored(scoring).grown(sequences)
        return profile.without_scores() if scoring is None else profile

    def _launches(
        self, sequences: Sequence[SequenceParams], scoring: Scoring | None
    ) -> Iterator[tuple[Any, Lowering]]:
        engine, profile = self._engine, self._profile(sequences, scoring)
        rows = [sequences[0], *[None] * (engine.num_slots - 1)]
        table = table_of([None] * len(rows), engine.pool, engine.capacity)
        sizes = np.int32(1), np.zeros(len(rows), bool)  # of rounds, and watched rows
        shared = jax.eval_shape(functools.partial(init_shared, engine.plan))
        for grammars in dict.fromkeys(((), engine.grammars)):
            request, state = self._shapes(rows, profile, grammars)
            for pace in engine.paces:
                given = engine.params, request, shared, state, *sizes, table, pace.budget
                lower = functools.partial(launch.lower, pace.plan, profile, *given)
                yield ("launch", pace.plan, profile, _form(request)), lower
                if self._follows:
                    inputs = engine.params, request, shared, state
                    yield from self._rounds(pace.plan, profile, inputs, table)

    def _rounds(
        self, plan: RoundPlan, profile: Profile, inputs: tuple[Any, ...], table: Any
    ) -> Iterator[tuple[Any, Lowering]]:
        """Yield the two programs of a round between which the host follows grammars."""
        engine, form = self._engine, _form(inputs[1])
        lower = functools.partial(draft_alone.lower, plan, *inputs, table)
        yield ("draft", plan, form), lower
        state, halfway = draft_alone.eval_shape(plan, *inputs, table)
        shape = *halfway.draft.tokens.shape, num_words(engine.plan.target.vocab_size)
        masks = np.zeros(shape, np.uint32), np.zeros(shape[0], bool)
        given = *inputs[:3], state, halfway, *masks, table
        lower = functools.partial(verify_alone.lower, plan, profile, *given)
        yield ("verify", plan, profile, form), lower

    def _prefills(self, scoring: Scoring | None) -> Iterator[tuple[Any, Lowering]]:
        engine, scoring = self._engine, scoring if scoring and scoring.prompt else None
        rows = [None] * engine.num_slots
        table = table_of(rows, engine.pool, engine.capacity)
        _, state = self._shapes(rows, Profile())
        for size in chunks.sizes(engine.num_slots, scoring):
            if size.width > chunks.TOTALS[0] and size.width // 2 >= engine.capacity:
                continue  # no prompt is as long
            arrays = chunks.assemble([], [], size)
            given = state, *arrays, np.zeros(size.rows, np.int32), scoring, table
            lower = functools.partial(prefill.lower, engine.plan, engine.params, *given)
            yield ("prefill", size, scoring), lower

    def _shapes(
        self, rows: Sequence[SequenceParams | None], profile: Profile, grammars: Any = ()
    ) -> tuple[Request, DecodeState]:
        """Return the shapes of rows in the engine."""
        engine, size = self._engine, len(rows)
        request, streams = request_of(rows, profile, engine.plan.target.vocab_size, grammars)
        request = slots.with_keys.eval_shape(request, streams)
        capacity = slots.buffer_size(engine.plan, engine.capacity)
        inputs = engine.plan, engine.params, size, capacity, engine.pool is not None
        state = slots.allocate.eval_shape(*inputs)
        states = token_fsm.first_state(request.sampling.automaton)
        state = state.replace(history=state.history.replace(state=states))
        if engine.pool is not None:
            shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            state = state.replace(pools=jax.tree.map(shape, engine.pool.buffers))
        return request, state


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
