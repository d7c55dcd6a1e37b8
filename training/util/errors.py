"""Errors of options and of training, and the checks of options that raise them."""

import contextlib
import dataclasses
import errno
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
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


def file_error(error: OSError, options: Any) -> str:
    """Return one line about a file that cannot be read or written, with the option that names it.

    ``options`` is a dataclass, or None; fields of its dataclass fields are options too.
    """
    cause = error.strerror or str(error)
    if error.filename is None:
        return f"{cause}; free some space, or name another place"
    file = Path(os.path.abspath(error.filename))
    best = None
    for name, value in _words(options):
        path = Path(os.path.abspath(value))
        # A folder above the option's path is one that could not be made.
        if file.is_relative_to(path) or path.is_relative_to(file):
            shared = len(os.path.commonpath([file, path]))
            best = max(best or (0, "", ""), (shared, name, value))
    where = f"{cause}: {error.filename}"
    if best is None:
        return where
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room there, or name another place" if full else "name another place"
    return str(bad_option(best[1], best[2], f"{where}; {remedy}"))


def _words(options: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and values of all options that may be paths."""
    for name, value in vars(options).items() if dataclasses.is_dataclass(options) else ():
        if dataclasses.is_dataclass(value):
            yield from _words(value)
        for word in value if isinstance(value, tuple) else (value,):
            if isinstance(word, str) and word:
                yield name, word


@contextlib.contextmanager
def adding_filename(path: Any) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file, such as one of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


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
