"""The engine: sequences join and leave the slots of one running batch.

A step prefills a chunk of a prompt in its slot, dispatches a launch of the loop, and reads the
launch before it. So the device never waits for the host between two launches. A launch ends early
when a sequence ends and another one waits for its slot.

Who shares the batch, and when a sequence joined, does not change its text: noise has the address of
the sequence's seed and position, and every row is computed for itself.

With a pool of pages, sequences take pages as they grow. If none is left, the youngest sequence is
preempted: it gives its pages back and waits again. Its prompt is then prefilled together with what
it had generated, and the text goes on as if nothing had happened. Rounds end where launches end, so
no round is cut.

If a step fails, what the device held is lost, and who caused it is not known. All sequences that
ran start again from their texts, each one alone for a launch. One that fails alone ends by the
error. So do one whose prompt or grammar raises on the host, and one whose listener does, at once.
"""

import collections
import dataclasses
import heapq
import itertools
import queue
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import validation
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.token_fsm import FREE
from jspec.core.types import Params, Request, Shared
from jspec.engine import answers, chunks, program_memory, slots
from jspec.engine.answers import Answer
from jspec.engine.chunks import Chunk
from jspec.engine.launches import Launch
from jspec.engine.loop import DecodeState, cancel, init_shared, launch, prefill
from jspec.engine.masked_round import draft_alone, verify_alone
from jspec.engine.pages import Holding, Pool, table_of
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.engine.profiles import Profiles
from jspec.engine.sequences import SequenceParams, check_fit, check_priority
from jspec.engine.speculation import LaunchPlan, SpeculationController
from jspec.grammar import automata
from jspec.grammar.automata import Grammar
from jspec.grammar.followed import Follower, num_words
from jspec.util.messages import shown
from jspec.util.values import is_whole

_PATIENCE = 64  # steps without pages, before other engines of the pool must give some
_INTERRUPTIONS = KeyboardInterrupt, SystemExit  # of the process, and of no sequence
_STATUS = re.compile("(ABORTED|DATA_LOSS|INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN): ")
_BUSY_ROUNDS = 2  # of a launch while a prompt is prefilled: slots must not stay empty for long

Listener = Callable[[Answer], bool]


@dataclasses.dataclass(eq=False)
class Ticket:
    """A sequence that was given to an engine, and its answer so far."""

    sequence: SequenceParams
    answer: Answer
    holding: Holding
    rank: tuple[int, int]  # priority and arrival; the lowest runs first
    listener: Listener | None = None
    rounds: int | None = None
    scoring: Scoring | None = None
    num_preemptions: int = 0
    follower: Follower | None = None  # of a grammar on the host
    begin: float | None = None  # seconds of time.perf_counter, when it first left the queue
    num_prefilled: int = 0  # tokens of the text that the caches hold, before the first round
    num_to_prefill: int = 0  # the same, when rounds begin
    prompt_scores: list[Logprobs] = dataclasses.field(default_factory=list)  # of those, by chunk
    is_suspect: bool = False  # of having made a launch fail: it must run alone
    error: Exception | None = None  # that ended it

    def __post_init__(self):
        self._tokens = np.array(self.sequence.prompt, np.int32)  # with room behind the text
        self._length = len(self._tokens)

    @property
    def finished(self) -> bool:
        """True if the answer is complete."""
        return self.answer.finish_reason is not None

    @property
    def scored_prompt(self) -> Scoring | None:
        """The scoring of the prompt, if its scores are asked for and not known yet."""
        is_wanted = self.scoring and self.scoring.prompt and self.answer.prompt_logprobs is None
        return self.scoring if is_wanted else None

    @property
    def text(self) -> np.ndarray:
        """The prompt, and the answer so far, int32 [n]."""
        length = len(self.sequence.prompt) + len(self.answer.tokens)
        if length > len(self._tokens):
            self._tokens = np.pad(self._tokens[: self._length], (0, length))
        new = self.answer.tokens[self._length - len(self.sequence.prompt) :]
        self._tokens[self._length : length], self._length = new, length
        return self._tokens[:length]

    @property
    def num_left(self) -> int:
        """Tokens that are to be prefilled before the first round."""
        return self.num_to_prefill - self.num_prefilled

    @property
    def most_tokens(self) -> int:
        """The length of the longest text."""
        return len(self.sequence.prompt) + self.sequence.max_tokens

    def release(self) -> None:
        """Give all pages back. They hold no NaN if logits after the prompt were finite."""
        has_failed = self.answer.finish_reason == "error"
        if has_failed:
            self.holding.forget()
        self.holding.release(is_clean=len(self.answer.tokens) > 0 and not has_failed)

    def __lt__(self, other: "Ticket") -> bool:
        return self.rank < other.rank


