"""Admission: sequences that wait get slots and pages, and their prompts are prefilled there."""

from jspec.engine import faults
from jspec.engine.runner import Runner
from jspec.engine.scheduler import Scheduler
from jspec.engine.sequence import EngineSequence
from jspec.util.values import bucket


class Admission:
    """Admits the sequences of a scheduler to the rows of a runner.

    Args:
      scheduler: decides who is next.
      runner: has the rows.
      capacity: longest history of the engine.
      is_pinned: as of ``Engine``.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, capacity: int, *, is_pinned: bool):
        self._scheduler, self._runner, self._capacity = scheduler, runner, capacity
        self.is_pinned = is_pinned
        self.num_prefilled = 0  # tokens of texts that were prefilled

    def admit(self) -> None:
        """Prefill those who wait: between two launches a pass, and before the first one all."""
        scheduler, runner = self._scheduler, self._runner
        self._resize()
        while True:
            while (sequence := scheduler.admit(runner.capacity)) is not None:
                self._seat(sequence)
            prefill = scheduler.next_prefill(runner.buffer_size)
            if prefill is None:
                break
            tables = scheduler.tables(self._capacity)
            runner.compile_launch(scheduler.slots, tables)
            scores = runner.prefill(prefill, tables)
            scheduler.advance(prefill)
            runner.keep(prefill.sequences)
            self.num_prefilled += int(prefill.arrays.valid.sum())
            if scores is not None:
                prefill.sequences[0].add_prompt_scores(scores)
            if scheduler.may_launch:
                break

    def _resize(self) -> None:
        """Have as many rows, and without pages as long ones, as the sequences need."""
        scheduler, runner = self._scheduler, self._runner
        width, capacity = scheduler.num_slots, self._capacity
        if not self.is_pinned:
            width, longest = scheduler.wanted()
            capacity = capacity if runner.pool is not None else min(bucket(longest), capacity)
        if any(scheduler.slots):
            if width > len(scheduler.slots):
                scheduler.resize(width)
                runner.widen(width)
        elif width and (width, capacity) != (len(scheduler.slots), runner.capacity):
            scheduler.resize(width)
            runner.start_anew(capacity)

    def _seat(self, sequence: EngineSequence) -> None:
        """Write a sequence into its slot; one that cannot be written ends by the error."""
        try:
            self._runner.seat(sequence, self._scheduler.slots)
        except BaseException as error:  # panics of Rust are no Exception
            if self._runner.is_lost or faults.is_of_device(error):
                raise
            self._scheduler.restart([sequence])
            if isinstance(error, faults.INTERRUPTIONS):
                raise
            sequence.fail(faults.of_sequence(error))
