"""The worker: the arrays of a batch on the devices, and the programs that change them.

It takes plain data. Of several processes each has a worker, and what the first process calls runs
in all of them, in the same order (``jspec.sharding.channel``).
"""

from typing import Any

import jax
import numpy as np

from jspec import sharding
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.types import Draft, Params, Request, Shared
from jspec.engine import program_memory, slots
from jspec.engine.batch_request import NewRequest
from jspec.engine.block_table import Tables
from jspec.engine.budget import Budget
from jspec.engine.chunks import Arrays
from jspec.engine.compile_ahead import CompileAhead
from jspec.engine.launches import Launch
from jspec.engine.loop import DecodeState, cancel, init_shared, launch, prefill
from jspec.engine.masked_round import Halfway, draft_alone, verify_alone
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.sharding.channel import Replica, everywhere
from jspec.sharding.placement import Placement


class Worker(Replica):
    """Runs programs on the rows of one batch.

    Args:
      plan: static.
      params: weights.
      shared: the drafter's state that outlives calls.
      pool: pages of the caches; None for caches without pages.
    """

    def __init__(self, plan: Plan, params: Params, *, shared: Shared, pool: Pool | None):
        self.plan, self.params, self.shared, self.pool = plan, params, shared, pool
        self.request: Request | None = None  # The request of the last launch.
        self._state: DecodeState | None = None
        self._halfway: Halfway | None = None  # draft between the programs of a round
        self._plans = {plan.length: plan}  # plans of launches, by K
        self._ahead = CompileAhead()

    @property
    def is_lost(self) -> bool:
        """True if buffers were consumed by a call that returned nothing."""
        mine = jax.tree.leaves((self._state, self.shared))
        arrays = (leaf for leaf in mine if isinstance(leaf, jax.Array))
        is_lost = any(leaf.is_deleted() for leaf in arrays)
        return is_lost or (self.pool is not None and self.pool.is_lost)

    @property
    def has_rows(self) -> bool:
        """True if there is a state of rows."""
        return self._state is not None

    @property
    def keeps(self) -> bool:
        """True if rows have copies of their states behind the last page's end."""
        return self.pool is not None and self.pool.keeps_states

    @property
    def width(self) -> int:
        """The number of rows of the request."""
        return len(self.request.max_length)

    # -------------------------------------------------------------------------------- its arrays

    @everywhere
    def drop(self) -> None:
        """Drop the rows."""
        self._state = self.request = self._halfway = None

    @everywhere
    def renew_shared(self) -> None:
        """Begin anew with the drafter's shared state."""
        self.shared = init_shared(self.plan)

    @everywhere
    def put_shared(self, shared: Shared) -> None:
        """Replace the drafter's shared state; it is consumed."""
        self.shared = sharding.whole(shared)

    @everywhere
    def put_params(self, params: Params) -> None:
        """Replace the weights by others like them, on the devices of the old ones."""
        self.params = jax.tree.map(_in_place_of, self.params, params)

    @everywhere
    def widen(self, width: int) -> None:
        """Have more rows; those that there are stay."""
        if self._state is not None:
            self._state = slots.widened(
                self.plan, self.params, self._state, width, self.pool is not None, self.keeps
            )

    @everywhere
    def renew(self, new: NewRequest) -> None:
        """Take the request of the next launches."""
        self._state = new.fitted(self._state)
        self.request = slots.with_keys(new.request, new.streams)

    # ---------------------------------------------------------------------------------- programs

    @everywhere
    def seat(
        self, new: NewRequest, *, slot: int, text: np.ndarray, cached: int, ready: bool
    ) -> None:
        """Write a sequence into its row; arguments are those of ``slots.seat``."""
        has_pages = self.pool is not None
        if self._state is None:
            width, size = len(new.streams), len(text)
            self._state = slots.allocate(self.plan, self.params, width, size, has_pages, self.keeps)
        self._state = new.fitted(self._state)
        self.request, self._state = slots.seat(
            self.plan,
            self.params,
            self._state,
            new.request,
            new.streams,
            slot=np.int32(slot),
            text=text,
            cached=np.int32(cached),
            ready=np.bool_(ready),
            has_pages=has_pages,
            keeps=self.keeps,
        )

    @everywhere
    def keep(self, slot: int, number: int) -> None:
        """Copy the states of a row into a snapshot."""
        self.pool.snapshots.save(self._state, np.int32(slot), np.int32(number))

    @everywhere
    def restore(self, slot: int, number: int) -> None:
        """Begin a row with the states of a snapshot."""
        self._state = self.pool.snapshots.restore(self._state, np.int32(slot), np.int32(number))

    @everywhere
    def prefill(
        self,
        arrays: Arrays,
        rows: np.ndarray,
        scoring: Scoring | None,
        tables: Tables | None,
    ) -> Logprobs | None:
        """Prefill chunks of prompts; return their scores, if asked for."""
        # Leave the states of grammars out: they would compile another program.
        grammar_states = self._state.history.state
        self._state = self._state.replace(history=self._state.history.replace(state=None))
        state, scores = prefill(
            self.plan,
            self.params,
            self._lent(),
            *arrays,
            rows,
            scoring,
            tables,
        )
        self._take_back(state.replace(history=state.history.replace(state=grammar_states)))
        return scores

    @everywhere
    def launch(
        self,
        length: int | None,
        profile: Profile,
        rounds: int,
        watched: np.ndarray,
        tables: Tables | None,
        budget: Budget | None,
    ) -> Launch:
        """Run up to ``rounds`` rounds with K = ``length``; see ``loop.launch``."""
        self._ahead.wait()
        self.shared, state, ran = launch(
            self._plan_of(length),
            profile,
            self.params,
            self.request,
            self.shared,
            self._lent(),
            np.int32(rounds),
            watched,
            tables,
            budget,
        )
        self._take_back(state)
        return ran

    @everywhere
    def compile_launch(
        self,
        length: int | None,
        profile: Profile,
        tables: Tables | None,
        budget: Budget | None,
    ) -> None:
        """Compile the program of ``launch`` in a thread; nothing runs."""

        def lower() -> jax.stages.Lowered:
            return launch.lower(
                self._plan_of(length),
                profile,
                self.params,
                self.request,
                self.shared,
                self._lent(),
                np.int32(0),
                np.zeros(self.width, bool),
                tables,
                budget,
            )

        self._ahead.begin(lower)

    @everywhere
    def release(self, step: str) -> None:
        """Release the programs of a step; see ``program_memory.bound``."""
        program_memory.release(step)

    @everywhere
    def draft(self, length: int | None, tables: Tables | None) -> Draft:
        """Run the first half of a round, for ``verify``."""
        state, self._halfway = draft_alone(
            self._plan_of(length), self.params, self.request, self.shared, self._lent(), tables
        )
        self._take_back(state)
        return self._halfway.whole

    @everywhere
    def verify(
        self,
        length: int | None,
        profile: Profile,
        bits: np.ndarray,
        used: np.ndarray,
        tables: Tables | None,
    ) -> Launch:
        """Run the second half of a round, under masks of the host; see ``verify_alone``."""
        self.shared, state, ran = verify_alone(
            self._plan_of(length),
            profile,
            self.params,
            self.request,
            self.shared,
            self._lent(),
            self._halfway,
            bits,
            used,
            tables,
        )
        self._take_back(state)
        self._halfway = None
        return ran

    @everywhere
    def cancel(self, rows: np.ndarray) -> None:
        """End ``rows``, bool [B]."""
        self.request, self.shared, self._state = cancel(
            self.plan, self.request, self.shared, self._state, rows
        )

    def _plan_of(self, length: int | None) -> Plan:
        if length not in self._plans:
            self._plans[length] = self.plan.at_length(length)
        return self._plans[length]

    def _lent(self) -> DecodeState:
        return self._state if self.pool is None else self.pool.lend(self._state)

    def _take_back(self, state: DecodeState) -> None:
        self._state = state if self.pool is None else self.pool.take_back(state)


def _in_place_of(old: Any, new: Any) -> jax.Array:
    """Return ``new`` as an array that programs for ``old`` take.

    An array that is committed to a device would compile another program than one that is not.
    """
    if getattr(old, "committed", False):
        return Placement(old.sharding, layout=old.format.layout).put(new)
    return jax.device_put(np.asarray(new) if getattr(new, "committed", False) else new)