@dataclasses.dataclass
class _Dispatched:
    """A launch that was not read yet."""

    launch: Launch
    members: list[Ticket | None]
    most_tokens: int  # that a sequence gains in it
    chosen: LaunchPlan
    begin: float | None  # seconds; None if something else ran before it


class Engine:
    """Runs sequences in a fixed number of slots. Several threads may not use it at once.

    Args:
      plan: static.
      params: weights.
      num_slots: sequences that run together.
      capacity: longest history, prompt included.
      profile: settings that all launches have.
      shared: the drafter's state that outlives calls; consumed. None for an empty one.
      pool: pages for the caches; None for caches of ``capacity`` tokens in every slot.
      max_num_queued: most sequences that wait for a slot; None for any number.
      on_launch: called with every launch that was read, as NumPy arrays.

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
        shared: Shared | None = None,
        pool: Pool | None = None,
        max_num_queued: int | None = None,
        on_launch: Callable[[Launch], None] | None = None,
    ):
        sizes = dict(num_slots=num_slots, capacity=capacity, max_num_queued=max_num_queued)
        for name, value in sizes.items():
            is_default = value is None and name == "max_num_queued"
            if not is_default and not is_whole(value, 1):
                raise ValueError(f"{name}={shown(value)} must be whole and at least 1.")
        validation.check_params(plan.target, plan.drafter, params)
        self.plan, self.params, self.pool = plan, params, pool
        self.num_slots, self.capacity, self.max_num_queued = num_slots, capacity, max_num_queued
        self.profile = Profile() if profile is None else profile
        self.shared = init_shared(plan) if shared is None else shared
        self.num_passed = 0  # nodes that the target's matmuls ran over, in launches that were read
        self.num_prefilled = 0  # tokens of texts that were prefilled
        self.prefills: collections.Counter[Chunk] = collections.Counter()  # passes, by size
        self.on_launch = on_launch
        self._arrivals = itertools.count()
        self._waiting: list[Ticket] = []  # a heap
        self._slots: list[Ticket | None] = [None] * num_slots
        self._leaving: set[int] = set()  # slots of texts that the host ended, to tell the device
        self._unread: collections.deque[_Dispatched] = collections.deque()
        self._grammars: tuple[Grammar, ...] = ()
        self._num_idle_steps = 0  # in a row, in which nothing ran
        self._speculation = SpeculationController(plan, num_slots) if plan.lengths else None
        self._is_alone = True  # whether launches alone ran since the last one
        self._has_launched = False  # whether a launch was dispatched since the engine was idle
        self._last_end: float | None = None  # of a launch, if it was seen to end
        self._request: Request | None = None
        self._state: DecodeState | None = None
        self._fitted: list[Ticket | None] = []  # for whom ``profile`` was chosen
        self._is_stale = False  # whether ``_request`` has other settings than ``profile``
        self.profiles = Profiles(self.profile)
        if pool is not None:
            pool.engines.add(self)
        program_memory.bound()

    @property
    def is_idle(self) -> bool:
        """True if no sequence waits or runs."""
        return not (self._has_waiting() or any(self._slots))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return sum(not ticket.finished for ticket in self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return sum(ticket is not None for ticket in self._slots)

    @property
    def tickets(self) -> list[Ticket]:
        """The sequences that wait or run."""
        tickets = [*self._waiting, *self._slots]
        return [ticket for ticket in tickets if ticket is not None and not ticket.finished]

    @property
    def launch_plans(self) -> list[LaunchPlan]:
        """A plan of every program that launches may have."""
        if self._speculation is None:
            return [LaunchPlan(self.plan)]
        return self._speculation.launch_plans

    def submit(
        self,
        sequence: SequenceParams,
        *,
        listener: Listener | None = None,
        rounds: int | None = None,
        scoring: Scoring | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Ticket:
        """Queue a sequence. Tickets run by priority, the lowest number first, then by arrival.

        Args:
          sequence: what to generate.
          listener: called by ``step`` with each longer answer; if it returns True, the text has
            ended there, as at a stop string.
          rounds: most rounds between two readings of the answer, of which the first comes after one
            round; None for the profile's.
          scoring: scores of tokens; None for none.
          priority: as vLLM's.
          cache_salt: sequences share pages only with those of the same salt.

        Raises:
          ValueError: the sequence does not fit the model, the engine's capacity or the pool, or
            ``priority`` is no whole number.
          queue.Full: ``max_num_queued`` sequences wait already.
        """
        check_priority(priority)
        check_fit([sequence], self.plan.target)
        total = len(sequence.prompt) + sequence.max_tokens
        if total > self.capacity:
            raise ValueError(
                f"prompt and max_tokens={sequence.max_tokens} are {total} tokens together, more "
                f"than the engine's capacity={self.capacity}; shorten one of them."
            )
        if self.pool is not None:
            self.pool.check_fit(total)
        if scoring is not None:
            scoring.check_fit(self.plan.target.vocab_size)
        self._check_room()
        begun, holding = answers.empty(self.plan.drafter.max_depth), Holding(self.pool, cache_salt)
        rank = priority, next(self._arrivals)
        grammar = sequence.followed_grammar
        follower = None if grammar is None else Follower(grammar)
        ticket = Ticket(sequence, begun, holding, rank, listener, rounds, scoring, 0, follower)
        heapq.heappush(self._waiting, ticket)
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """End a sequence that waits or runs. Its answer keeps what was read."""
        if ticket.finished:
            return
        ticket.answer = dataclasses.replace(ticket.answer, finish_reason="abort")
        if ticket in self._slots:
            self._leave(ticket)

    def run(self, sequences: Iterable[SequenceParams], **options: Any) -> list[Answer]:
        """Submit sequences with ``options`` of ``submit``; return their answers, in order.

        Raises:
          Exception: that ended a sequence; all have ended then.
        """
        tickets = [self.submit(sequence, **options) for sequence in sequences]
        while not all(ticket.finished for ticket in tickets):
            self.step()
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error
        return [ticket.answer for ticket in tickets]

    def step(self) -> None:
        """Admit, dispatch one launch, and read the one before it."""
        self._survive(self._step)

    def _survive(self, act: Callable[[], None]) -> None:
        """Run a part of a step; after an error, sequences start again, or end by it."""
        try:
            act()
        except _INTERRUPTIONS:
            if self._has_lost:  # Ctrl-C inside a call that had consumed its inputs
                self._start_again()
            raise
        except BaseException as error:  # panics of Rust are no Exception
            self._recover(error)

    def _step(self) -> None:
        self._tell_leaving()
        self._admit()
        if self._follows:
            self._read_all_but(0)  # the host must know the texts
            self._tell_leaving()
        rounds = self._rounds
        self._grow(rounds)
        is_running = bool(self._ready)
        self._num_idle_steps = 0 if is_running else self._num_idle_steps + 1
        if is_running:
            self._dispatch(rounds)
        self._read_all_but(is_running)

    def warm_up(self, sequences: Sequence[SequenceParams], **options: Any) -> None:
        """Compile what ``sequences`` need: ``run`` them with every length of the drafts."""
        if self._speculation is None:
            self.run(sequences, **options)
            return
        try:
            for length in self.plan.lengths:
                self._speculation.pinned = length
                self.run(sequences, **options)
        finally:
            self._speculation.pinned = None

    def settle(self) -> None:
        """Hand the texts that the host ended to a drafter with shared state."""
        self._survive(self._tell_leaving)

    def preempt(self) -> bool:
        """Free the pages of the youngest sequence, if any are held.

        Launches that are not read come first: texts must be complete, and some may have ended.
        """
        if self._unread:
            self._read_all_but(0)
        elif any(self._slots):
            ticket = max(ticket for ticket in self._slots if ticket is not None)
            ticket.num_preemptions += 1
            self._leave(ticket)
            heapq.heappush(self._waiting, ticket)
        else:
            return False
        return True

    def _check_room(self) -> None:
        if self.max_num_queued is not None and self.num_waiting >= self.max_num_queued:
            raise queue.Full(
                f"max_num_queued={self.max_num_queued} sequences wait already; submit this one "
                "later, or allow more."
            )

    # ----------------------------------------------------------------------------- those who join

    def _admit(self) -> None:
        """Prefill those who wait: between two launches a chunk, and before the first one all.

        A sequence that others run with waits for a short chunk at most. Before the first launch
        since the engine was idle, all prompts that it has slots for are prefilled, unless somebody
        reads a text while it grows.
        """
        if not any(self._slots):
            self._has_launched = False
        while True:
            self._take_slots()
            if not self._prefilling:
                break
            self._prefill()
            is_awaited = any(ticket.rounds for ticket in self._ready)
            if self._ready and (self._has_launched or is_awaited):
                break

    @property
    def _prefilling(self) -> list[Ticket]:
        """The sequences in slots whose texts are to be prefilled, in their order."""
        return sorted(ticket for ticket in self._slots if ticket and ticket.num_left)

    @property
    def _ready(self) -> list[Ticket]:
        """The sequences in slots that take part in rounds."""
        return [ticket for ticket in self._members if ticket is not None]

    @property
    def _members(self) -> list[Ticket | None]:
        """The sequences that take part in rounds, by slot."""
        return [ticket if ticket and not ticket.num_left else None for ticket in self._slots]

    @property
    def _free_slots(self) -> list[int]:
        slots = enumerate(self._slots)
        return [slot for slot, ticket in slots if ticket is None and slot not in self._leaving]

    def _has_waiting(self) -> bool:
        """Drop what ended while it waited; return whether anything waits."""
        while self._waiting and self._waiting[0].finished:
            heapq.heappop(self._waiting)
        return bool(self._waiting)

    def _may_join(self) -> bool:
        """Return whether anything waits that may run with those who run."""
        running = [ticket for ticket in self._slots if ticket is not None]
        if not self._has_waiting() or any(ticket.is_suspect for ticket in running):
            return False
        return not (running and self._waiting[0].is_suspect)

    def _take_slots(self) -> None:
        """Let those who wait have free slots, and pages for their texts."""
        while self._free_slots and self._may_join():
            ticket = self._next_waiting()
            if ticket is None:
                break
            num_cached = self._take_first_pages(ticket)
            if num_cached is None:
                heapq.heappush(self._waiting, ticket)
                if not any(self._slots) and not self._is_relieved():
                    self._refuse_the_impossible()
                break
            self._seat(ticket, self._free_slots[0], num_cached)

    def _next_waiting(self) -> Ticket | None:
        """Take the next sequence from the queue, but for those that wait for a prefix.

        None: there is none. A sequence waits while another one prefills what its text begins with.
        """
        behind = []  # sequences that wait for a prefix
        while len(behind) < len(self._free_slots) and self._may_join():
            ticket = heapq.heappop(self._waiting)
            if not self._waits_for_prefix(ticket):
                break
            behind.append(ticket)
        else:
            ticket = None
        for each in behind:
            heapq.heappush(self._waiting, each)
        return ticket

    def _waits_for_prefix(self, ticket: Ticket) -> bool:
        """Return whether another sequence prefills the next page of the text just now."""
        if ticket.scored_prompt is not None:
            return False
        others = [other.holding for other in self._prefilling]
        return bool(others) and ticket.holding.follows(ticket.text, others)

    def _seat(self, ticket: Ticket, slot: int, num_cached: int) -> None:
        """Let a sequence have a slot; one that cannot be written into it ends by the error."""
        if ticket.begin is None:
            ticket.begin = time.perf_counter()
            ticket.answer = dataclasses.replace(ticket.answer, num_cached_tokens=num_cached)
        ticket.num_prefilled, ticket.num_to_prefill = num_cached, len(ticket.text) - 1
        ticket.prompt_scores.clear()
        grammars = self._grammars
        self._slots[slot] = ticket
        try:
            self._write(ticket, slot)
        except BaseException as error:  # panics of Rust are no Exception
            if self._has_lost or _is_of_device(error):
                raise
            self._slots[slot], self._grammars, self._is_stale = None, grammars, True
            ticket.release()
            if isinstance(error, _INTERRUPTIONS):
                heapq.heappush(self._waiting, ticket)
                raise
            self._fail(ticket, _fault(error))

    def _write(self, ticket: Ticket, slot: int) -> None:
        """Write a sequence into its slot on the device."""
        generated = [ticket.answer.tokens if each is ticket else () for each in self._slots]
        request, streams, offsets = self._request_of(generated)
        size, has_pages = slots.buffer_size(self.plan, self.capacity), self.pool is not None
        if self._state is None:
            inputs = self.plan, self.params, self.num_slots, size, has_pages
            self._state = slots.allocate(*inputs)
        text = np.zeros(size, np.int32)
        text[: len(ticket.text)] = ticket.text
        self._is_alone = False
        self._request, self._state = slots.seat(
            self.plan,
            self.params,
            _with_grammar_states(self._state, request, offsets),
            request,
            streams,
            slot=np.int32(slot),
            text=text,
            cached=np.int32(ticket.num_prefilled),
            ready=np.bool_(not ticket.num_left),
            has_pages=has_pages,
        )
        self._is_stale = False
        if self._speculation is not None:
            self._speculation.forget(slot)

    def _prefill(self) -> None:
        """Prefill a chunk of the prompts that wait."""
        tickets = self._prefilling
        scoring = tickets[0].scored_prompt
        if scoring is None:
            tickets = [ticket for ticket in tickets if ticket.scored_prompt is None]
        most = chunks.BUSY if self._has_launched and self._ready else chunks.TOTALS[-1]
        sizes = chunks.sizes(self.num_slots, scoring, most)
        left, room = [ticket.num_left for ticket in tickets], None
        if self.pool is None:
            buffer = slots.buffer_size(self.plan, self.capacity)
            room = [buffer - ticket.num_prefilled for ticket in tickets]
        size = chunks.choose(left, sizes, room)
        tickets = tickets[: size.rows]
        starts = [ticket.num_prefilled for ticket in tickets]
        arrays = chunks.assemble([ticket.text for ticket in tickets], starts, size)
        rows = np.full(size.rows, self.num_slots, np.int32)  # padding is beyond the batch
        rows[: len(tickets)] = [self._slots.index(ticket) for ticket in tickets]
        # Leave the states of grammars out: they would compile another program.
        history = self._state.history
        state = self._state.replace(history=history.replace(state=None))
        state = state if self.pool is None else self.pool.lend(state)
        table = self._table_of(self._slots)
        self._is_alone = False
        state, scores = prefill(self.plan, self.params, state, *arrays, rows, scoring, table)
        state = state if self.pool is None else self.pool.take_back(state)
        self._state = state.replace(history=state.history.replace(state=history.state))
        self.prefills[size] += 1
        for row, ticket in enumerate(tickets):
            count = int(arrays.valid[row])
            self.num_prefilled += count
            ticket.num_prefilled += count
            ticket.holding.advance(ticket.text, ticket.num_prefilled)  # for programs after this one
            if scoring is not None:
                self._score_prompt(ticket, scoring, scores)

    def _score_prompt(self, ticket: Ticket, scoring: Scoring, scores: Logprobs) -> None:
        """Add the scores of a chunk [1, C]; the prompt has them once it is complete."""
        ticket.prompt_scores.append(scores)
        if not ticket.num_left:
            joined = answers.prompt_scores(scoring, ticket.prompt_scores)
            joined = joined[: len(ticket.sequence.prompt) - 1]
            ticket.answer = dataclasses.replace(ticket.answer, prompt_logprobs=joined)
            ticket.prompt_scores.clear()

    def _is_relieved(self) -> bool:
        """Have another engine of the pool free pages if nothing of this one ran for long.

        The other one may not be stepped: its reader may wait for this one.
        """
        return self._num_idle_steps >= _PATIENCE and self._take_from_others()

    def _take_from_others(self) -> bool:
        return any(engine.preempt() for engine in self.pool.engines if engine is not self)

    def _refuse_the_impossible(self) -> None:
        """End the next sequence if all pages do not suffice for it."""
        if self.pool.table.num_used == 0 and self._has_waiting():
            self._fail(heapq.heappop(self._waiting), self._no_memory())

    def _no_memory(self) -> MemoryError:
        most = (self.pool.most - 1) * self.pool.table.size
        return MemoryError(
            f"the memory of the KV cache suffices for {most} tokens, and the text became longer; "
            "ask for less, or give the cache more memory."
        )

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a sequence by an error; the others go on."""
        ticket.error = error
        ticket.answer = dataclasses.replace(ticket.answer, finish_reason="error")
        if ticket in self._slots:
            self._leave(ticket)

    def _take_first_pages(self, ticket: Ticket) -> int | None:
        """Take pages for the text so far, and leave one for each sequence that may need more.

        Return the tokens that known pages hold; None if there are not enough pages.
        """
        others = [each for each in self._slots if each is not None]
        spare = sum(each.holding.lacks(each.most_tokens) for each in others)
        reads_known = ticket.scored_prompt is None  # scores need a pass over the prompt
        return ticket.holding.begin(ticket.text, reads_known=reads_known, spare=spare)

    def _choose_profile(self) -> None:
        """Choose the profile for who is in slots."""
        if self._slots == self._fitted:
            return
        tickets = [ticket for ticket in self._slots if ticket is not None]
        scorings = [ticket.scoring for ticket in tickets]
        needed = self.profiles.needed([ticket.sequence for ticket in tickets], scorings)
        before, self.profile = self.profile, self.profiles.choose(needed, self.profile)
        self._fitted = [*self._slots]
        if before != self.profile:
            program_memory.bound()
        self._is_stale |= before.without_scores() != self.profile.without_scores()

    def _renew_request(self) -> None:
        """Make the request for the next launch if the profile has changed."""
        self._choose_profile()
        if self._is_stale:
            request, streams, offsets = self._request_of()
            self._state = _with_grammar_states(self._state, request, offsets)
            self._request, self._is_stale = slots.with_keys(request, streams), False

    def _request_of(
        self, generated: Sequence[Sequence[int]] = ()
    ) -> tuple[Request, np.ndarray, np.ndarray]:
        """Return the request of the slots, the streams, and the offsets of the grammars' states."""
        self._choose_profile()
        rows = [None if ticket is None else ticket.sequence for ticket in self._slots]
        used = {row.grammar: None for row in rows if row is not None and row.grammar is not None}
        remaining = [each for each in self._grammars if each in used]
        grammars = tuple(dict.fromkeys((*remaining, *used)))
        old, new = map(automata.first_states, (self._grammars, grammars))
        offsets = np.zeros(self.num_slots, np.int32)
        for slot, row in enumerate(rows):
            if row is not None and row.grammar in old:
                offsets[slot] = new[row.grammar] - old[row.grammar]
        vocab_size = self.plan.target.vocab_size
        request, streams = request_of(rows, self.profile, vocab_size, grammars, generated)
        self._grammars = grammars
        return request, streams, offsets

    def _table_of(self, members: Sequence[Ticket | None]) -> np.ndarray | None:
        holdings = [None if ticket is None else ticket.holding for ticket in members]
        return table_of(holdings, self.pool, self.capacity)

    # ------------------------------------------------------------------------------ those who run

    @property
    def _rounds(self) -> int:
        """Return the most rounds of the next launch."""
        if self._follows:
            return 1
        running = self._ready
        begun = [ticket for each in self._unread for ticket in each.members]
        if any(each.rounds and not each.answer.rounds and each not in begun for each in running):
            return 1  # somebody waits for a first text
        rounds = (ticket.rounds or self.profile.rounds for ticket in running)
        rounds = min(rounds, default=self.profile.rounds)
        return min(rounds, _BUSY_ROUNDS) if self._prefilling else rounds

    def _grow(self, rounds: int) -> None:
        """Give every sequence the pages that it may fill; preempt the youngest if they run out."""
        ahead = sum(each.most_tokens for each in self._unread)
        gained = ahead + rounds * (self.plan.drafter.max_depth + 1)
        for ticket in sorted(self._ready):
            length = len(ticket.sequence.prompt) + len(ticket.answer.tokens)
            needed = min(length + gained, ticket.most_tokens)
            while ticket in self._slots and not ticket.holding.grow(needed):
                is_alone = not self._unread and sum(map(bool, self._slots)) == 1
                if not is_alone:
                    self.preempt()
                elif not self._take_from_others():
                    self._fail(ticket, self._no_memory())
        self._tell_leaving()

    def _dispatch(self, rounds: int) -> None:
        """Start a launch; it ends where a sequence ends if another one waits for the slot."""
        members = self._members
        chosen, is_wanted = LaunchPlan(self.plan), self._has_waiting()
        if self._speculation is not None:
            chosen = self._speculation.choose(np.array([ticket is not None for ticket in members]))
            rounds = min(rounds, chosen.rounds or rounds)
            is_wanted |= self._speculation.by_rows
        watched = np.array([ticket is not None and is_wanted for ticket in members])
        self._renew_request()
        profile = dataclasses.replace(self.profile, follows=self._follows)
        state = self._state if self.pool is None else self.pool.lend(self._state)
        inputs = self.params, self._request, self.shared, state, np.int32(rounds), watched
        table = self._table_of(self._slots)
        if self._follows:
            self.shared, state, ran = self._followed(chosen.plan, profile, state, table)
            self._is_alone = False
        else:
            self.shared, state, ran = launch(chosen.plan, profile, *inputs, table, chosen.budget)
        self.profiles.add(profile)
        self._state = state if self.pool is None else self.pool.take_back(state)
        most_tokens = rounds * (self.plan.drafter.max_depth + 1)
        begin = time.perf_counter() if self._is_alone else None
        self._unread.append(_Dispatched(ran, members, most_tokens, chosen, begin))
        self._is_alone = self._has_launched = True

    @property
    def _follows(self) -> bool:
        """True if the host follows the grammar of a row."""
        return any(ticket.follower for ticket in self._ready)

    def _followed(
        self, plan: Plan, profile: Profile, state: DecodeState, table: np.ndarray | None
    ) -> tuple[Shared, DecodeState, Launch]:
        """Run a round in two programs; in between the host makes masks for the draft."""
        inputs = self.params, self._request, self.shared
        state, halfway = draft_alone(plan, *inputs, state, table)
        draft = halfway.whole
        tokens, parents, valid = jax.device_get((draft.tokens, draft.parents, draft.valid))
        parents = np.broadcast_to(parents, tokens.shape)
        used = np.array([bool(ticket and ticket.follower) for ticket in self._members])
        words = num_words(self.plan.target.vocab_size)
        bits = np.full((*tokens.shape, words), 0xFFFFFFFF, np.uint32)
        for slot in np.flatnonzero(used):
            ticket = self._slots[slot]
            nodes = tokens[slot], parents[slot], valid[slot]
            try:
                bits[slot] = ticket.follower.masks(ticket.answer.tokens, *nodes)
            except _INTERRUPTIONS:
                raise
            except BaseException as error:  # panics of Rust are no Exception
                self._fail(ticket, _fault(error))
        return verify_alone(plan, profile, *inputs, state, halfway, bits, used, table)

    def _read_all_but(self, count: int) -> None:
        """Read launches until ``count`` are left, which are the last ones."""
        while len(self._unread) > count:
            ran = self._brought(self._unread[0])
            self._read(self._unread.popleft(), ran)

    def _read(self, dispatched: _Dispatched, ran: Launch) -> None:
        """Add the results of a launch to the answers of its members."""
        self.num_passed += int(ran.passed.sum())
        for slot, ticket in enumerate(dispatched.members):
            if ticket is None or ticket.finished:
                continue
            ticket.is_suspect = False
            limits = ticket.sequence.stop_token_ids, ticket.sequence.max_tokens
            asked = ran.scored_as(ticket.scoring)
            ticket.answer = answers.extended(ticket.answer, asked, slot, *limits)
            ticket.holding.advance(ticket.text, int(ran.num_cached[slot]))
            has_ended = self._has_heard(ticket)
            if ticket.error is not None:
                continue
            if ticket.finished:
                self._slots[slot] = None
                ticket.release()
            elif has_ended:
                ticket.answer = dataclasses.replace(ticket.answer, finish_reason="stop")
                self._leave(ticket)
        if self.on_launch is not None:
            self.on_launch(ran)

    def _brought(self, dispatched: _Dispatched) -> Launch:
        """Bring a launch to the host; learn what it took, if it was seen to begin and to end."""
        is_late = dispatched.launch.rounds.is_ready()
        ran, end = jax.device_get(dispatched.launch), time.perf_counter()
        if self._speculation is not None:
            begin, seconds = dispatched.begin, None
            if begin is not None and self._last_end is not None and not is_late:
                seconds = end - max(begin, self._last_end)
            pairs = zip(dispatched.members, self._slots, strict=True)
            rows = np.array([was is not None and was is now for was, now in pairs])
            self._speculation.learn(dispatched.chosen, ran, rows, seconds)
        self._last_end = None if is_late else end
        return ran

    def _has_heard(self, ticket: Ticket) -> bool:
        """Tell the listener; return whether it ended the text."""
        try:
            return ticket.listener is not None and ticket.listener(ticket.answer)
        except _INTERRUPTIONS:
            raise
        except BaseException as error:  # panics of Rust are no Exception
            self._fail(ticket, error if isinstance(error, Exception) else _fault(error))
            return False

    # ---------------------------------------------------------------------------- those who leave

    def _leave(self, ticket: Ticket) -> None:
        slot = self._slots.index(ticket)
        self._slots[slot] = None
        self._leaving.add(slot)
        ticket.release()  # to programs after the one that ends the row: see _tell_leaving

    def _tell_leaving(self) -> None:
        """End the rows of texts that the host ended, before their slots are taken again."""
        if self._leaving:
            rows = np.isin(np.arange(self.num_slots), list(self._leaving))
            inputs = self._request, self.shared, self._state, rows
            self._request, self.shared, self._state = cancel(self.plan, *inputs)
            self._leaving.clear()

    # ------------------------------------------------------------------------------------- faults

    @property
    def _has_lost(self) -> bool:
        """True if buffers were consumed by a call that returned nothing."""
        mine = jax.tree.leaves((self._state, self.shared))
        arrays = (leaf for leaf in mine if isinstance(leaf, jax.Array))
        is_lost = any(leaf.is_deleted() for leaf in arrays)
        return is_lost or (self.pool is not None and self.pool.is_lost)

    def _recover(self, error: BaseException) -> None:
        """Go on after a step that failed."""
        suspects = self._start_again(error)
        for ticket in suspects:
            ticket.is_suspect = True
        if len(suspects) == 1:
            self._fail(suspects[0], _fault(error))
        elif not suspects:
            raise error

    def _start_again(self, error: BaseException | None = None) -> list[Ticket]:
        """Queue all who ran, and return them.

        If buffers are lost, so do the other engines of the pool, and a drafter's shared state
        begins anew. After an error of the host, pages and shared state stay.
        """
        if not self._has_lost and error is not None and not _is_of_device(error):
            return self._queue_again()
        others = [] if self.pool is None else [each for each in self.pool.engines if each != self]
        for engine in others:
            engine._queue_again()
        tickets = self._queue_again()
        self.shared = init_shared(self.plan)
        if self.pool is not None:
            self.pool.renew()
        return tickets

    def _queue_again(self) -> list[Ticket]:
        """Queue and return all who ran, and drop what the device held of them."""
        tickets = [ticket for ticket in self._slots if ticket is not None]
        self._slots = [None] * self.num_slots
        self._request = self._state = None
        self._unread.clear()
        self._leaving.clear()
        for ticket in tickets:
            ticket.release()
            if not ticket.finished:
                heapq.heappush(self._waiting, ticket)
        return [ticket for ticket in tickets if not ticket.finished]


