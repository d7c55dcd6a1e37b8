"""Errors of options and of training, and the checks of options that raise them."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


class OptionError(ValueError):
    """An option that cannot work."""


class TrainingError(RuntimeError):
    """A run cannot continue; the message is one line that names the remedy."""


class Stopped(KeyboardInterrupt):
    """A signal ended a command; the message says how to resume, or is empty."""

    def __init__(self, signal: int, message: str = "stopped; run the same command to resume"):
        super().__init__(message)
        self.exit_code = 128 + signal  # as a shell reports a process that a signal ended


def bad_option(name: str, value: Any, remedy: str) -> OptionError:
    """Return the error of an option that cannot work, under its name on the command line."""
    return OptionError(f"--{name.replace('_', '-')} {value!r} does not work; {remedy}")


def check_each(
    options: Any, names: Iterable[str], fits: Callable[[Any], bool], remedy: str
) -> None:
    """Raise OptionError with ``remedy`` if one of ``names`` has a value that does not fit."""
    for name in names:
        value = vars(options)[name]
        if not fits(value):
            raise bad_option(name, value, remedy)


def check_choice(options: Any, name: str, choices: Collection[str]) -> None:
    """Raise OptionError if the option is none of ``choices``."""
    check_each(options, [name], lambda x: x in choices, f"choose one of {', '.join(choices)}")


def check_least(options: Any, least: float, *names: str) -> None:
    """Raise OptionError if one of ``names`` is infinite or below ``least``."""
    check_each(options, names, lambda x: least <= x < math.inf, f"it must be at least {least}")


def check_positive(options: Any, *names: str) -> None:
    """Raise OptionError if one of ``names`` is infinite or not above 0."""
    check_each(options, names, lambda x: 0 < x < math.inf, "it must be above 0 and finite")


def refuse_idle(options: Any, usual: Mapping[str, Any], idle: Mapping[str, str]) -> None:
    """Raise OptionError if an option without effect differs from its default in ``usual``.

    ``idle`` maps the names of options without effect to the remedy.
    """
    for name, remedy in idle.items():
        value = vars(options)[name]
        if value != usual[name]:
            raise bad_option(name, value, remedy)
