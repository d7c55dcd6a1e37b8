"""Recovery after a step that failed: who ran starts again, and one that fails alone ends."""

from collections.abc import Callable, MutableSequence

from jspec.engine import faults
from jspec.engine.runner import Dispatched, Runner
from jspec.engine.scheduler import Scheduler
from jspec.engine.sequence import EngineSequence


def survive(
    act: Callable[[], None],
    scheduler: Scheduler,
    runner: Runner,
    unread: MutableSequence[Dispatched],
) -> None:
    """Run a part of a step; after an error, sequences start again, or end by it.

    Args:
      act: the part.
      scheduler, runner: of the engine.
      unread: its launches that are not read yet; none after an error.
    """
    try:
        act()
    except faults.INTERRUPTIONS:
        if runner.is_lost:  # Ctrl-C inside a call that had consumed its inputs
            _start_again(scheduler, runner, unread, keeps_pages=False)
        raise
    except BaseException as error:  # panics of Rust are no Exception
        keeps_pages = not (runner.is_lost or faults.is_of_device(error))
        suspects = _start_again(scheduler, runner, unread, keeps_pages=keeps_pages)
        for sequence in suspects:
            sequence.is_suspect = True
        if len(suspects) == 1:
            scheduler.fail(suspects[0], faults.of_sequence(error))
        elif not suspects:
            raise


def _start_again(
    scheduler: Scheduler,
    runner: Runner,
    unread: MutableSequence[Dispatched],
    *,
    keeps_pages: bool,
) -> list[EngineSequence]:
    """Queue all who ran, and return them. After an error of the host, pages stay."""
    unfinished = scheduler.restart(scheduler.seated)
    unread.clear()
    scheduler.leaving.clear()
    runner.reset(keeps_pages=keeps_pages)
    return unfinished
