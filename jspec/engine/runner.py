"""The runner: what the next programs are, and what the host learns from those that ran."""

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jspec.core.logprobs import Logprobs
from jspec.core.types import Params, Shared
from jspec.engine import faults, slots
from jspec.engine.batch_request import BatchRequest, Members
from jspec.engine.block_table import Tables
from jspec.engine.chunks import Chunk
from jspec.engine.launches import Launch, shapes_of_captured
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.scheduler import Prefill
from jspec.engine.sequence import EngineSequence
from jspec.engine.speculation import LaunchPlan, SpeculationController
from jspec.engine.worker import Worker
from jspec.grammar.followed import num_words


@dataclasses.dataclass
class Dispatched:
    """A launch that was not read yet."""

    launch: Launch
    members: Members
    most_tokens: int  # most tokens that a sequence gains in it
    chosen: LaunchPlan
    begin: float | None  # seconds; None if something else ran before it


class Runner:
    """Has a worker run the sequences in the rows of one batch.

    Args:
      plan: static.
      params: weights.
      profile: settings that all launches have.
      shared: the drafter's state that outlives calls.
      pool: pages of the caches; None for caches without pages.
      capacity: longest history, prompt included.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        *,
        profile: Profile,
        shared: Shared,
        pool: Pool | None,
        capacity: int,
    ):
        self.plan, self.pool = plan, pool
        shapes_of_captured(plan, params, profile.capture_layers)  # raises if the target lacks one
        self.worker = Worker(plan, params, shared=shared, pool=pool)
        self.request = BatchRequest(profile, plan.target.vocab_size, self.worker.release)
        self.capacity = capacity  # tokens of a row
        self.prefills: collections.Counter[Chunk] = collections.Counter()  # passes, by size
        self.pinned_length: int | None = None  # K of all launches; None for a choice
        self._speculations: dict[int, SpeculationController] = {}  # by the number of rows
        self._is_alone = True  # whether launches alone ran since the last one
        self._last_end: float | None = None  # end of the last launch, if it was seen
        self._ahead: set[tuple[Profile, int]] = set()  # compiled launches, by number of rows

    @property
    def is_lost(self) -> bool:
        """True if buffers were consumed by a call that returned nothing."""
        return self.worker.is_lost

    @property
    def buffer_size(self) -> int:
        """The length S of the histories."""
        return slots.buffer_size(self.plan, self.capacity)

    def start_anew(self, capacity: int) -> None:
        """Drop the rows, as no sequence is in one; the next ones have another ``capacity``."""
        self.worker.drop()
        self.capacity = capacity
        self.request.reset()

    def reset(self, *, keeps_pages: bool) -> None:
        """Drop the rows after a fault. Pages and the drafter's shared state begin anew, or stay."""
        self.start_anew(self.capacity)
        if not keeps_pages:
            self.worker.renew_shared()
            if self.pool is not None:
                self.pool.renew()

    def check_alone(self, what: str) -> None:
        """Raise ValueError if there are other processes, which cannot be sent ``what``."""
        if self.worker.channel is not None:
            raise ValueError(
                f"{what} cannot be sent to other processes; leave it out, or run one process."
            )

    def put_shared(self, shared: Shared) -> None:
        """Replace the drafter's shared state; it is consumed."""
        is_alone = self.worker.channel is None
        self.worker.put_shared(shared if is_alone else jax.device_get(shared))

    # ------------------------------------------------------------------------------------ programs

    def widen(self, width: int) -> None:
        """Have more rows; those that there are stay."""
        self.request.is_stale = True
        self.worker.widen(width)

    def seat(self, sequence: EngineSequence, seated: Members) -> None:
        """Write a sequence into its row; ``seated`` are the sequences of all rows."""
        new = self.request.make(seated, sequence)
        text = np.zeros(self.buffer_size, np.int32)
        text[: sequence.length] = sequence.text
        self._is_alone = False
        self.worker.seat(
            new,
            slot=sequence.slot,
            text=text,
            cached=sequence.num_prefilled,
            ready=not sequence.num_left,
        )
        number = sequence.table.snapshot(sequence.num_prefilled)
        if number is not None:
            self.worker.restore(sequence.slot, number)
        self.request.is_stale = False
        speculation = self._speculation_of(len(seated))
        if speculation is not None:
            speculation.forget(sequence.slot)

    def compile_launch(self, seated: Members, tables: Tables | None) -> None:
        """Compile the first launch of these rows in a thread, while their prompts are prefilled."""
        profiles, sequences = self.request.profiles, [each for each in seated if each is not None]
        if profiles.are_compiled_ahead or any(each.follower for each in sequences):
            return
        profile = self._profile(seated, follows=False)
        if (profile, len(seated)) not in self._ahead:
            self._ahead.add((profile, len(seated)))
            chosen = self.choose(seated)
            self.worker.compile_launch(chosen.plan.length, profile, tables, chosen.budget)

    def prefill(self, chunk: Prefill, tables: Tables | None) -> Logprobs | None:
        """Prefill chunks of prompts; return their scores, if asked for."""
        self._clean()
        self._is_alone = False
        scores = self.worker.prefill(chunk.arrays, chunk.rows, chunk.scoring, tables)
        self.prefills[chunk.size] += 1
        return scores

    def keep(self, sequences: Sequence[EngineSequence]) -> None:
        """Keep snapshots of those whose prefill stands at the end of a page."""
        for sequence in sequences:
            number = sequence.table.new_snapshot(sequence.text, sequence.num_prefilled)
            if number is not None:
                self.worker.keep(sequence.slot, number)

    def keep_end(self, sequence: EngineSequence, num_cached: int) -> None:
        """Keep a snapshot of a text that the device ended, with ``num_cached`` tokens in caches."""
        if self.worker.keeps:
            number = sequence.table.snapshot_of_end(sequence.text, num_cached)
            if number is not None:
                self.worker.keep(sequence.slot, number)

    def launch(
        self,
        chosen: LaunchPlan,
        rounds: int,
        members: Members,
        seated: Members,
        watched: np.ndarray,
        tables: Tables | None,
    ) -> Dispatched:
        """Dispatch a launch of up to ``rounds`` rounds; it ends as soon as a watched row does."""
        profile = self._profile(seated, follows=False)
        self._clean()
        ran = self.worker.launch(
            chosen.plan.length, profile, rounds, watched, tables, chosen.budget
        )
        begin = time.perf_counter() if self._is_alone else None
        self._is_alone = True
        return Dispatched(ran, members, rounds * (self.plan.drafter.max_depth + 1), chosen, begin)

    def follow(
        self, chosen: LaunchPlan, members: Members, seated: Members, tables: Tables | None
    ) -> Dispatched:
        """Run a round in two programs; in between the host makes masks for the draft.

        A sequence whose grammar cannot be followed ends by the error.
        """
        profile = self._profile(seated, follows=True)
        self._clean()
        draft = self.worker.draft(chosen.plan.length, tables)
        bits, used = self._masks(draft, members)
        ran = self.worker.verify(chosen.plan.length, profile, bits, used, tables)
        self._is_alone = False
        return Dispatched(ran, members, self.plan.drafter.max_depth + 1, chosen, None)

    def bring(self, dispatched: Dispatched) -> Launch:
        """Bring a launch to the host, and learn from it for the next ones."""
        is_late, seconds = dispatched.launch.rounds.is_ready(), None
        ran, end = jax.device_get(dispatched.launch), time.perf_counter()
        if dispatched.begin is not None and self._last_end is not None and not is_late:
            seconds = end - max(dispatched.begin, self._last_end)
        self._last_end = None if is_late else end
        members = dispatched.members
        speculation = self._speculation_of(len(members))
        if speculation is not None:
            stay = [each is not None and each.slot == row for row, each in enumerate(members)]
            speculation.learn(dispatched.chosen, ran, np.array(stay), seconds)
        return ran

    def end(self, rows: np.ndarray, seated: Members) -> None:
        """End ``rows``, bool [B], of texts that the host ended."""
        if self.worker.has_rows:
            if self.worker.width != len(rows):  # the batch was widened
                self._renew(seated)
            self.worker.cancel(rows)

    def _profile(self, seated: Members, *, follows: bool) -> Profile:
        """Return the profile of a launch whose request is on the device."""
        self._renew(seated)
        profile = dataclasses.replace(self.request.profile, follows=follows)
        self.request.profiles.add(profile)
        return profile

    def _renew(self, seated: Members) -> None:
        """Give the worker the request of the next launch, if it needs another one."""
        self.request.choose_profile(seated)
        if self.request.is_stale:
            self.worker.renew(self.request.make(seated))
            self.request.is_stale = False

    def _clean(self) -> None:
        """Clear the pages that sequences got and that may hold NaN."""
        if self.pool is not None:
            self.pool.clean()

    def _masks(self, draft: Any, members: Members) -> tuple[np.ndarray, np.ndarray]:
        """Return the masks of grammars that the host follows, and bool [B]: rows that have any."""
        tokens, parents, valid = jax.device_get((draft.tokens, draft.parents, draft.valid))
        parents = np.broadcast_to(parents, tokens.shape)
        used = np.array([bool(sequence and sequence.follower) for sequence in members])
        words = num_words(self.plan.target.vocab_size)
        bits = np.full((*tokens.shape, words), 0xFFFFFFFF, np.uint32)
        for slot in np.flatnonzero(used):
            sequence = members[slot]
            try:
                bits[slot] = sequence.follower.masks(
                    sequence.answer.tokens, tokens[slot], parents[slot], valid[slot]
                )
            except faults.INTERRUPTIONS:
                raise
            except BaseException as error:  # panics of Rust are no Exception
                sequence.fail(faults.of_sequence(error))
        return bits, used

    # ------------------------------------------------------------------------------- K of a launch

    def choose(self, members: Members) -> LaunchPlan:
        """Return K, the budget and the rounds of the next launch."""
        speculation = self._speculation_of(len(members))
        if speculation is None:
            return LaunchPlan(self.plan)
        speculation.pinned = self.pinned_length
        return speculation.choose(np.array([sequence is not None for sequence in members]))

    @property
    def ends_with_any_row(self) -> bool:
        """True if the number of unfinished rows decides about K, so that a launch ends with any."""
        return bool(self.plan.batch_sizes)

    def _speculation_of(self, width: int) -> SpeculationController | None:
        """Return what chooses K for launches of so many rows; None if the plan has one K."""
        if not self.plan.lengths:
            return None
        if width not in self._speculations:
            self._speculations[width] = SpeculationController(self.plan, width)
        return self._speculations[width]
