"""The engine: a scheduler decides on the host, and a runner runs on the device.

A step prefills a chunk of a prompt, dispatches a launch of the loop, and reads the launch before
it. So the device never waits for the host between two launches.

Who shares the batch, and when a sequence joined, does not change its text: noise has the address of
the sequence's seed and position, and every row is computed for itself. A sequence that is preempted
is prefilled again with what it had generated. Rounds end where launches end, so no round is cut.

If a step fails, what the device held is lost, and no sequence can be named as its cause. All
sequences that ran start again from their texts, each one alone for a launch. One that fails alone
ends by the error, as one does whose prompt, grammar or listener raises on the host.
"""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jspec.core import validation
from jspec.core.logprobs import Scoring
from jspec.core.types import Params
from jspec.engine import answers, program_memory, recovery, updates
from jspec.engine.admission import Admission
from jspec.engine.answers import Answer
from jspec.engine.batch_request import Members
from jspec.engine.block_table import BlockTable
from jspec.engine.launches import Launch
from jspec.engine.loop import init_shared
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.runner import Dispatched, Runner
from jspec.engine.scheduler import Scheduler
from jspec.engine.sequence import EngineSequence, Listener
from jspec.engine.sequences import (
    SequenceParams,
    check_capacity,
    check_fit,
    check_priority,
    check_sizes,
)
from jspec.engine.speculation import launch_plans


