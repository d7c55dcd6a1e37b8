"""What stops a run, told in one line with its remedy."""

import contextlib
from collections.abc import Callable, Iterator

import jax

from training.trainer.settings import TrainerSettings


class TrainingError(RuntimeError):
    """A run cannot go on; the message is one line that names the remedy."""


@contextlib.contextmanager
def explained(settings: TrainerSettings, where: Callable[[], str]) -> Iterator[None]:
    """Turns running out of memory, of a device or the host, into a ``TrainingError``.

    Args:
      settings: of the run; their values stand in the message.
      where: says how far the run is, and what is left of it.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(
            f"out of memory {where()}; give more --accumulate (was {settings.accumulate}), a "
            f"smaller --batch (was {settings.batch}), or spread the weights over more devices "
            f"(--fsdp, was {settings.fsdp})"
        ) from error