def _is_of_device(error: BaseException) -> bool:
    """Return whether a program failed while it ran; later uses of its results say so too."""
    is_status = isinstance(error, ValueError) and _STATUS.match(str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(is_status)


def _fault(error: BaseException) -> Exception:
    """Return the error of a sequence that failed alone.

    A check that refused it stays a ValueError; other errors become RuntimeError.
    """
    if isinstance(error, ValueError) and not _is_of_device(error):
        return error
    first, remedy = str(error).strip().partition("\n")[0], "what it asks for may be at fault"
    if "RESOURCE_EXHAUSTED" in str(error):
        remedy = "there is too little memory; run fewer sequences together, or give the cache less"
    elif _is_of_device(error):
        remedy = "its logits processors or the device may be at fault"
    else:
        first = f"{type(error).__name__}: {first}"
    fault = RuntimeError(f"a launch failed while this sequence ran alone: {first}; {remedy}.")
    fault.__cause__ = error
    return fault


def _with_grammar_states(state: DecodeState, request: Request, offsets: np.ndarray) -> DecodeState:
    """Return ``state`` with states of grammars if ``request`` has any, and else without.

    Rows without a grammar are in state ``FREE``. States of others have moved by ``offsets`` [B].
    """
    history = state.history
    if request.sampling.automaton is None:
        history = history.replace(state=None)
    elif history.state is None:
        history = history.replace(state=np.full(history.length.shape, FREE, np.int32))
    elif offsets.any():
        moved = jnp.where(history.state == FREE, FREE, history.state + offsets)
        history = history.replace(state=moved)
    return state.replace(history=history)