class Engine:
    """Runs sequences in the slots of one batch. Several threads may not use it at once.

    Args:
      plan: static.
      params: weights; ``engine.params = others`` replaces them (``updates.replace_params``).
      num_slots: most sequences that run together.
      capacity: longest history, prompt included.
      profile: settings that all launches have.
      shared: the drafter's state that outlives calls; consumed. None for an empty one.
      pool: pages for the caches; None for caches of ``capacity`` tokens in every slot.
      max_num_queued: most sequences that wait for a slot; None for any number.
      on_launch: called with every launch that was read, as NumPy arrays.
      is_pinned: whether the batch always has all slots, and so the same programs. Otherwise it has
        as many as sequences need, a power of two; and caches without pages are as long as needed.

    Raises:
      ValueError: the weights belong to another model, or a number is out of range.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        *,
        num_slots: int,
        capacity: int,
        profile: Profile | None = None,
        shared: Any = None,
        pool: Pool | None = None,
        max_num_queued: int | None = None,
        on_launch: Callable[[Launch], None] | None = None,
        is_pinned: bool = True,
    ):
        check_sizes(num_slots=num_slots, capacity=capacity, max_num_queued=max_num_queued)
        validation.check_params(plan.target, plan.drafter, params)
        self.plan, self.pool, self.capacity = plan, pool, capacity
        self.on_launch = on_launch
        self.scheduler = Scheduler(num_slots, None if pool is None else pool.blocks, max_num_queued)
        self.runner = Runner(
            plan,
            params,
            profile=Profile() if profile is None else profile,
            shared=init_shared(plan) if shared is None else shared,
            pool=pool,
            capacity=capacity,
        )
        self.admission = Admission(self.scheduler, self.runner, capacity, is_pinned=is_pinned)
        self.num_passed = 0  # nodes that the target's matmuls ran over, in launches that were read
        self.unread: collections.deque[Dispatched] = collections.deque()  # launches, two at most
        program_memory.bound(self.runner.worker.release)

    params = property(lambda self: self.runner.worker.params, updates.replace_params)
    shared = property(lambda self: self.runner.worker.shared, updates.replace_shared)
    profile = property(lambda self: self.runner.request.profile)
    num_slots = property(lambda self: self.scheduler.num_slots)
    is_idle = property(lambda self: self.scheduler.is_idle)
    num_waiting = property(lambda self: self.scheduler.num_waiting)
    num_running = property(lambda self: len(self.scheduler.seated))
    num_prefilled = property(lambda self: self.admission.num_prefilled)

    def submit(
        self,
        sequence: SequenceParams,
        *,
        listener: Listener | None = None,
        rounds: int | None = None,
        scoring: Scoring | None = None,
        priority: int = 0,
        cache_salt: str = "",
        is_checked: bool = False,
    ) -> EngineSequence:
        """Queue a sequence. They run by priority, the lowest number first, then by arrival.

        Args:
          sequence: what to generate.
          listener: called by ``step`` with each longer answer; if it returns True, the text has
            ended there, as at a stop string.
          rounds: most rounds between two readings of the answer, of which the first comes after one
            round; None for the profile's.
          scoring: scores of tokens; None for none.
          priority: as vLLM's.
          cache_salt: sequences share pages only with those of the same salt.
          is_checked: True for a sequence that ``check_fit`` has passed, which may take long.

        Raises:
          ValueError: the sequence does not fit the model, the engine's capacity or the pool, or
            ``priority`` is no whole number.
          queue.Full: ``max_num_queued`` sequences wait already.
        """
        check_priority(priority)
        if not is_checked:
            check_fit([sequence], self.plan.target)
        check_capacity(sequence, self.capacity)
        if sequence.logits_processors:
            self.runner.check_alone("logits_processors")
        blocks = self.scheduler.pool
        if blocks is not None:
            blocks.check_fit(len(sequence.prompt) + sequence.max_tokens)
        if scoring is not None:
            scoring.check_fit(self.plan.target.vocab_size)
        self.scheduler.check_room()
        submitted = EngineSequence(
            params=sequence,
            answer=answers.empty(self.plan.drafter.max_depth),
            table=BlockTable(blocks, cache_salt),
            rank=self.scheduler.rank(priority),
            listener=listener,
            rounds=rounds,
            scoring=scoring,
        )
        self.scheduler.queue(submitted)
        return submitted

    def abort(self, sequence: EngineSequence) -> None:
        """End a sequence that waits or runs. Its answer keeps what was read."""
        if not sequence.finished:
            sequence.end("abort")
            self.scheduler.leave(sequence)

    def run(self, sequences: Iterable[SequenceParams], **options: Any) -> list[Answer]:
        """Submit sequences with ``options`` of ``submit``; return their answers, in order.

        Raises:
          Exception: that ended a sequence; all have ended then.
        """
        submitted = [self.submit(sequence, **options) for sequence in sequences]
        while not all(sequence.finished for sequence in submitted):
            self.step()
        for sequence in submitted:
            if sequence.error is not None:
                raise sequence.error
        return [sequence.answer for sequence in submitted]

    def warm_up(self, sequences: Iterable[SequenceParams], **options: Any) -> None:
        """Compile what ``sequences`` need: ``run`` them with every length of the drafts."""
        runner, sequences = self.runner, list(sequences)
        try:
            for chosen in launch_plans(runner.plan, self.num_slots):
                runner.pinned_length = chosen.plan.max_depth
                self.run(sequences, **options)
        finally:
            runner.pinned_length = None

    def step(self) -> None:
        """Prefill a chunk, dispatch a launch, and read the launch before it."""
        self.dispatch()
        self.read()

    def dispatch(self) -> None:
        """Prefill a chunk, and dispatch a launch if a sequence takes part in rounds."""
        self._survive(self._dispatch)

    def read(self) -> None:
        """Read all launches, but for the last one while sequences take part in rounds."""
        self._survive(lambda: self._read_all_but(bool(self.scheduler.ready)))

    def settle(self) -> None:
        """Hand the texts that the host ended to a drafter with shared state."""
        self._survive(self._end_left)

    def preempt(self) -> bool:
        """Free the pages of the youngest sequence, if any has some.

        Launches that are not read come first: texts must be complete, and some may have ended.
        """
        if self.unread:
            self._read_all_but(0)
            return True
        return self.scheduler.preempt()

    # ---------------------------------------------------------------------------------- one step

    def _dispatch(self) -> None:
        self._end_left()
        self.admission.admit()
        if self.scheduler.follows:
            self._read_all_but(0)  # the host must have the texts
            self._end_left()
        rounds = self.scheduler.rounds(self.profile.rounds)
        self._reserve(rounds)
        if self.scheduler.ready:
            self._launch(rounds)

    def _end_left(self) -> None:
        """End the rows of texts that the host ended, before their slots are taken again."""
        leaving, seated = self.scheduler.leaving, self.scheduler.slots
        if leaving:
            self.runner.end(np.isin(np.arange(len(seated)), list(leaving)), seated)
            leaving.clear()

    def _reserve(self, rounds: int) -> None:
        """Give every sequence the pages that it may fill; preempt the youngest if they run out."""
        scheduler = self.scheduler
        most_tokens = rounds * (self.plan.drafter.max_depth + 1)
        while True:
            ahead = sum(each.most_tokens for each in self.unread)
            sequence = scheduler.reserve(ahead + most_tokens)
            if sequence is None:
                break
            if self.unread or len(scheduler.seated) > 1:
                self.preempt()
            else:
                scheduler.fail(sequence, scheduler.no_memory())
        self._end_left()

    def _launch(self, rounds: int) -> None:
        """Start a launch; it ends where a sequence ends if another one waits for the slot."""
        scheduler, runner, members = self.scheduler, self.runner, self.scheduler.members
        chosen, tables = runner.choose(members), scheduler.tables(self.capacity)
        if scheduler.follows:
            dispatched = runner.follow(chosen, members, scheduler.slots, tables)
            for sequence in scheduler.ready:
                if sequence.finished:  # its grammar could not be followed
                    scheduler.leave(sequence)
        else:
            rounds = min(rounds, chosen.rounds or rounds)
            watched = scheduler.watched(always=runner.ends_with_any_row)
            dispatched = runner.launch(chosen, rounds, members, scheduler.slots, watched, tables)
        self.unread.append(dispatched)
        scheduler.dispatched()

    def _read_all_but(self, count: int) -> None:
        """Read launches until ``count`` are left, which are the last ones."""
        while len(self.unread) > count:
            ran = self.runner.bring(self.unread[0])
            self._read(self.unread.popleft().members, ran)

    def _read(self, members: Members, ran: Launch) -> None:
        """Add the results of a launch to the answers of its members."""
        self.num_passed += int(ran.passed.sum())
        for slot, sequence in enumerate(members):
            if sequence is None or sequence.finished:
                continue
            sequence.extend(ran, slot)
            has_ended = sequence.hear()
            if sequence.error is not None:
                self.scheduler.leave(sequence)
            elif sequence.finished:
                self.runner.keep_end(sequence, int(ran.num_cached[slot]))
                self.scheduler.finish(sequence)
            elif has_ended:
                sequence.end("stop")
                self.scheduler.leave(sequence)
        if self.on_launch is not None:
            self.on_launch(ran)

    def _survive(self, act: Callable[[], None]) -> None:
        """Run a part of a step, and go on after an error."""
        recovery.survive(act, self.scheduler, self.runner, self.unread)
