"""The scheduler: which sequences run, what is prefilled next, and what the next launch does.

It is plain data on the host. It never touches an array of the device, and its decisions are values.
"""

import heapq
import itertools
import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jspec.core.logprobs import Scoring
from jspec.engine import block_table, chunks, faults
from jspec.engine.block_pool import BlockPool
from jspec.engine.block_table import Tables
from jspec.engine.chunks import Arrays, Chunk
from jspec.engine.sequence import EngineSequence
from jspec.util.values import bucket

_BUSY_ROUNDS = 2  # rounds of a launch during a prefill: slots must not stay empty for long


class Prefill(NamedTuple):
    """The next prefill pass."""

    size: Chunk
    sequences: list[EngineSequence]
    arrays: Arrays
    rows: np.ndarray  # int32 [Q], slots; beyond the batch for padding
    scoring: Scoring | None


class Scheduler:
    """Decides by priority and arrival.

    Args:
      num_slots: most sequences that run together.
      pool: pages of the caches; None for caches without pages.
      max_num_queued: most sequences that wait for a slot; None for any number.
    """

    def __init__(self, num_slots: int, pool: BlockPool | None, max_num_queued: int | None = None):
        self.num_slots, self.pool, self.max_num_queued = num_slots, pool, max_num_queued
        self.slots: list[EngineSequence | None] = [None] * num_slots
        self.leaving: set[int] = set()  # slots of texts that the host ended and no launch has yet
        self._waiting: list[EngineSequence] = []  # a heap
        self._arrivals = itertools.count()
        self._has_launched = False  # whether a launch was dispatched since no slot was taken

    # ------------------------------------------------------------------------------- who is where

    @property
    def is_idle(self) -> bool:
        """True if no sequence waits or runs."""
        return not (self.has_waiting or any(self.slots))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return sum(not sequence.finished for sequence in self._waiting)

    @property
    def seated(self) -> list[EngineSequence]:
        """The sequences in slots."""
        return [sequence for sequence in self.slots if sequence is not None]

    @property
    def sequences(self) -> list[EngineSequence]:
        """The sequences that wait or run."""
        return [each for each in (*self._waiting, *self.seated) if not each.finished]

    @property
    def members(self) -> list[EngineSequence | None]:
        """The sequences that take part in rounds, by slot."""
        return [each if each and not each.num_left else None for each in self.slots]

    @property
    def ready(self) -> list[EngineSequence]:
        """The sequences that take part in rounds."""
        return [sequence for sequence in self.members if sequence is not None]

    @property
    def prefilling(self) -> list[EngineSequence]:
        """The sequences in slots whose texts are to be prefilled, in their order."""
        return sorted(sequence for sequence in self.seated if sequence.num_left)

    @property
    def follows(self) -> bool:
        """True if the host follows the grammar of a row."""
        return any(sequence.follower for sequence in self.ready)

    @property
    def has_waiting(self) -> bool:
        """True if anything waits. Drops what ended while it waited."""
        while self._waiting and self._waiting[0].finished:
            heapq.heappop(self._waiting)
        return bool(self._waiting)

    @property
    def _free_slots(self) -> list[int]:
        slots = enumerate(self.slots)
        return [slot for slot, each in slots if each is None and slot not in self.leaving]

    # ------------------------------------------------------------------------ those who wait, join

    def rank(self, priority: int) -> tuple[int, int]:
        """Return the rank of a sequence that arrives now."""
        return priority, next(self._arrivals)

    def check_room(self) -> None:
        """Raise queue.Full if as many sequences wait as may."""
        if self.max_num_queued is not None and self.num_waiting >= self.max_num_queued:
            raise queue.Full(
                f"max_num_queued={self.max_num_queued} sequences wait already; submit this one "
                "later, or allow more."
            )

    def queue(self, sequence: EngineSequence) -> None:
        """Have a sequence wait for a slot."""
        heapq.heappush(self._waiting, sequence)

    def wanted(self) -> tuple[int, int]:
        """Return the slots for all sequences, 0 or a power of two, and their longest text."""
        lengths = [sequence.most_tokens for sequence in self.sequences]
        width = bucket(len(lengths), smallest=1) if lengths else 0
        return min(width, self.num_slots), max(lengths, default=0)

    def resize(self, width: int) -> None:
        """Have ``width`` slots: more, or any number while none is taken."""
        self.slots = (self.slots + [None] * width)[:width]

    def admit(self, most_tokens: int) -> EngineSequence | None:
        """Give the next sequence a slot and pages; None if none may join now.

        One that all pages do not suffice for ends by the error. ``most_tokens`` is the length of
        the buffers' longest text.
        """
        if not any(self.slots):
            self._has_launched = False
        while self._free_slots and self._may_join(most_tokens):
            sequence = self._next_waiting(most_tokens)
            if sequence is None:
                return None
            # Leave a page for each sequence that may need more. Scores need a pass over the prompt.
            spare = sum(each.table.lacks(each.most_tokens) for each in self.seated)
            reads_cached = sequence.scored_prompt is None
            num_cached = sequence.table.allocate(
                sequence.text, reads_cached=reads_cached, spare=spare
            )
            if num_cached is not None:
                self._seat(sequence, num_cached)
                return sequence
            if any(self.slots):
                self.queue(sequence)
                return None
            self.fail(sequence, self.no_memory())
        return None

    def _seat(self, sequence: EngineSequence, num_cached: int) -> None:
        if sequence.begin is None:
            sequence.begin = time.perf_counter()
            sequence.answer = replace(sequence.answer, num_cached_tokens=num_cached)
        sequence.num_prefilled, sequence.num_to_prefill = num_cached, sequence.length - 1
        sequence.prompt_scores.clear()
        sequence.slot, sequence.has_launched = self._free_slots[0], False
        self.slots[sequence.slot] = sequence

    def _may_join(self, most_tokens: int) -> bool:
        """Return whether anything waits that may run with those who run."""
        if not self.has_waiting or any(sequence.is_suspect for sequence in self.seated):
            return False
        first = self._waiting[0]
        return first.most_tokens <= most_tokens and not (any(self.slots) and first.is_suspect)

    def _next_waiting(self, most_tokens: int) -> EngineSequence | None:
        """Take the next sequence from the queue, but for those that wait for a prefix.

        A sequence waits while another one prefills what its text begins with.
        """
        behind, tables = [], [sequence.table for sequence in self.prefilling]
        while len(behind) < len(self._free_slots) and self._may_join(most_tokens):
            sequence = heapq.heappop(self._waiting)
            is_scored = sequence.scored_prompt is not None
            if is_scored or not tables or not sequence.table.follows(sequence.text, tables):
                break
            behind.append(sequence)
        else:
            sequence = None
        for each in behind:
            self.queue(each)
        return sequence

    # ------------------------------------------------------------------------------- what is next

    def next_prefill(self, buffer_size: int) -> Prefill | None:
        """Return the next prefill pass, in histories of ``buffer_size``; None if there is none.

        A sequence that others run with waits for a short pass at most.
        """
        sequences = self.prefilling
        if not sequences:
            return None
        scoring = sequences[0].scored_prompt
        if scoring is None:
            sequences = [each for each in sequences if each.scored_prompt is None]
        most = chunks.BUSY if self._has_launched and self.ready else chunks.TOTALS[-1]
        starts = [sequence.num_prefilled for sequence in sequences]
        ends = [sequence.prefill_end for sequence in sequences]
        left = [end - start for start, end in zip(starts, ends, strict=True)]
        room = None if self.pool is not None else [buffer_size - start for start in starts]
        size = chunks.choose(left, chunks.sizes(len(self.slots), scoring, most), room)
        sequences = sequences[: size.rows]
        texts = [sequence.text for sequence in sequences]
        rows = np.full(size.rows, len(self.slots), np.int32)
        rows[: len(sequences)] = [sequence.slot for sequence in sequences]
        arrays = chunks.assemble(texts, starts[: size.rows], size, ends[: size.rows])
        for sequence, count in zip(sequences, arrays.valid, strict=False):
            if not sequence.table.grow(sequence.num_prefilled + int(count)):
                if len(self.seated) == 1:
                    self.fail(sequence, self.no_memory())
                else:
                    self.preempt(self.prefilling)
                return self.next_prefill(buffer_size)
        return Prefill(size, sequences, arrays, rows, scoring)

    def advance(self, prefill: Prefill) -> None:
        """Count a pass that was dispatched; its pages are cached for programs after it."""
        for sequence, count in zip(prefill.sequences, prefill.arrays.valid, strict=False):
            sequence.num_prefilled += int(count)
            sequence.table.advance(sequence.text, sequence.num_prefilled)

    @property
    def may_launch(self) -> bool:
        """True if a launch goes before the next prefill pass.

        Before the first launch since no slot was taken, all prompts are prefilled that there are
        slots for, unless somebody reads a text while it grows.
        """
        return bool(self.ready) and (self._has_launched or any(each.rounds for each in self.ready))

    def rounds(self, most: int) -> int:
        """Return the most rounds of the next launch, up to ``most``."""
        if self.follows:
            return 1
        if any(x.rounds and not x.answer.rounds and not x.has_launched for x in self.ready):
            return 1  # A caller waits for a first text.
        rounds = min((each.rounds or most for each in self.ready), default=most)
        return min(rounds, _BUSY_ROUNDS) if self.prefilling else rounds

    def reserve(self, gained: int) -> EngineSequence | None:
        """Give all that run pages for ``gained`` more tokens; return one that lacks some."""
        for sequence in sorted(self.ready):
            if not sequence.table.grow(min(sequence.length + gained, sequence.most_tokens)):
                return sequence
        return None

    def tables(self, most_tokens: int) -> Tables | None:
        """Return the pages of all slots, for texts of up to ``most_tokens``."""
        tables = [None if sequence is None else sequence.table for sequence in self.slots]
        return block_table.rows_of(tables, self.pool, most_tokens)

    def watched(self, *, always: bool = False) -> np.ndarray:
        """Return bool [B]: rows whose end ends a launch, as another sequence waits for a slot."""
        is_wanted = always or self.has_waiting
        return np.array([sequence is not None and is_wanted for sequence in self.members])

    def dispatched(self) -> None:
        """Count a launch that was dispatched."""
        self._has_launched = True
        for sequence in self.ready:
            sequence.has_launched = True

    # -------------------------------------------------------------------------------- those who go

    def finish(self, sequence: EngineSequence) -> None:
        """Free the slot and the pages of a sequence that the device ended."""
        self.slots[sequence.slot] = None
        sequence.slot = None
        sequence.free()

    def leave(self, sequence: EngineSequence) -> None:
        """Free the slot and the pages of a sequence, whose row the device is to end."""
        if sequence.slot is not None:
            self.leaving.add(sequence.slot)
            self.finish(sequence)

    def fail(self, sequence: EngineSequence, error: Exception) -> None:
        """End a sequence by an error; the others go on."""
        sequence.fail(error)
        self.leave(sequence)

    def preempt(self, among: Sequence[EngineSequence] | None = None) -> bool:
        """Free slot and pages of the youngest sequence; return False if there is none."""
        sequence = max(self.seated if among is None else among, default=None)
        if sequence is not None:
            sequence.num_preemptions += 1
            self.leave(sequence)
            self.queue(sequence)
        return sequence is not None

    def restart(self, sequences: Iterable[EngineSequence]) -> list[EngineSequence]:
        """Queue sequences of slots that the device does not have; return the unfinished ones."""
        unfinished = []
        for sequence in sequences:
            self.finish(sequence)
            if not sequence.finished:
                self.queue(sequence)
                unfinished.append(sequence)
        return unfinished

    def no_memory(self) -> MemoryError:
        """Return the error of a text that all pages do not suffice for."""
        return faults.of_memory(self.pool.most_tokens)
