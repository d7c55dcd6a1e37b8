"""The engine: sequences join and leave the slots of one running batch.

A step prefills a chunk of the next prompt beside the batch, dispatches a launch of the loop, and
reads the launch before it. So the device never waits for the host between two launches. A launch
ends early when a sequence ends and another one waits for its slot.

Who shares the batch, and when a sequence joined, does not change its text: noise has the address of
the sequence's seed and position, and every row is computed for itself.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jspec.core import validation
from jspec.core.logprobs import Scoring
from jspec.core.types import Params, Request, Shared
from jspec.engine import admission, answers
from jspec.engine.answers import Answer
from jspec.engine.launches import Launch
from jspec.engine.loop import DecodeState, cancel, init_shared, launch
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams, check_fit
from jspec.grammar.automata import Grammar

_BUSY_ROUNDS = 2  # of a launch while a prompt is prefilled: slots must not stay empty for long

Listener = Callable[[Answer], bool]


@dataclasses.dataclass(eq=False)
class Ticket:
    """A sequence that was given to an engine, and its answer so far."""

    sequence: SequenceParams
    answer: Answer
    listener: Listener | None = None
    rounds: int | None = None
    scoring: Scoring | None = None

    @property
    def finished(self) -> bool:
        """True if the answer is complete."""
        return self.answer.finish_reason is not None


@dataclasses.dataclass
class _Staged:
    """Tickets whose prompts are being prefilled, all slots at once or one beside the batch."""

    tickets: list[Ticket]
    intake: admission.Intake


class Engine:
    """Runs sequences in a fixed number of slots. Several threads may not use it at once.

    Args:
      plan: static.
      params: weights.
      num_slots: sequences that run together.
      capacity: longest history, prompt included.
      profile: what the first programs are compiled for; it grows with the sequences.
      shared: the drafter's state that outlives calls; consumed. None for an empty one.

    Raises:
      ValueError: the weights belong to another model.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        *,
        num_slots: int,
        capacity: int,
        profile: Profile | None = None,
        shared: Shared | None = None,
    ):
        validation.check_params(plan.target, plan.drafter, params)
        self.plan, self.params = plan, params
        self.num_slots, self.capacity = num_slots, capacity
        self.profile = Profile() if profile is None else profile
        self.shared = init_shared(plan) if shared is None else shared
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Ticket]] = []  # a heap, by priority and arrival
        self._staged: _Staged | None = None
        self._slots: list[Ticket | None] = [None] * num_slots
        self._leaving: set[int] = set()  # slots of texts that the host ended, to tell the device
        self._unread: collections.deque[tuple[Launch, list[Ticket | None]]] = collections.deque()
        self._grammars: tuple[Grammar, ...] = ()
        self._request: Request | None = None
        self._state: DecodeState | None = None
        self._running = self.profile  # that ``_request`` has

    @property
    def is_idle(self) -> bool:
        """True if no sequence waits or runs."""
        return not (self._waiting or self._staged or any(self._slots))

    def submit(
        self,
        sequence: SequenceParams,
        *,
        listener: Listener | None = None,
        rounds: int | None = None,
        scoring: Scoring | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Queue a sequence. Tickets run by priority, the lowest number first, then by arrival.

        Args:
          sequence: what to generate.
          listener: called by ``step`` with each longer answer; if it returns True, the text has
            ended there, as at a stop string.
          rounds: most rounds between two readings of the answer; None for the profile's.
          scoring: scores of tokens; None for none.
          priority: as vLLM's.

        Raises:
          ValueError: the sequence does not fit the model or the engine's capacity.
        """
        check_fit([sequence], self.plan.target)
        total = len(sequence.prompt) + sequence.max_tokens
        if total > self.capacity:
            raise ValueError(
                f"prompt and max_tokens={sequence.max_tokens} are {total} tokens together, more "
                f"than the engine's capacity={self.capacity}; shorten one of them."
            )
        if scoring is not None:
            scoring.check_fit(self.plan.target.vocab_size)
        ticket = Ticket(
            sequence, answers.empty(self.plan.drafter.max_depth), listener, rounds, scoring
        )
        heapq.heappush(self._waiting, (priority, next(self._arrivals), ticket))
        self.profile = self.profile.grown([sequence]).scored(scoring)
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """End a sequence that waits or runs. Its answer keeps what was read."""
        if ticket.finished:
            return
        ticket.answer = dataclasses.replace(ticket.answer, finish_reason="abort")
        if ticket in self._slots:
            self._leave(ticket)

    def run(self, sequences: Iterable[SequenceParams], **options: Any) -> list[Answer]:
        """Submit sequences with ``options`` of ``submit``; return their answers, in order."""
        tickets = [self.submit(sequence, **options) for sequence in sequences]
        while not all(ticket.finished for ticket in tickets):
            self.step()
        return [ticket.answer for ticket in tickets]

    def step(self) -> None:
        """Admit, dispatch one launch, and read the one before it."""
        self._tell_leaving()
        self._admit()
        is_running = any(self._slots)
        if is_running:
            self._dispatch()
        while len(self._unread) > is_running:
            self._read(*self._unread.popleft())

    def settle(self) -> None:
        """Hand the texts that the host ended to a drafter with shared state."""
        self._tell_leaving()

    # ----------------------------------------------------------------------------- those who join

    def _admit(self) -> None:
        """Prefill those who wait: between two launches a chunk, without any launch all."""
        while self._free_slots and (self._staged or self._has_waiting()):
            if not self._staged:
                self._stage()
            elif self._staged.intake.is_complete:
                self._join()
            else:
                self._staged.intake.advance(self.plan, self.params)
                if any(self._slots):
                    break

    @property
    def _free_slots(self) -> list[int]:
        slots = enumerate(self._slots)
        return [slot for slot, ticket in slots if ticket is None and slot not in self._leaving]

    def _has_waiting(self) -> bool:
        """Drop what was aborted while it waited; return whether anything waits."""
        while self._waiting and self._waiting[0][-1].finished:
            heapq.heappop(self._waiting)
        return bool(self._waiting)

    def _stage(self) -> None:
        """Take the next sequences: for all slots at once if most would be filled, else one."""
        is_empty = not any(self._slots)
        if is_empty:
            self._grammars = ()
        together = is_empty and 2 * len(self._waiting) > self.num_slots
        size, tickets = self.num_slots if together else 1, []
        while len(tickets) < size and self._has_waiting():
            tickets.append(heapq.heappop(self._waiting)[-1])
        of_prompts = [
            ticket.scoring for ticket in tickets if ticket.scoring and ticket.scoring.prompt
        ]
        request, streams = self._request_of([*tickets, *[None] * (size - len(tickets))])
        prompts = [ticket.sequence.prompt for ticket in tickets]
        inputs = self.plan, self.params, request, streams, prompts, self._buffer_size
        most = max(of_prompts, key=lambda scoring: scoring.count, default=None)
        self._staged = _Staged(tickets, admission.begin(*inputs, most))

    def _join(self) -> None:
        """Let those staged run: as the batch, or one in a free slot of the batch."""
        tickets, intake = self._staged.tickets, self._staged.intake
        self._staged = None
        slots = range(len(tickets))
        if len(intake.lengths) == self.num_slots:
            self._request, self._state = intake.request, intake.state
        else:
            slots = self._free_slots[:1]
            members = [*self._slots]
            members[slots[0]] = tickets[0]
            self._join_batch(members, intake.state, slots[0])
        self._running = self.profile
        for row, (slot, ticket) in enumerate(zip(slots, tickets, strict=True)):
            self._slots[slot] = ticket
            if ticket.scoring and ticket.scoring.prompt and not ticket.finished:
                scores = intake.prompt_scores(row)
                ticket.answer = dataclasses.replace(ticket.answer, prompt_logprobs=scores)
            if ticket.finished:  # aborted meanwhile
                self._leave(ticket)

    def _join_batch(self, members: list[Ticket | None], row: DecodeState, slot: int) -> None:
        request, streams = self._request_of(members)
        if self._state is None:
            inputs = self.plan, self.params, request, streams, [], self._buffer_size
            self._state = admission.begin(*inputs).state
        state, history = self._state, self._state.history
        if row.history.state is not None and history.state is None:  # the first grammar
            history = history.replace(state=np.zeros(self.num_slots, np.int32))
        inputs = state.replace(history=history), row, request, streams, np.int32(slot)
        self._request, self._state = admission.join(*inputs)

    def _request_of(self, members: Sequence[Ticket | None]) -> tuple[Request, np.ndarray]:
        rows = [None if ticket is None else ticket.sequence for ticket in members]
        new = (row.grammar for row in rows if row is not None and row.grammar is not None)
        self._grammars = tuple(dict.fromkeys((*self._grammars, *new)))
        vocab_size = self.plan.target.vocab_size
        return request_of(rows, self.profile, vocab_size, self._grammars)

    @property
    def _buffer_size(self) -> int:
        return admission.buffer_size(self.plan, self.capacity)

    # ------------------------------------------------------------------------------ those who run

    def _dispatch(self) -> None:
        """Start a launch; it ends where a sequence ends if another one waits for the slot."""
        running = [ticket for ticket in self._slots if ticket is not None]
        rounds = min(ticket.rounds or self._running.rounds for ticket in running)
        is_wanted = bool(self._staged) or self._has_waiting()
        if self._staged:
            rounds = min(rounds, _BUSY_ROUNDS)
        watched = np.array([ticket is not None and is_wanted for ticket in self._slots])
        profile = self._running
        if not any(ticket.scoring for ticket in running):
            profile = dataclasses.replace(profile, scoring=None)
        inputs = self.params, self._request, self.shared, self._state, np.int32(rounds), watched
        self.shared, self._state, ran = launch(self.plan, profile, *inputs)
        self._unread.append((ran, [*self._slots]))

    def _read(self, ran: Launch, members: list[Ticket | None]) -> None:
        """Add the results of a launch to the answers of its members."""
        ran = jax.device_get(ran)
        for slot, ticket in enumerate(members):
            if ticket is None or ticket.finished:
                continue
            limits = ticket.sequence.stop_token_ids, ticket.sequence.max_tokens
            asked = ran if ticket.scoring else ran.replace(logprobs=None)
            ticket.answer = answers.extended(ticket.answer, asked, slot, *limits)
            has_ended = ticket.listener is not None and ticket.listener(ticket.answer)
            if ticket.finished:
                self._slots[slot] = None
            elif has_ended:
                ticket.answer = dataclasses.replace(ticket.answer, finish_reason="stop")
                self._leave(ticket)

    # ---------------------------------------------------------------------------- those who leave

    def _leave(self, ticket: Ticket) -> None:
        slot = self._slots.index(ticket)
        self._slots[slot] = None
        self._leaving.add(slot)

    def _tell_leaving(self) -> None:
        """End the rows of texts that the host ended, before their slots are taken again."""
        if self._leaving:
            rows = np.isin(np.arange(self.num_slots), list(self._leaving))
            inputs = self._request, self.shared, self._state, rows
            self._request, self.shared, self._state = cancel(self.plan, *inputs)
            self._leaving.clear()
